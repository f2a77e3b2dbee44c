"""Plans, records and trajectories that need no engine."""

from pathlib import Path

from verl_war.compare.fixed_work.episodes import Task, Turn
from verl_war.compare.fixed_work.plan import Case, FixedWorkPlan, Run
from verl_war.compare.fixed_work.records import record_of
from verl_war.compare.fixed_work.results import Replayed, TurnRecord
from verl_war.sim.trace import TrajectorySpec, TurnSpec

ROOT = Path(__file__).parents[3]
KV_TOKENS = 4096

TASKS = (
    Task([1, 2, 3, 10], ((Turn(5, [20, 9]), Turn(6, [21, 22, 9]), Turn(7, [])), (Turn(8, []),))),
    Task([1, 2, 3, 11, 12], ((Turn(4, [23, 9]), Turn(3, [])), (Turn(2, []),), (Turn(1, [24, 9]), Turn(9, [])))),
    Task([1, 2, 3, 13], ((Turn(5, [25, 9]), Turn(5, [26, 27, 9]), Turn(5, [])), (Turn(5, []),))),
)
"""A recording, in which a sample of two tasks was left out."""


def spec(name, turns=3, group="g", output=10, tool=20, prompt=100):
    """A trajectory of equal turns."""
    return TrajectorySpec(
        trajectory_id=name,
        group_id=group,
        system_tokens=40,
        prompt_tokens=prompt,
        turns=tuple(TurnSpec(output, 1.0, tool) for _ in range(turns)),
    )


SPECS = (spec("g-0"), spec("g-1"), spec("h-0", group="h"))
"""90 tokens to generate."""


def plan(out, **changes):
    values = dict(
        arms=("stock", "margin", "war"),
        loads=(2, 8),
        repeats=2,
        replicas=2,
        kv_tokens=KV_TOKENS,
        recipe="code_agent",
        trace="",
        clock_scale=1.0,
        seed=1,
        limit_s=600.0,
        memory_bytes=0,
        out=Path(out),
        repo=ROOT,
    )
    return FixedWorkPlan(**(values | changes))


def replayed(makespan_s=10.0, output=10, specs=SPECS, held_s=0.0, **changes):
    """A run in which the turns of each trajectory follow one another evenly, on two replicas."""
    done = Replayed(makespan_s=makespan_s, busy_s={"r0": 4.0, "r1": 3.0}, computed_tokens=500, **changes)
    for number, it in enumerate(specs):
        share_s = makespan_s / len(it.turns) * (number + 1) / len(specs)
        for turn in range(len(it.turns)):
            begin_s = turn * share_s
            done.turns.append(
                TurnRecord(
                    *(it.trajectory_id, turn, f"r{number % 2}", begin_s, begin_s + held_s, begin_s + share_s),
                    *(100 + 30 * turn, 64 * turn, output),
                )
            )
        done.end_s[it.trajectory_id] = share_s * len(it.turns)
    return done


def record(arm="stock", load=2, repeat=1, makespan_s=10.0, cause="", attempt=1, **changes):
    """The record of such a run."""
    run = Run(case=Case(load=load, repeat=repeat, seed=repeat), arm=arm)
    return record_of(run, SPECS, replayed(makespan_s, **changes), KV_TOKENS, cause, attempt=attempt, version="1")
