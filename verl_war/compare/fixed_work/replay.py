"""One run: all trajectories of a step on the engines of an arm, turn lengths forced, tool delays as recorded.

What is generated goes into the next turn's context, as in an agent loop; only how much is generated is fixed, so arms
do the same work whatever they sample.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray

from verl_war.compare.fixed_work.arms import Arm
from verl_war.compare.fixed_work.results import EarlierText, Replayed, RunFailed, TurnRecord
from verl_war.compare.fixed_work.routers import make_client
from verl_war.compare.fixed_work.texts import Texts
from verl_war.integration.verl.failures import cause_of
from verl_war.sim.trace import TrajectorySpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What all arms of a comparison replay.

    Attributes:
        specs: The trajectories.
        texts: What they say besides what is generated.
        number: Policy step; engines forget the text of steps long before.
        seed: Of the routers' tie-breaks.
        limit_s: A run that takes longer has failed.
    """

    specs: Sequence[TrajectorySpec]
    texts: Texts
    number: int
    seed: int
    limit_s: float = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Engines:
    """Replicas by name, and how much KV each of them has."""

    servers: dict[str, Any]
    kv_tokens: int


async def replay(
    arm: Arm, engines: Engines, step: Step, earlier: Sequence[tuple[str, EarlierText]] = (), keeps_texts: bool = False
) -> Replayed:
    """Run all trajectories from empty caches until the last has ended.

    Args:
        arm: How they are served.
        engines: Engines of the arm's kind.
        step: The work.
        earlier: Text of an earlier step, for an arm that may know it; vLLM's suffix decoding gets what it generated on
            the same replica.
        keeps_texts: Whether the result holds the trajectories' text.

    Raises:
        RunFailed: A turn failed, or the limit of time was reached.
    """
    servers = engines.servers
    await _prepare(arm, servers, step, earlier if arm.knows_earlier_step else ())
    before = await _read(servers)
    router, client = make_client(arm, servers, engines.kv_tokens, step.specs, step.seed)
    is_war = arm.settings is not None
    await router.__ray_ready__.remote()  # its process starts up for seconds, in all arms
    if is_war:
        await router.join.remote(client.war_config, False, "replay", None, None)
        await router.begin_step.remote(step.number, len(step.specs), _group_size(step.specs, arm.announces_groups))
    router_cpu_s, client_cpu_s = await router.__ray_call__.remote(_cpu_s), _cpu_s()
    player = _Player(arm, client, step, keeps_texts)
    done = player.done
    try:
        await player.play()
        done.client_cpu_s = _cpu_s() - client_cpu_s
        done.router_cpu_s = await router.__ray_call__.remote(_cpu_s) - router_cpu_s
        if is_war:
            done.war = await router.step_metrics.remote()
    finally:
        if is_war and client.link._listening is not None:
            client.link._listening.cancel()  # or it waits for the router to come back
        ray.kill(router)
        # Or engines would exchange text beside the next arm's run on others.
        await asyncio.gather(*(it.war_share_with.remote([]) for it in servers.values()), return_exceptions=True)
    for name, reading in (await _read(servers)).items():
        _add(done, name, before[name], reading)
    return done


def _group_size(specs: Sequence[TrajectorySpec], announces_groups: bool) -> int:
    return sum(spec.group_id == specs[0].group_id for spec in specs) if announces_groups else 1


async def _prepare(arm: Arm, servers: dict[str, Any], step: Step, earlier: Sequence[tuple[str, EarlierText]]) -> None:
    def of(replica_id: str) -> list[EarlierText]:
        return [text for name, text in earlier if arm.engine != "suffix" or name == replica_id]

    await asyncio.gather(
        *(server.prepare.remote(arm.name, arm.config, step.number, of(name)) for name, server in servers.items())
    )


@dataclass(frozen=True, slots=True)
class _Reading:
    snapshot: Any
    drafts: tuple[int, int]
    speculation: dict[str, Any]
    peak_rss_bytes: int


async def _read(servers: dict[str, Any]) -> dict[str, _Reading]:
    """Readings of all replicas."""

    async def read(server: Any) -> _Reading:
        return _Reading(
            await server.war_snapshot.remote(),
            await server.drafts.remote(),
            await server.war_speculation_stats.remote() or {},
            await server.peak_rss_bytes.remote(),
        )

    return dict(zip(servers, await asyncio.gather(*map(read, servers.values())), strict=True))


SPECULATION_COUNTERS = ("steps", "drafting_steps", "draft_s", "step_s")
"""Of `Speculation.report`."""


