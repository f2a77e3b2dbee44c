"""Breaking a running training from outside: watching its journal, and signals to its engines' processes."""

import contextlib
import json
import os
import signal
import time
from pathlib import Path

import psutil

from verl_war.compare import processes

from .conftest import RUN_LIMIT_S

LOOK_EVERY_S = 0.1
"""The journal is written once a second."""

SOCKETS, WEIGHT_SOCKETS = Path("/tmp"), "rl-colocate-zmq-*.sock"
"""Where verl hands weights over (`ServerAdapter.zmq_handle`). A training that is killed may leave some."""

WEIGHTS_S = 3.0
"""A hand-over that still goes on after it waits for the stopped engine; far less than a replica may hang."""

ON_S, OFF_S = 0.03, 0.09
"""Of a process that runs at a quarter of its speed."""


def command_line(process):
    """Of a process; empty once it is gone: a training's short-lived helpers end while they are looked through."""
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""


class Victim:
    """A training that goes on, and what is done to it."""

    def __init__(self, run_id, journal):
        self.run_id = run_id
        self.journal = journal
        self._deadline_s = time.monotonic() + RUN_LIMIT_S
        self._events, self._read_bytes = [], 0

    def wait(self, condition, every_s=LOOK_EVERY_S):
        """Until it holds; returns what it gives."""
        while time.monotonic() < self._deadline_s:
            if found := condition():
                return found
            time.sleep(every_s)
        raise TimeoutError(f"the run did not get so far within {RUN_LIMIT_S} s")

    def wait_for(self, event, step):
        """Until an event happens in or after a step (from 1 on)."""
        self.wait(lambda: event in self._since(step))

    def has(self, event, step):
        """Whether it has happened in or after a step."""
        return event in self._since(step)

    def stop_in_weights(self, pid):
        """Stop an engine while trainers hand it weights; tried again in a later step where the stop came too late.

        verl makes a socket for each engine, and removes it once the engine has its weights. Small models' are there for
        a tenth of a second, which a busy machine may let pass between two looks.
        """
        while True:
            old = set(SOCKETS.glob(WEIGHT_SOCKETS))
            self.wait(lambda old=old: set(SOCKETS.glob(WEIGHT_SOCKETS)) - old, every_s=0.001)
            os.kill(pid, signal.SIGSTOP)
            time.sleep(WEIGHTS_S)
            if set(SOCKETS.glob(WEIGHT_SOCKETS)) - old:
                return
            os.kill(pid, signal.SIGCONT)

    def engines(self):
        """Pids of the engines that exist, stopped ones among them."""
        return sorted(p.pid for p in processes.marked_processes(self.run_id) if "EngineCore" in command_line(p))

    def actors(self, kind):
        """Pids of the Ray actors of a class."""
        return sorted(
            p.pid for p in processes.marked_processes(self.run_id) if command_line(p).startswith(f"ray::{kind}")
        )

    def slow_down(self, pid, until):
        """Let an engine and its workers run for a quarter of the time until a condition holds."""
        engine = psutil.Process(pid)
        slowed = [engine, *engine.children(recursive=True)]
        while not until():
            for process in slowed:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.suspend()
            time.sleep(OFF_S)
            for process in slowed:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.resume()
            time.sleep(ON_S)

    def _since(self, step):
        self._read_on()
        begun = [at for at, event in enumerate(self._events) if event == "step_begin"]
        return self._events[begun[step - 1] :] if len(begun) >= step else []

    def _read_on(self):
        """Only what is new: reading all of it, ten times a second, would take a part of a core from the training."""
        if not self.journal.exists():
            return
        with self.journal.open("rb") as file:
            file.seek(self._read_bytes)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._read_bytes += len(whole + newline)
        self._events += [json.loads(line).get("event", "header") for line in whole.splitlines()]
