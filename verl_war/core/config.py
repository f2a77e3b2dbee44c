"""Configuration of WAR: `actor_rollout_ref.rollout.custom.war` as frozen dataclasses that reject mistakes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verl_war.core.config_parsing import ROOT_KEY, parse, require_range
from verl_war.core.history_config import SHARE_BYTES_PER_S, HistoryConfig, OnDamage
from verl_war.core.speculation_limits import SPECULATION_KEY, SpeculationLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig(SpeculationLimits):
    """Speculative decoding from history. Off means: engines as stock verl starts them.

    Attributes:
        enabled: The switch.
        history: What text is kept to draft from.
        share_bytes_per_s: Bound on the text that one replica sends to others.
        share_peers: Replicas that it is sent to (`core.peers`); 0 = none.
        history_dir: Absolute path of a directory, seen by all nodes, in which every replica saves its history and from
            which it takes it up when a run is resumed; null = none.
        history_save_steps: Training steps between two savings.
        history_on_damage: What a damaged file is: an `error` that stops the start, or one to `discard` with a warning.
            A file of another model, tokenizer or version of the format always stops it.
    """

    enabled: bool = False
    history: HistoryConfig = field(default_factory=HistoryConfig)
    share_bytes_per_s: float = SHARE_BYTES_PER_S
    share_peers: int = 8
    history_dir: str | None = None
    history_save_steps: int = 10
    history_on_damage: OnDamage = "error"

    def __post_init__(self) -> None:
        SpeculationLimits.__post_init__(self)  # with slots, super() would be of another class
        require_range(self, SPECULATION_KEY, "share_bytes_per_s", 1e3, 1e12)
        require_range(self, SPECULATION_KEY, "share_peers", 0, 1000)
        require_range(self, SPECULATION_KEY, "history_save_steps", 1, 1_000_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingConfig:
    """Priced placement. Off means: stock verl's placement.

    Attributes:
        enabled: The switch.
        move_min_saving_s: Seconds that a move must save at least.
        move_min_saving_share: Share of the price at home that a move must save at least.
        move_min_turns: Turns that a conversation stays after a move.
        move_min_load_ratio: Moves are considered from this ratio of home's load to the least loaded replica's.
        estimate_progress: Whether the turns that a trajectory still needs are estimated, from its siblings and from
            trajectories that have ended; false = all are taken to need as many.
        offload_capacity_tokens: KV tokens that each replica keeps in host memory when they leave its own
            (vLLM's KV offloading); 0 = none.
        offload_price_share: Seconds of fetching a token from there over those of prefilling it.
    """

    enabled: bool = False
    move_min_saving_s: float = 0.5
    move_min_saving_share: float = 0.2
    move_min_turns: int = 3
    move_min_load_ratio: float = 1.25
    estimate_progress: bool = True
    offload_capacity_tokens: int = 0
    offload_price_share: float = 0.15

    def __post_init__(self) -> None:
        require_range(self, f"{ROOT_KEY}.scheduling", "move_min_saving_s", 0.0, 3600.0)
        require_range(self, f"{ROOT_KEY}.scheduling", "move_min_saving_share", 0.0, 1.0)
        require_range(self, f"{ROOT_KEY}.scheduling", "move_min_turns", 0, 1000)
        require_range(self, f"{ROOT_KEY}.scheduling", "move_min_load_ratio", 1.0, 100.0)
        require_range(self, f"{ROOT_KEY}.scheduling", "offload_capacity_tokens", 0, 10**12)
        require_range(self, f"{ROOT_KEY}.scheduling", "offload_price_share", 0.0, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionConfig:
    """Holding conversations until their KV fits. Off means: all run at once, as in stock verl.

    Attributes:
        enabled: The switch.
        wait_for_thrash: Whether nothing is held as long as readings come and show no engine that loses cache to its
            load. Once one does, it holds what does not fit, and others take newcomers only as far as they fit.
        admit_fraction: Conversations are admitted while a replica's working set stays under this share of its
            trusted capacity.
        pause_fraction: Above this share, conversations that are between turns are paused.
        growth_turns: Turns of growth that the working set reserves for each admitted conversation.
        max_hold_s: A held turn runs after that time, whether it fits or not. One whose context exceeds the KV of every
            replica is not held: its engine can only refuse it.
        trajectory_ttl_s: Life of a trajectory's sandbox from its first turn; null = unlimited. Held turns run
            before it is over.
        deadline_margin_s: How long before that.
    """

    enabled: bool = False
    wait_for_thrash: bool = True
    admit_fraction: float = 0.9
    pause_fraction: float = 1.0
    growth_turns: float = 1.0
    max_hold_s: float = 900.0
    trajectory_ttl_s: float | None = None
    deadline_margin_s: float = 60.0

    def __post_init__(self) -> None:
        require_range(self, f"{ROOT_KEY}.admission", "admit_fraction", 0.05, 10.0)
        require_range(self, f"{ROOT_KEY}.admission", "pause_fraction", 0.05, 10.0)
        require_range(self, f"{ROOT_KEY}.admission", "growth_turns", 0.0, 100.0)
        require_range(self, f"{ROOT_KEY}.admission", "max_hold_s", 0.0, 1e6)
        require_range(self, f"{ROOT_KEY}.admission", "deadline_margin_s", 0.0, 1e6)
        if self.trajectory_ttl_s is not None:
            require_range(self, f"{ROOT_KEY}.admission", "trajectory_ttl_s", 1.0, 1e7)
        if self.admit_fraction > self.pause_fraction:
            raise ValueError(
                f"{ROOT_KEY}.admission.admit_fraction={self.admit_fraction!r} is over pause_fraction="
                f"{self.pause_fraction!r}: what is admitted would be paused at once; expected at most the same"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RegimeConfig:
    """When the fleet counts as loaded. While it does not, `scheduling` and `admission` decide as stock verl does.

    Attributes:
        enter_kv_share: Share of the fleet's KV from which on contexts make it loaded; 0 = always. With `scheduling`,
            replicas that differ much in speed do so too.
        leave_kv_share: Share below which it is not any more.
        dwell_s: Least time for which it stays loaded; up to 16 times that where the load comes and goes.
    """

    enter_kv_share: float = 0.8
    leave_kv_share: float = 0.6
    dwell_s: float = 10.0

    def __post_init__(self) -> None:
        require_range(self, f"{ROOT_KEY}.regime", "enter_kv_share", 0.0, 100.0)
        require_range(self, f"{ROOT_KEY}.regime", "leave_kv_share", 0.0, 100.0)
        require_range(self, f"{ROOT_KEY}.regime", "dwell_s", 0.0, 1e6)
        if self.leave_kv_share > self.enter_kv_share:
            raise ValueError(
                f"{ROOT_KEY}.regime.leave_kv_share={self.leave_kv_share!r} is over enter_kv_share="
                f"{self.enter_kv_share!r}: the regime would change at every look; expected at most the same"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardConfig:
    """Trials of stock verl's rule in loaded steps of synchronous training; see `core.guard`.

    Attributes:
        enabled: The switch. Off means: scheduling and admission stay on, whatever they come to.
        first_trial_steps: Loaded steps before the first trial, and between two while they decide nothing.
        max_trial_steps: Most loaded steps between two trials; the number doubles while the controls win clearly.
    """

    enabled: bool = True
    first_trial_steps: int = 8
    max_trial_steps: int = 128

    def __post_init__(self) -> None:
        require_range(self, f"{ROOT_KEY}.guard", "first_trial_steps", 2, 1_000_000)
        require_range(self, f"{ROOT_KEY}.guard", "max_trial_steps", 2, 1_000_000)
        if self.first_trial_steps > self.max_trial_steps:
            raise ValueError(
                f"{ROOT_KEY}.guard.first_trial_steps={self.first_trial_steps!r} is over max_trial_steps="
                f"{self.max_trial_steps!r}; expected at most the same"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureConfig:
    """When something counts as broken, and what is tried then. Always in force.

    Attributes:
        turn_deadline_s: Longest time that a replica may take for one turn before the turn is cancelled and asked
            again elsewhere, and that a held turn waits for a replica to join an empty pool. An hour is 65k tokens at
            18 a second: a last resort behind `replica_hang_s`, which no honest turn should meet.
        replica_hang_s: A replica that has requests and finishes no engine iteration, or that does not answer, for
            this long is taken out of the pool until it goes on. Longer than any weight update or stalled iteration;
            checked while scheduling or admission is on.
        retries: Times that a turn is asked again, with the same tokens, after a replica failed under it. The
            trajectory fails with the last one, and verl leaves it out of the training batch.
    """

    turn_deadline_s: float = 3600.0
    replica_hang_s: float = 300.0
    retries: int = 3

    def __post_init__(self) -> None:
        require_range(self, f"{ROOT_KEY}.failures", "turn_deadline_s", 1e-3, 1e6)
        require_range(self, f"{ROOT_KEY}.failures", "replica_hang_s", 1e-3, 1e6)
        require_range(self, f"{ROOT_KEY}.failures", "retries", 0, 100)


@dataclass(frozen=True, slots=True, kw_only=True)
class WarConfig:
    """All settings of WAR.

    Attributes:
        speculation: Speculative decoding at low load.
        scheduling: Priced placement of turns on replicas.
        admission: Holding trajectories until their KV fits.
        regime: When scheduling and admission are called for.
        guard: Trials that switch scheduling and admission off where they lose.
        failures: Deadlines and retries when a replica breaks.
        block_size_tokens: Tokens per hashed block of context. 64 keeps the description of a 32k
            context at 4 kB while a shared prefix is still known to within 64 tokens.
        metrics_timeout_s: How long a training step waits for the router's and engines' numbers
            before it fails.
        seed: Seed of the router's tie-breaks; null takes one from the operating system, as stock verl does.
        profile_path: Absolute path of this machine's profile, which `scripts/calibrate.py` writes: step times to begin
            with; null = none, learnt from the first steps.
        journal_path: File to which the router writes every event and decision, for `verl-war replay`; null = none.
    """

    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    scheduling: SchedulingConfig = field(default_factory=SchedulingConfig)
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    regime: RegimeConfig = field(default_factory=RegimeConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    failures: FailureConfig = field(default_factory=FailureConfig)
    block_size_tokens: int = 64
    metrics_timeout_s: float = 30.0
    seed: int | None = None
    profile_path: str | None = None
    journal_path: str | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.block_size_tokens <= 4096:
            raise ValueError(f"{ROOT_KEY}.block_size_tokens={self.block_size_tokens!r} must be between 1 and 4096")
        if not 0 < self.metrics_timeout_s <= 3600:
            raise ValueError(f"{ROOT_KEY}.metrics_timeout_s={self.metrics_timeout_s!r} must be over 0 and at most 3600")


def parse_war_config(raw: Mapping[str, Any] | None) -> WarConfig:
    """Build the configuration from plain nested mappings.

    Args:
        raw: The value of `custom.war`; None means all defaults.

    Raises:
        ValueError: A key is unknown, a value has the wrong type or is out of range. The message
            names the key in full, the value found and what is allowed.
    """
    return parse(WarConfig, {} if raw is None else raw, ROOT_KEY)
