"""Journals: a tiny one whose numbers can be told by hand, and a simulated one."""

import json

import pytest

from tests.report.simulated import simulate
from verl_war.core.config import WarConfig
from verl_war.core.journal import RecordingManager, as_record, header
from verl_war.core.types import Turn, TurnResult


class Tiny:
    """Drives a manager and notes where turns run."""

    def __init__(self, config, replicas=1):
        self.entries = []
        self.config = config
        self.manager = RecordingManager(config, False, self.entries.append)
        self.where = {}
        for number in range(replicas):
            self.manager.on_replica_up(f"r{number}", 10.0)

    def ask(self, name, at_s, prompt, **fields):
        fields = {"policy_step": 3} | fields
        turn = Turn(session_id=name, trajectory_id=name, prompt_tokens=prompt, **fields)
        for placement in self.manager.on_turn(turn, at_s):
            self.where[placement.trajectory_id] = placement.replica_id

    def answer(self, name, at_s, tokens, cached=0, last=False):
        result = TurnResult(completion_tokens=tokens, num_cached_tokens=cached)
        self.manager.on_turn_end(name, name, self.where[name], result, at_s)
        if last:
            self.manager.on_trajectory_end(name, False, at_s)

    def lines(self):
        return [json.dumps(it) for it in (header(self.config, False), *(as_record(entry) for entry in self.entries))]

    def write(self, path):
        path.write_text("".join(line + "\n" for line in self.lines()))
        return path


@pytest.fixture
def tiny():
    """Three trajectories of one step, which begins at 10 s: b ends at 12, c at 14, a (with a tool call) at 18."""
    tiny = Tiny(WarConfig(seed=0))
    tiny.manager.on_step_begin(3, 3, 10.0, 1)
    tiny.ask("a", 11.0, 100)
    tiny.ask("b", 11.0, 100)
    tiny.ask("c", 12.0, 100)
    tiny.answer("b", 12.0, 10, last=True)
    tiny.answer("a", 13.0, 10)
    tiny.answer("c", 14.0, 10, last=True)
    tiny.ask("a", 16.0, 160)
    tiny.answer("a", 18.0, 20, cached=90, last=True)
    return tiny


@pytest.fixture
def tiny_journal(tiny, tmp_path):
    return tiny.write(tmp_path / "journal.jsonl")


@pytest.fixture(scope="session")
def simulated(tmp_path_factory):
    """Two replicas, one of them slow, two steps, speculation at their ends."""
    path = tmp_path_factory.mktemp("simulated") / "journal.jsonl"
    return simulate(path, replicas=2, load=4, steps=2, hardware="h100_8b", slowdown={1: 2.0})
