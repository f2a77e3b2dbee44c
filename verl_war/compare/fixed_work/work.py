"""The process that carries a fixed-work comparison out: engines, replays, records. Started by `command`.

python -m verl_war.compare.fixed_work.work PLAN_AS_JSON
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from ray.exceptions import RayError

from verl_war.compare.fixed_work import records
from verl_war.compare.fixed_work.arms import ARMS, Arm, EngineKind
from verl_war.compare.fixed_work.engines import EngineSpec, machine_dtype, start_servers, stop_servers
from verl_war.compare.fixed_work.plan import WARM_UP, Case, FixedWorkPlan, Run, plan_from_json
from verl_war.compare.fixed_work.progress import MARK
from verl_war.compare.fixed_work.replay import Engines, Step, replay
from verl_war.compare.fixed_work.results import EarlierText, Replayed, RunFailed
from verl_war.integration.verl.failures import cause_of
from verl_war.sim.trace import TrajectorySpec, write_trace
from verl_war.version import clone_version

STEPS_APART = 100
"""Policy steps between two runs on an engine: more than any history keeps (`history.window_steps`)."""

EARLIER_SEED = 1_000_000
"""Added to a case's seed for the step before."""


Start = Callable[[EngineSpec, int], Awaitable[dict[str, Any]]]
Play = Callable[..., Awaitable[Replayed]]


RUN_ERRORS = (RunFailed, RayError, RuntimeError, OSError)
"""What ends one run and leaves the others worth having."""


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, RunFailed) else cause_of(error)


def say(text: str) -> None:
    """For the terminal of the command, which reads this process's output."""
    print(f"{MARK}{text}", flush=True)


class Worker:
    """Carries a plan out.

    Args:
        plan: What to run.
        start: Starts the engines of a kind.
        play: Makes a run.
    """

    def __init__(self, plan: FixedWorkPlan, start: Start = start_servers, play: Play = replay) -> None:
        self._plan, self._start, self._play = plan, start, play
        self._texts = plan.texts()
        self._engines: dict[EngineKind, Engines] = {}
        self._version = clone_version(plan.repo)
        self._step = 0
        self.failed: list[str] = []

    async def work(self) -> None:
        """Make all runs that are not done yet."""
        for case in self._plan.cases():
            runs = [Run(case=case, arm=name) for name in self._plan.order(case)]
            missing = [run for run in runs if not records.is_done(self._plan.runs_directory, run)]
            if missing:
                await self._case(case, missing)

    async def _case(self, case: Case, runs: Sequence[Run]) -> None:
        specs = self._plan.specs(case)
        write_trace(self._plan.out / f"trace_{case.name}.jsonl", specs)
        arms = [ARMS[run.arm] for run in runs]
        for arm in arms:
            await self._engines_of(arm)
        earlier, broken = [], ""
        if any(arm.knows_earlier_step for arm in arms):
            try:
                earlier = await self._earlier_step(case, specs, arms[0])
            except RUN_ERRORS as error:
                broken = f"the text of an earlier step could not be generated ({_words(error)})"
                self._stop(arms[0])
        for run, arm in zip(runs, arms, strict=True):
            say(f"load {case.load:g}, repeat {case.repeat}: {arm.name}")
            await self._run(run, arm, specs, earlier, broken if arm.knows_earlier_step else "")

    async def _run(
        self,
        run: Run,
        arm: Arm,
        specs: Sequence[TrajectorySpec],
        earlier: Sequence[tuple[str, EarlierText]],
        cause: str,
    ) -> None:
        """Make a run and save its record; with a `cause` that forbids it, only the record of its failure."""
        facts: dict[str, Any] = {
            "begun_at": time.strftime("%Y-%m-%d %H:%M:%S"),
            "version": self._version,
            "attempt": 1 + records.attempts(self._plan.runs_directory, run),
        }
        done = Replayed()
        try:
            if not cause:
                engines = await self._engines_of(arm)
                done = await self._play(arm, engines, self._next_step(specs, run.case.seed), earlier)
        except RUN_ERRORS as error:
            done, cause = error.so_far if isinstance(error, RunFailed) else done, _words(error)
            self._stop(arm)
        record = records.record_of(run, specs, done, self._plan.kv_tokens, cause, **facts)
        records.save(self._plan.runs_directory, record)
        if record.status != "complete":
            self.failed.append(run.name)
            say(f"{run.name} {record.status}: {record.cause}")

    def _stop(self, arm: Arm) -> None:
        """End the engines of an arm that failed: requests may still be on them. The next run starts others."""
        if arm.engine in self._engines:
            stop_servers(self._engines.pop(arm.engine).servers)

    async def _earlier_step(
        self, case: Case, specs: Sequence[TrajectorySpec], arm: Arm
    ) -> list[tuple[str, EarlierText]]:
        """What stock verl's rule generates in a step before, with the same prompts and other random numbers."""
        say(f"load {case.load:g}, repeat {case.repeat}: the text of an earlier step")
        step = self._next_step(specs, case.seed + EARLIER_SEED)
        return (await self._play(ARMS["stock"], await self._engines_of(arm), step, keeps_texts=True)).texts

    async def _engines_of(self, arm: Arm) -> Engines:
        """Engines of the arm's kind, started and warm."""
        if arm.engine not in self._engines:
            plan = self._plan
            say(f"starting {plan.replicas} engines ({arm.engine})")
            spec = EngineSpec(
                model=str(plan.model), kv_tokens=plan.kv_tokens, max_model_len=plan.kv_tokens, kind=arm.engine,
                dtype=machine_dtype(),
            )  # fmt: skip
            engines = Engines(servers=await self._start(spec, plan.replicas), kv_tokens=plan.kv_tokens)
            self._engines[arm.engine] = engines
            say(f"warming up ({arm.engine})")
            # Without drafts, and with them; under another name, for engines know arms again by theirs.
            with_drafts = dataclasses.replace(ARMS["war"] if arm.engine == "war" else arm, name="warm_up")
            for first in (ARMS["stock"], with_drafts):
                await self._play(first, engines, self._next_step(plan.warm_up(), WARM_UP.seed))
        return self._engines[arm.engine]

    def _next_step(self, specs: Sequence[TrajectorySpec], seed: int) -> Step:
        self._step += STEPS_APART
        return Step(specs=specs, texts=self._texts, number=self._step, seed=seed, limit_s=self._plan.limit_s)


def main(arguments: Sequence[str]) -> int:
    """Returns 0, or 1 when a run failed or was refused."""
    import ray

    plan = plan_from_json(arguments[0])
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=200_000_000,
        _temp_dir=os.environ.get("RAY_TMPDIR"),
        log_to_driver=True,
        _system_config={"worker_niceness": 0},
        runtime_env={"env_vars": {"PYTHONPATH": os.environ.get("PYTHONPATH", str(Path.cwd()))}},
    )
    worker = Worker(plan)
    asyncio.run(worker.work())
    ray.shutdown()
    return 1 if worker.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
