"""Stands in for `verl.trainer.main_ppo`: same files, same format, no model. Behaviour comes from `fake.*` overrides.

fake.crash_at=K    raise before step K is logged, at the first start only
fake.oom_at=K      lose workers at step K and wait for them, at the first start only
fake.hang_at=K     stop making progress at step K, at the first start only
fake.stubborn=1    ignore SIGINT and SIGTERM
fake.daemons=1     leave behind: a detached daemon without environment, and a shared memory segment
fake.scale=X       factor on all seconds and tokens, for the arm that runs `rollout=war`
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

DAEMON = """
import os, sys, signal, time
if os.fork(): os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(sys.argv[1], "a").write(str(os.getpid()) + "\\n")
time.sleep(600)
"""


def options(arguments):
    pairs = (argument.lstrip("+").partition("=") for argument in arguments if "=" in argument)
    return {key: value for key, _, value in pairs}


def record(step, scale):
    """Sixteen trajectories of 100 prompt tokens and 10 * step * scale response tokens."""
    responses = 10.0 * step * scale
    return {
        "training/global_step": step,
        "critic/score/mean": 0.1 * step,
        "prompt_length/mean": 100.0,
        "response_length/mean": responses,
        "perf/total_num_tokens": 16 * (100.0 + responses),
        "num_turns/mean": 4.0,
        "timing_s/gen": step * scale,
        "timing_s/step": 2.0 * step * scale,
    }


def save_checkpoint(folder, step):
    (folder / f"global_step_{step}").mkdir(parents=True, exist_ok=True)
    (folder / f"global_step_{step}" / "data.pt").write_text("x")
    (folder / "latest_checkpointed_iteration.txt").write_text(str(step))


def leave_behind(folder):
    pids = folder.parent / "daemons"
    subprocess.run([sys.executable, "-c", DAEMON, str(pids)], env={}, check=True)
    while not pids.exists():
        time.sleep(0.01)
    segment = Path("/dev/shm") / f"psm_{os.getpid()}"
    segment.write_text("x")
    (folder.parent / "segment").write_text(str(segment))


def main():
    given = options(sys.argv[1:])
    folder = Path(given["trainer.default_local_dir"].strip("'"))
    scale = float(given.get("fake.scale", 1)) if given["rollout@actor_rollout_ref.rollout"] == "war" else 1.0
    tracker = folder / "latest_checkpointed_iteration.txt"
    done = int(tracker.read_text()) if tracker.exists() else 0
    metrics = Path(os.environ["VERL_FILE_LOGGER_PATH"])
    is_first = metrics.name == "attempt-001.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder.parent / "starts").open("a") as starts:
        starts.write(f"{done}\n")
    if "fake.stubborn" in given:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "fake.daemons" in given:
        leave_behind(folder)
    with metrics.open("w", buffering=1) as file:
        for step in range(done + 1, int(given["trainer.total_training_steps"]) + 1):
            if is_first and step == int(given.get("fake.hang_at", 0)):
                print(f"hanging at {step}", flush=True)
                time.sleep(600)
            if is_first and step == int(given.get("fake.oom_at", 0)):
                print("(raylet) 5 Workers (tasks / actors) killed due to memory pressure (OOM), 0 Workers", flush=True)
                time.sleep(600)
            if is_first and step == int(given.get("fake.crash_at", 0)):
                raise RuntimeError(f"no luck in step {step}")
            save_checkpoint(folder, step)
            file.write(json.dumps({"step": step, "data": record(step, scale)}) + "\n")


if __name__ == "__main__":
    main()
