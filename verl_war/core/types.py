"""The values that pass between the systems and the decisions of WAR. Imports nothing of the package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal


class Reason(str, Enum):
    """Why a turn was placed where it was."""

    STICKY = "sticky"
    """The session's replica is still in the pool."""
    LEAST_INFLIGHT = "least_inflight"
    """First turn, or the session's replica has left: fewest requests in flight, ties at random."""
    DETERMINISTIC = "deterministic"
    """`rollout.full_determinism`: hash of the session over the whole pool."""
    PRICED = "priced"
    """First turn, or home has left: least price in seconds of the replicas looked at."""
    GROUP = "group"
    """First turn; joins the siblings that were placed just before, whose prompt is in the cache."""
    MOVED = "moved"
    """Another replica is cheaper by more than the hysteresis, the lost cache included."""
    RESUMED = "resumed"
    """Was held; its KV fits again."""
    STARVED = "starved"
    """Was held for `max_hold_s`; runs although its KV does not fit."""
    DEADLINE = "deadline"
    """Its sandbox would expire; runs although its KV does not fit."""
    OVERSIZE = "oversize"
    """Its context is larger than any replica's KV: no waiting helps, and the engine has to say so."""


Regime = Literal["low", "high"]
"""Load of a replica, where drafting pays when it is `low`, and of the fleet, which is scheduled when it is `high`. The
two are independent: in the tail of a loaded step replicas draft while the fleet is still scheduled."""

PRICE_TERMS = ("prefill_s", "offload_s", "queue_s", "decode_s", "overflow_s")
"""Terms that add up to the price of a replica; see `core.placement`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One generation request of a trajectory, as the client describes it. Holds no token ids.

    Attributes:
        session_id: verl's `request_id`, the same for all turns of one conversation.
        trajectory_id: `{uid}_{session}`; equals `session_id` where the agent loop gave no identity.
        group_id: `uid` of the prompt, shared by the samples of a GRPO group; empty when unknown.
        policy_step: global step whose prompt this is; -1 when unknown.
        prompt_tokens: Length of the whole context sent.
        block_hashes: Chain hash of every full block of `block_size_tokens` of the context.
        priority: Engine priority asked for by the agent loop; 0 = none.
        validate: Whether the trajectory belongs to a validation pass.
    """

    session_id: str
    trajectory_id: str
    group_id: str = ""
    policy_step: int = -1
    prompt_tokens: int
    block_hashes: Sequence[int] = ()
    priority: int = 0
    validate: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnResult:
    """What a finished turn told. `failed` turns produced no output and count no tokens.

    Attributes:
        completion_tokens: Tokens generated.
        num_cached_tokens: Prompt tokens served from the replica's prefix cache; None when the engine did not say,
            as for a turn that was aborted before it began.
        aborted: The engine gave the request up, for instance for a weight update; the client asks again.
        failed: The request raised instead of returning.
    """

    completion_tokens: int = 0
    num_cached_tokens: int | None = None
    aborted: bool = False
    failed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSnapshot:
    """Cumulative and current readings of one engine, taken by its server.

    Attributes:
        running_requests: Requests in the running batch.
        waiting_requests: Requests that the engine was given and does not run.
        kv_usage: Share of KV blocks in use, 0 to 1.
        kv_usage_peak: Highest `kv_usage` since the snapshot before.
        kv_capacity_tokens: Tokens that fit in the KV cache.
        preemptions: Requests preempted since the engine started.
        engine_steps: Engine iterations since the engine started.
        computed_tokens: Tokens computed, prefill and decode, since the engine started.
        kv_token_steps: KV tokens in use, summed over the engine's iterations.
        busy_s: Seconds spent in engine iterations since the engine started; 0 when it does not say.
        row_steps: Requests that sampled a token, summed over the engine's iterations; 0 when it does not say.
    """

    running_requests: int
    waiting_requests: int
    kv_usage: float
    kv_usage_peak: float
    kv_capacity_tokens: int
    preemptions: int
    engine_steps: int
    computed_tokens: int = 0
    kv_token_steps: float = 0.0
    busy_s: float = 0.0
    row_steps: float = 0.0

    @property
    def is_idle(self) -> bool:
        """Whether the engine has nothing to do."""
        return self.running_requests + self.waiting_requests == 0

    def __post_init__(self) -> None:
        for name in (
            *("running_requests", "waiting_requests", "kv_capacity_tokens", "preemptions", "engine_steps"),
            *("computed_tokens", "kv_token_steps", "busy_s", "row_steps"),
        ):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise ValueError(f"ReplicaSnapshot.{name}={value!r} must be >= 0; the engine's telemetry is broken")
        for name in ("kv_usage", "kv_usage_peak"):
            value = getattr(self, name)
            if not 0.0 <= value <= 1.0:
                raise ValueError(f"ReplicaSnapshot.{name}={value!r} must be between 0 and 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationReading:
    """Speculation of one engine: counters since it started, and what is in force.

    Attributes:
        steps: Engine steps in which drafts could have been made.
        drafting_steps: Of these, steps that verified drafts.
        drafting_rows: Drafts that were verified, one per request and step.
        drafted_tokens: Tokens of these drafts.
        accepted_tokens: Of these, accepted.
        draft_s: Seconds spent on drafting.
        step_s: Seconds of the engine steps, drafting included.
        regime: Whether drafting pays.
        budget_tokens: Longest draft that a request may have now; 0 = none.
        expected_gain: Gain in tokens per second over no drafts when last decided; 0.5 = half as many again.
    """

    steps: int
    drafting_steps: int
    drafting_rows: int
    drafted_tokens: int
    accepted_tokens: int
    draft_s: float
    step_s: float
    regime: Regime
    budget_tokens: int
    expected_gain: float

    def __post_init__(self) -> None:
        for name in (
            *("steps", "drafting_steps", "drafting_rows", "drafted_tokens", "accepted_tokens", "draft_s", "step_s"),
            *("budget_tokens", "expected_gain"),
        ):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise ValueError(f"SpeculationReading.{name}={value!r} must be >= 0; the engine's counters are broken")
        if self.accepted_tokens > self.drafted_tokens:
            raise ValueError(
                f"SpeculationReading.accepted_tokens={self.accepted_tokens} must be at most "
                f"drafted_tokens={self.drafted_tokens}; the engine's counters are broken"
            )
        if self.regime not in ("low", "high"):
            raise ValueError(f"SpeculationReading.regime={self.regime!r} must be low or high")


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A turn that may start now: where, at which engine priority, and why.

    Attributes:
        session_id: Conversation whose turn it is.
        trajectory_id: Trajectory of that conversation.
        replica_id: Replica that serves it.
        priority: Engine priority; lower runs first, vLLM's convention.
        reason: Why there and why now.
        price_s: Terms of the price of this replica, in seconds, by name; empty where nothing was priced.
        held_s: Seconds between the client's request and this decision.
    """

    session_id: str
    trajectory_id: str
    replica_id: str
    priority: int
    reason: Reason
    price_s: Mapping[str, float] = field(default_factory=dict)
    held_s: float = 0.0
