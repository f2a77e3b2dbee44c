"""One rollout step on a virtual clock: trajectories, tools and replicas, with a policy between them."""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections import Counter
from collections.abc import Sequence

from verl_war.core.types import ReplicaSnapshot, Turn, TurnResult
from verl_war.sim.draft_world import Siblings, TurnDrafts
from verl_war.sim.fleet import Fleet, Outcome
from verl_war.sim.kv_cache import BLOCK_TOKENS, UNLIMITED_BLOCKS, Path, PathPart
from verl_war.sim.policies.base import Policy, Start
from verl_war.sim.replica import Replica
from verl_war.sim.request import Request
from verl_war.sim.trace import TrajectorySpec

SNAPSHOT_INTERVAL_S = 0.5
"""How often a live server reports."""

SPECULATION_INTERVAL_S = 1.0
"""How often the live router asks an engine how it speculates."""

TICK_INTERVAL_S = 0.5
"""How often the live router's clock ticks."""

STALL_S = 3600.0
"""Nothing runs and nothing is on its way for so long: the policy holds turns for ever."""


class _Live:
    """A trajectory on its way."""

    __slots__ = ("spec", "index", "context", "path", "hashes", "asked_s", "replica", "last_replica", "turn")

    def __init__(self, spec: TrajectorySpec, path: Path, hashes: list[int]) -> None:
        self.spec = spec
        self.index = 0
        self.context = spec.prompt_tokens
        self.path = path
        self.hashes = hashes
        self.asked_s = 0.0
        self.replica = -1
        self.last_replica = -1
        self.turn: Turn | None = None