def _add(done: Replayed, name: str, before: _Reading, after: _Reading) -> None:
    """Add what a replica did in the run."""
    for counter in ("preemptions", "computed_tokens", "engine_steps"):
        grown = getattr(after.snapshot, counter) - getattr(before.snapshot, counter)
        setattr(done, counter, getattr(done, counter) + grown)
    done.drafted_tokens += after.drafts[0] - before.drafts[0]
    done.accepted_tokens += after.drafts[1] - before.drafts[1]
    done.busy_s[name] = after.snapshot.busy_s - before.snapshot.busy_s
    done.peak_rss_bytes += after.peak_rss_bytes
    for counter in SPECULATION_COUNTERS if after.speculation else ():
        grown = after.speculation[counter] - before.speculation.get(counter, 0)
        done.speculation[counter] = done.speculation.get(counter, 0) + grown


def _cpu_s(_actor: Any = None) -> float:
    """CPU time of this process."""
    return time.process_time()


class _Player:
    """The agent loops of a run."""

    def __init__(self, arm: Arm, client: Any, step: Step, keeps_texts: bool) -> None:
        self.done = Replayed()
        self._client, self._step, self._keeps_texts = client, step, keeps_texts
        self._is_war, self._has_priority = arm.settings is not None, arm.engine == "priority"
        self._granted: dict[str, tuple[float, str]] = {}
        self._demand_tokens = 0
        self._begin_s = 0.0
        acquire = client._acquire_server

        async def timed(request_id: str, **extra: Any) -> Any:
            grant = await acquire(request_id, **extra)
            self._granted[request_id] = (self._now_s(), grant[0])
            return grant

        client._acquire_server = timed

    async def play(self) -> None:
        """Run all trajectories.

        Raises:
            RunFailed: One of them failed, or the limit of time was reached.
        """
        self._begin_s = time.perf_counter()
        loops = [asyncio.ensure_future(self._trajectory(*numbered)) for numbered in enumerate(self._step.specs)]
        ended, running = await asyncio.wait(loops, timeout=self._step.limit_s, return_when=asyncio.FIRST_EXCEPTION)
        self.done.makespan_s = self._now_s()
        for loop in running:
            loop.cancel()
        await asyncio.gather(*loops, return_exceptions=True)
        errors = [loop.exception() for loop in ended if loop.exception() is not None]
        if errors:
            raise RunFailed(cause_of(errors[0]), self.done) from errors[0]
        if running:
            raise RunFailed(f"{len(running)} trajectories had not ended after {self._step.limit_s:g} s", self.done)

    async def _trajectory(self, position: int, spec: TrajectorySpec) -> None:
        from verl_war.integration.verl.client import TrajectoryIdentity, current_trajectory

        await asyncio.sleep(spec.start_s)
        name = spec.trajectory_id
        current_trajectory.set(
            TrajectoryIdentity(
                trajectory_id=name, group_id=spec.group_id, policy_step=self._step.number, validate=False
            )
        )
        context = self._step.texts.prompt(spec)
        group = hashlib.blake2b(array("q", context).tobytes(), digest_size=8).hexdigest()
        lengths: list[tuple[int, int]] = []
        self._demand(len(context))
        for number, turn in enumerate(spec.turns):
            output = await self._turn(spec, number, position, context)
            lengths.append((len(context), len(output)))
            context = context + output
            self._demand(len(output))
            if number + 1 < len(spec.turns):
                await asyncio.sleep(turn.tool_s)
                context = context + self._step.texts.tool_output(spec, number)
                self._demand(turn.tool_tokens)
        self._demand(-len(context))
        self.done.end_s[name] = self._now_s()
        if self._keeps_texts:
            self.done.texts.append((self._granted[name][1], (name, group, lengths[0][0], context, lengths)))
        if self._is_war:
            self._client.end_trajectory(name, failed=False)

    async def _turn(self, spec: TrajectorySpec, number: int, position: int, context: list[int]) -> list[int]:
        name, tokens = spec.trajectory_id, spec.turns[number].output_tokens
        # The end token is kept from being sampled, not only ignored: behind it the model has nothing to say; recorded
        # episodes have it before what the tool says. No seed: with one, vLLM on a CPU dies of a prompt that it reads in
        # chunks (gpu_model_runner.py:3750, 0.27.1: generators of a CPU have no offset), and with drafts it would not
        # reproduce the text anyway. A minimum below the maximum would cost each turn a step without drafts.
        sampling = {"max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True, "temperature": 1.0}
        asked_s = self._now_s()
        # As verl numbers a batch (experimental/agent_loop/agent_loop.py:1245, 0.9.1).
        priority = position if self._has_priority else 0
        output = await self._client.generate(name, prompt_ids=context, sampling_params=sampling, priority=priority)
        started_s, replica_id = self._granted[name]
        cached = output.extra_fields["num_cached_tokens"]
        self.done.turns.append(
            TurnRecord(
                *(name, number, replica_id, asked_s, started_s, self._now_s()),
                *(len(context), cached, len(output.token_ids)),
            )
        )
        return list(output.token_ids)

    def _demand(self, tokens: int) -> None:
        self._demand_tokens += tokens
        self.done.kv_demand_peak_tokens = max(self.done.kv_demand_peak_tokens, self._demand_tokens)

    def _now_s(self) -> float:
        return time.perf_counter() - self._begin_s
