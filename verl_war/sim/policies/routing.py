"""Routing rules of others: each places every turn at once."""

from __future__ import annotations

import math
from collections.abc import Sequence

from verl_war.core.types import ReplicaSnapshot, Turn, TurnResult
from verl_war.sim.kv_cache import BLOCK_TOKENS
from verl_war.sim.policies.base import PolicyContext, RoutingPolicy, Start


class RoundRobin(RoutingPolicy):
    """Every turn to the next replica in turn, whatever it holds."""

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self._next = 0

    def choose(self, turn: Turn, now_s: float) -> str:
        pool = list(self.inflight)
        self._next += 1
        return pool[(self._next - 1) % len(pool)]


class LeastLive(RoutingPolicy):
    """Sticky; a trajectory's first turn goes where the fewest live trajectories are, also those in a tool call."""

    def choose(self, turn: Turn, now_s: float) -> str:
        return self.home.get(turn.trajectory_id) or self.fewest(self.live)


MARGIN = 2
"""Requests that home may have in flight beyond the least loaded replica (verl pull request 7435)."""


class Margin(RoutingPolicy):
    """Stay iff load(home) - least load <= 2, else go to the replica with the fewest requests in flight.

    Source: verl pull request 7435.
    """

    def choose(self, turn: Turn, now_s: float) -> str:
        home = self.home.get(turn.trajectory_id)
        if home is not None and self.inflight[home] - min(self.inflight.values()) <= MARGIN:
            return home
        return self.fewest(self.inflight)


class BlockView:
    """Blocks that were sent to each replica, for rules that look for the longest prefix. Nothing is ever evicted."""

    def __init__(self) -> None:
        self.blocks: dict[str, set[int]] = {}

    def matched(self, replica_id: str, hashes: Sequence[int]) -> int:
        """Blocks of the longest prefix that were all sent to the replica."""
        known = self.blocks.get(replica_id)
        if not known or not hashes or hashes[0] not in known:
            return 0
        low, high = 1, len(hashes)  # a prefix that was sent was sent whole, so the first unknown block can be bisected
        while low < high:
            middle = (low + high + 1) // 2
            if hashes[middle - 1] in known:
                low = middle
            else:
                high = middle - 1
        return low

    def record(self, replica_id: str, hashes: Sequence[int]) -> None:
        """Note the blocks of a turn that was sent there."""
        self.blocks.setdefault(replica_id, set()).update(hashes)


class PrefixRouting(RoutingPolicy):
    """A rule that looks for the longest prefix."""

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self._view = BlockView()

    def on_weights_updated(self, now_s: float) -> None:
        """The engines cleared their caches."""
        self._view = BlockView()


SMG_ABSOLUTE = 32
SMG_RELATIVE = 1.1
SMG_MATCH_RATIO = 0.5
"""Defaults of the gateway's `balance_abs_threshold`, `balance_rel_threshold` and `cache_threshold`."""


class SmgCacheAware(PrefixRouting):
    """Cache-aware routing of the SGLang model gateway.

    Imbalanced, iff max - min requests in flight > 32 and max > 1.1 * min: shortest queue. Else the replica with the
    longest matching prefix if it matches more than half of the prompt, otherwise the one whose tree is smallest.

    Source: lightseekorg/smg, docs/concepts/routing/cache-aware.md; sglang-router's policy `cache_aware`.
    """

    def choose(self, turn: Turn, now_s: float) -> str:
        most, least = max(self.inflight.values()), min(self.inflight.values())
        if most - least > SMG_ABSOLUTE and most > SMG_RELATIVE * least:
            return self.fewest(self.inflight)
        matches = {replica_id: self._view.matched(replica_id, turn.block_hashes) for replica_id in self.inflight}
        best = max(matches, key=matches.__getitem__)
        if matches[best] * BLOCK_TOKENS > SMG_MATCH_RATIO * turn.prompt_tokens:
            return best
        return self.fewest({replica_id: len(self._view.blocks.get(replica_id, ())) for replica_id in self.inflight})

    def begun(self, turn: Turn, replica_id: str) -> None:
        self._view.record(replica_id, turn.block_hashes)


DYNAMO_OVERLAP_WEIGHT = 1.0
DYNAMO_TEMPERATURE = 0.0
"""Defaults of `--kv-overlap-score-weight` and `--router-temperature`."""