class Simulator:
    """Runs one policy over one workload.

    Args:
        fleet: The replicas.
        trajectories: The work, in the order in which it arrives.
        policy: Decides where and when every turn runs.
        after: The step of the same training that went before, which has been run. Its replicas go on with empty caches
            and new weights, and `policy` must be its policy.

    Raises:
        ValueError: A trajectory does not fit into a replica's KV cache, or there is no replica.
    """

    def __init__(
        self, fleet: Fleet, trajectories: Sequence[TrajectorySpec], policy: Policy, after: Simulator | None = None
    ) -> None:
        if not trajectories:
            raise ValueError("there is no trajectory to simulate; give at least one")
        if fleet.replicas < 1:
            raise ValueError(f"replicas={fleet.replicas} must be at least 1")
        capacity = fleet.hardware.kv_capacity_tokens // BLOCK_TOKENS * BLOCK_TOKENS
        for spec in trajectories:
            if spec.final_tokens > capacity:
                raise ValueError(
                    f"trajectory {spec.trajectory_id} grows to {spec.final_tokens} tokens, but a replica of "
                    f"{fleet.hardware.name} holds {capacity}; shorten it or take hardware with more KV"
                )
        self._fleet = fleet
        self._policy = policy
        self._specs = trajectories
        self._names = [f"replica-{index}" for index in range(fleet.replicas)]
        self._index = {name: index for index, name in enumerate(self._names)}
        self._is_first = after is None
        self._policy_step: int = 1 if after is None else after._policy_step + 1
        self._begin_s: float = 0.0 if after is None else after._end_times[-1]
        self._first_key: int = 0 if after is None else after._first_key + 2 * len(after._specs)
        self._replicas: list[Replica] = (
            [_new_replica(fleet, index) for index in range(fleet.replicas)] if after is None else after._replicas
        )
        self._counters_before = [dataclasses.replace(replica.counters) for replica in self._replicas]
        self._switches_before = self._switches()
        self._siblings = Siblings(trajectories)
        self._dead: set[int] = set() if after is None else after._dead
        self._events: list[tuple[float, int, str, int, int]] = []
        self._sequence = 0
        self._live: dict[str, _Live] = {}
        self._by_key: dict[int, _Live] = {}
        self._keys: dict[str, int] = {}
        self._groups: dict[str, int] = {}
        self._end_times: list[float] = []
        self._held_s = 0.0
        self._held_turns = 0
        self._moves = 0
        self._turns = 0
        self._output_tokens = 0
        self._prompt_tokens = 0
        self._failed_turns = 0
        self._demand = 0
        self._demand_peak = 0
        self._demand_sum = 0.0
        self._demand_since = self._begin_s
        self._progress_s = self._begin_s

    def run(self) -> Outcome:
        """Simulate until the last trajectory has ended.

        Raises:
            RuntimeError: The policy broke its contract: it held turns for ever, or started one that did not ask.
        """
        begin_s = self._begin_s
        if self._is_first:
            for name in self._names:
                self._start_all(self._policy.on_replica_up(name, begin_s), begin_s)
        else:
            for replica in self._replicas:
                replica.cache.clear()
            self._policy.on_weights_updated(begin_s)
        group_size = max(Counter(spec.group_id for spec in self._specs).values())
        starts = self._policy.on_step_begin(self._policy_step, len(self._specs), begin_s, group_size)
        self._start_all(starts, begin_s)
        for key, spec in enumerate(self._specs):
            self._push(begin_s + spec.start_s, "arrive", key)
        for index in range(len(self._replicas)):
            share = 1 + index / len(self._replicas)
            self._push(begin_s + SNAPSHOT_INTERVAL_S * share, "snapshot", index)
            if self._replicas[index].drafter is not None:
                self._push(begin_s + SPECULATION_INTERVAL_S * share, "speculation", index)
        for index, down_s in self._fleet.down_at_s.items():
            self._push(begin_s + down_s, "down", index)
        self._push(begin_s + TICK_INTERVAL_S, "tick")
        handlers = {
            "arrive": self._on_arrive,
            "turn": self._on_turn,
            "steps": self._on_steps,
            "snapshot": self._on_snapshot,
            "speculation": self._on_speculation,
            "down": self._on_down,
            "tick": self._on_tick,
        }
        while len(self._end_times) < len(self._specs):
            now_s, _, kind, index, version = heapq.heappop(self._events)
            handlers[kind](index, version, now_s)
        self._check_work()
        return self._outcome()

    def _push(self, at_s: float, kind: str, index: int = 0, version: int = 0) -> None:
        self._sequence += 1
        heapq.heappush(self._events, (at_s, self._sequence, kind, index, version))

    # ---- events ------------------------------------------------------------------------------------

    def _on_arrive(self, key: int, _: int, now_s: float) -> None:
        spec = self._specs[key]
        live = _Live(spec, *self._chain(spec, key))
        self._live[spec.trajectory_id] = live
        self._by_key[key] = live
        self._keys[spec.trajectory_id] = key
        self._add_demand(live.context, now_s)
        self._ask(live, now_s)

    def _on_turn(self, key: int, _: int, now_s: float) -> None:
        self._ask(self._by_key[key], now_s)

    def _ask(self, live: _Live, now_s: float) -> None:
        blocks = live.context // BLOCK_TOKENS
        own = live.path[-1].key
        live.hashes.extend(own << 24 | position for position in range(len(live.hashes), blocks))
        live.asked_s = now_s
        live.turn = Turn(
            session_id=live.spec.trajectory_id,
            trajectory_id=live.spec.trajectory_id,
            group_id=live.spec.group_id,
            policy_step=self._policy_step,
            prompt_tokens=live.context,
            block_hashes=tuple(live.hashes[:blocks]),
        )
        self._start_all(self._policy.on_turn(live.turn, now_s), now_s)

    def _on_steps(self, index: int, version: int, now_s: float) -> None:
        replica = self._replicas[index]
        if index in self._dead or version != replica.event_version:
            return
        finished = replica.end_steps(now_s)
        self._schedule(index)
        for request in finished:
            self._end_turn(index, request, now_s)

    def _end_turn(self, index: int, request: Request, now_s: float) -> None:
        live = self._by_key[request.key]
        spec = live.spec
        turn = spec.turns[live.index]
        self._progress_s = now_s
        self._turns += 1
        self._output_tokens += request.generated
        self._prompt_tokens += request.prompt_tokens
        self._siblings.on_turn_end(request.key, live.index)
        live.index += 1
        live.replica = -1
        live.context += turn.output_tokens
        self._add_demand(turn.output_tokens, now_s)
        result = TurnResult(completion_tokens=request.generated, num_cached_tokens=request.cached_tokens)
        name = self._names[index]
        starts = self._policy.on_turn_end(spec.trajectory_id, spec.trajectory_id, name, result, now_s)
        self._start_all(starts, now_s)
        if live.index < len(spec.turns):
            live.context += turn.tool_tokens
            self._add_demand(turn.tool_tokens, now_s)
            self._push(now_s + turn.tool_s, "turn", request.key)
            return
        self._end_times.append(now_s)
        self._add_demand(-live.context, now_s)
        del self._live[spec.trajectory_id]
        self._start_all(self._policy.on_trajectory_end(spec.trajectory_id, False, now_s), now_s)

    def _on_snapshot(self, index: int, _: int, now_s: float) -> None:
        if index in self._dead:
            return
        self._push(now_s + SNAPSHOT_INTERVAL_S, "snapshot", index)
        starts = self._policy.on_snapshot(self._names[index], self._snapshot(index, now_s), now_s)
        self._start_all(starts, now_s)

    def _snapshot(self, index: int, now_s: float) -> ReplicaSnapshot:
        replica = self._replicas[index]
        counters = replica.counters
        steps, busy_s, tokens = replica.progress(now_s)
        usage = replica.cache.used_blocks / replica.cache.capacity_blocks
        peak = max(counters.used_blocks_peak / replica.cache.capacity_blocks, usage)
        counters.used_blocks_peak = replica.cache.used_blocks
        return ReplicaSnapshot(
            running_requests=replica.running,
            waiting_requests=replica.waiting,
            kv_usage=usage,
            kv_usage_peak=peak,
            kv_capacity_tokens=int(self._fleet.hardware.kv_capacity_tokens * self._fleet.misstated_capacity),
            preemptions=counters.preemptions,
            engine_steps=counters.engine_steps + steps,
            computed_tokens=counters.prefill_tokens + counters.decode_tokens + tokens,
            kv_token_steps=counters.kv_token_steps + steps * replica.cache.used_blocks * BLOCK_TOKENS,
            busy_s=counters.busy_s + busy_s,
            row_steps=float(counters.decode_tokens - counters.accepted_tokens + tokens),
        )

    def _on_speculation(self, index: int, _: int, now_s: float) -> None:
        replica = self._replicas[index]
        if index in self._dead or replica.drafter is None:
            return
        self._push(now_s + SPECULATION_INTERVAL_S, "speculation", index)
        reading = replica.drafter.reading(replica.counters.engine_steps, replica.counters.busy_s)
        self._start_all(self._policy.on_speculation(self._names[index], reading, now_s), now_s)

    def _on_tick(self, _: int, __: int, now_s: float) -> None:
        self._push(now_s + TICK_INTERVAL_S, "tick")
        self._start_all(self._policy.on_tick(now_s), now_s)
        busy = any(replica.running or replica.waiting for replica in self._replicas)
        if not busy and now_s - self._progress_s > STALL_S:
            held = [name for name, live in self._live.items() if live.turn is not None]
            raise RuntimeError(
                f"{type(self._policy).__name__} has held {len(held)} turns for {STALL_S:g} s while no replica works, "
                f"for instance of {held[:3]}; a policy must always let something run"
            )

    def _on_down(self, index: int, _: int, now_s: float) -> None:
        """A replica dies: its turns fail and are asked for again."""
        self._dead.add(index)
        if len(self._dead) == len(self._replicas):
            raise RuntimeError(f"all {len(self._replicas)} replicas are down at {now_s:g} s; leave one up in down_at_s")
        lost = self._replicas[index].drop_all()
        name = self._names[index]
        self._start_all(self._policy.on_replica_down(name, now_s), now_s)
        for request in lost:
            live = self._by_key[request.key]
            live.replica = -1
            self._failed_turns += 1
            who = live.spec.trajectory_id
            self._start_all(self._policy.on_turn_end(who, who, name, TurnResult(failed=True), now_s), now_s)
            self._ask(live, now_s)

    # ---- starting ----------------------------------------------------------------------------------

    def _start_all(self, starts: Sequence[Start], now_s: float) -> None:
        for start in starts:
            live = self._live.get(start.trajectory_id)
            if live is None or live.turn is None:
                raise RuntimeError(f"{type(self._policy).__name__} started {start}, which has not asked for a turn")
            index = self._index[start.replica_id]
            if index in self._dead:
                raise RuntimeError(f"{type(self._policy).__name__} started {start} on a replica that is down")
            live.turn = None
            live.replica = index
            self._moves += live.last_replica not in (-1, index)
            live.last_replica = index
            self._held_s += now_s - live.asked_s
            self._held_turns += now_s > live.asked_s
            self._progress_s = now_s
            turn = live.spec.turns[live.index]
            key = self._keys[start.trajectory_id]
            drafts = self._drafts_of(key, live.index)
            request = Request(key, live.path, live.context, turn.output_tokens, start.priority, drafts)
            before = self._replicas[index].event_version
            self._replicas[index].submit(request, now_s)
            if self._replicas[index].event_version != before:
                self._schedule(index)

    def _drafts_of(self, key: int, turn: int) -> TurnDrafts | None:
        texts = self._fleet.texts
        return None if texts is None else TurnDrafts(texts.of(key, turn), self._siblings.ahead(key, turn))

    def _schedule(self, index: int) -> None:
        replica = self._replicas[index]
        if replica.event_s is not None:
            self._push(replica.event_s, "steps", index, replica.event_version)

    def _chain(self, spec: TrajectorySpec, key: int) -> tuple[Path, list[int]]:
        """Path in the prefix cache, and the hashes of the prompt's blocks."""
        system_blocks = spec.system_tokens // BLOCK_TOKENS
        prompt_blocks = spec.prompt_tokens // BLOCK_TOKENS
        # Extent keys: 0 for the system prompt, odd for groups, even for trajectories; none is of an earlier step.
        group = self._groups.setdefault(spec.group_id, self._first_key + 2 * len(self._groups) + 1)
        parts = (PathPart(0, system_blocks), PathPart(group, prompt_blocks - system_blocks))
        own = PathPart(self._first_key + 2 * key + 2, UNLIMITED_BLOCKS)
        hashes = list(range(system_blocks))
        hashes.extend(group << 24 | position for position in range(system_blocks, prompt_blocks))
        return (*(part for part in parts if part.blocks), own), hashes

    # ---- results -----------------------------------------------------------------------------------

    def _add_demand(self, tokens: int, now_s: float) -> None:
        self._demand_sum += self._demand * (now_s - self._demand_since)
        self._demand_since = now_s
        self._demand += tokens
        self._demand_peak = max(self._demand_peak, self._demand)

    def _check_work(self) -> None:
        """Every turn was served once, with the tokens that the workload says."""
        assert self._turns == sum(len(spec.turns) for spec in self._specs)
        assert self._output_tokens == sum(spec.output_tokens for spec in self._specs)
        assert not self._live and self._demand == 0

    def _outcome(self) -> Outcome:
        times = [end_s - self._begin_s for end_s in self._end_times]
        makespan = times[-1]
        share = {percent: times[math.ceil(len(times) * percent / 100) - 1] for percent in (50, 90, 99)}
        pairs = zip(self._replicas, self._counters_before, strict=True)
        counters = [replica.counters.since(before) for replica, before in pairs]
        cached = sum(counter.cached_tokens for counter in counters)
        capacity = self._fleet.replicas * self._fleet.hardware.kv_capacity_tokens
        return Outcome(
            makespan_s=makespan,
            t50_s=share[50],
            t90_s=share[90],
            t99_s=share[99],
            turns=self._turns,
            output_tokens=self._output_tokens,
            prompt_tokens=self._prompt_tokens,
            prefill_tokens=sum(counter.prefill_tokens for counter in counters),
            cached_tokens=cached,
            hit_rate=cached / self._prompt_tokens,
            preemptions=sum(counter.preemptions for counter in counters),
            held_s=self._held_s,
            held_turns=self._held_turns,
            moves=self._moves,
            failed_turns=self._failed_turns,
            kv_demand_mean=self._demand_sum / makespan / capacity,
            kv_demand_peak=self._demand_peak / capacity,
            busy_share=tuple(counter.busy_s / makespan for counter in counters),
            engine_steps=sum(counter.engine_steps for counter in counters),
            drafted_tokens=sum(counter.drafted_tokens for counter in counters),
            accepted_tokens=sum(counter.accepted_tokens for counter in counters),
            regime_switches=self._switches() - self._switches_before,
        )

    def _switches(self) -> int:
        return sum(0 if replica.drafter is None else replica.drafter.switches for replica in self._replicas)


def _new_replica(fleet: Fleet, index: int) -> Replica:
    return Replica(
        fleet.hardware,
        fleet.host_tokens,
        fleet.by_priority,
        fleet.slowdown.get(index, 1.0),
        drafter=None if fleet.new_drafter is None else fleet.new_drafter(),
    )