class DynamoLike(PrefixRouting):
    """NVIDIA Dynamo's cost: `w * blocks to prefill + blocks active`, least wins (softmax when a temperature is set).

    Blocks to prefill are those of the turn that the replica has not cached and those of turns that are still being
    prefilled there; active are those of all turns in flight there with this one.

    Source: ai-dynamo/dynamo, docs/design_docs/router_design.md.
    """

    def __init__(self, context: PolicyContext, temperature: float = DYNAMO_TEMPERATURE) -> None:
        super().__init__(context)
        self._temperature = temperature
        self._active: dict[str, float] = {}
        self._turns: dict[str, tuple[float, float]] = {}

    def costs(self, turn: Turn) -> dict[str, float]:
        """Cost of the turn on every replica, in blocks."""
        total = turn.prompt_tokens / BLOCK_TOKENS
        costs = {}
        for replica_id in self.inflight:
            uncached = total - self._view.matched(replica_id, turn.block_hashes)
            costs[replica_id] = DYNAMO_OVERLAP_WEIGHT * uncached + self._active.get(replica_id, 0.0) + total
        return costs

    def choose(self, turn: Turn, now_s: float) -> str:
        costs = self.costs(turn)
        least = min(costs.values())
        if self._temperature <= 0:
            return self.rng.choice([replica_id for replica_id, cost in costs.items() if cost == least])
        span = max(costs.values()) - least or 1.0
        weights = [math.exp(-(cost - least) / span / self._temperature) for cost in costs.values()]
        return self.rng.choices(list(costs), weights)[0]

    def begun(self, turn: Turn, replica_id: str) -> None:
        blocks = turn.prompt_tokens / BLOCK_TOKENS
        self._view.record(replica_id, turn.block_hashes)
        self._active[replica_id] = self._active.get(replica_id, 0.0) + blocks
        self._turns[turn.trajectory_id] = (blocks, 0.0)

    def ended(self, trajectory_id: str, replica_id: str, result: TurnResult) -> None:
        self._active[replica_id] -= self._turns.pop(trajectory_id)[0]


KVCAWARE_RESERVE = 0.1
KVCAWARE_EPSILON = 0.01
"""Shares of the capacity: `1 - load_threshold` and `tie_epsilon` of uni-agent's strategy."""


class KvcAwareLike(PrefixRouting):
    """uni-agent's `kvcaware` router, capacity-token-aware.

    A trajectory stays home unless the KV usage that home last reported is above the threshold. Otherwise
    `need = prompt * (1 - hit)` and `remaining = capacity * (1 - usage) - need` on every replica; those that keep a
    reserve are eligible (all, if none does), and one within epsilon of the most remaining is drawn. Between reports
    the tokens sent since then count as used.

    Source: verl-project/uni-agent, uni_agent/llm_router/strategies.
    """

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self._capacity = float(context.hardware.kv_capacity_tokens)
        self._used: dict[str, float] = {}

    def on_snapshot(self, replica_id: str, snapshot: ReplicaSnapshot, now_s: float) -> Sequence[Start]:
        self._used[replica_id] = snapshot.kv_usage * self._capacity
        return ()

    def choose(self, turn: Turn, now_s: float) -> str:
        reserve = KVCAWARE_RESERVE * self._capacity
        home = self.home.get(turn.trajectory_id)
        if home is not None and self._used.get(home, 0.0) <= self._capacity - reserve:
            return home
        remaining = {replica_id: self._remaining(replica_id, turn) for replica_id in self.inflight}
        eligible = [replica_id for replica_id, tokens in remaining.items() if tokens >= reserve] or list(remaining)
        most = max(remaining[replica_id] for replica_id in eligible)
        near = [key for key in eligible if remaining[key] >= most - KVCAWARE_EPSILON * self._capacity]
        return self.rng.choice(near)

    def _remaining(self, replica_id: str, turn: Turn) -> float:
        need = turn.prompt_tokens - self._view.matched(replica_id, turn.block_hashes) * BLOCK_TOKENS
        return self._capacity - self._used.get(replica_id, 0.0) - need

    def begun(self, turn: Turn, replica_id: str) -> None:
        need = turn.prompt_tokens - self._view.matched(replica_id, turn.block_hashes) * BLOCK_TOKENS
        self._used[replica_id] = self._used.get(replica_id, 0.0) + need
        self._view.record(replica_id, turn.block_hashes)
