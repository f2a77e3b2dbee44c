"""The arms of a fixed-work comparison by name: which engines, which router and which settings set each apart."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from verl_war.core.config import WarConfig, parse_war_config

EngineKind = Literal["plain", "sync", "priority", "suffix", "war"]
"""What an engine was started with: nothing special, without asynchronous scheduling (as vLLM runs every drafter that
knows suffixes), its scheduling by priority, its suffix decoding, WAR's drafts. None of these can be changed while it
runs, so arms of different kinds have engines of their own."""

SPECULATION: dict[str, Any] = {"speculation": {"enabled": True}}
SCHEDULING: dict[str, Any] = {"scheduling": {"enabled": True}}
ADMISSION: dict[str, Any] = {"admission": {"enabled": True}}
WAR: dict[str, Any] = {**SPECULATION, **SCHEDULING, **ADMISSION}
"""What a user writes under `custom.war` for all of WAR."""

PAPER_THRESHOLD = 16
"""Requests of a replica up to which it speculates, always and at full length (arXiv 2607.17299)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to serve the trajectories.

    Attributes:
        engine: Engines that it runs on.
        settings: `custom.war` of WAR's client and router; None for verl's own client and router.
        policy: Name of the policy of `verl_war.sim.policies` that decides instead of WAR's manager.
        part: What of WAR it lacks, for the waterfall; empty for the others.
        knows_earlier_step: Whether text of an earlier step of the same prompts is in the engines' histories.
        announces_groups: Whether the router is told at the step's beginning how many samples a prompt has.
    """

    name: str
    summary: str
    engine: EngineKind = "plain"
    settings: Mapping[str, Any] | None = None
    policy: str = ""
    part: str = ""
    knows_earlier_step: bool = False
    announces_groups: bool = True

    @property
    def config(self) -> WarConfig:
        """WAR's settings; all defaults, so all off, for an arm without."""
        return parse_war_config(self.settings)

    @property
    def speculates(self) -> bool:
        """Whether its engines draft."""
        return self.engine == "suffix" or self.config.speculation.enabled


def _peer(name: str, summary: str) -> Arm:
    return Arm(name=name, summary=summary, settings={}, policy=name)


def _without(part: str, summary: str, settings: Mapping[str, Any], **changes: Any) -> Arm:
    name = f"war_no_{part.replace(' ', '_')}"
    values = {"engine": "war", "settings": {**WAR, **settings}, "part": part, "knows_earlier_step": True}
    return Arm(name=name, summary=f"WAR without {summary}", **(values | changes))


def _sources(*names: str, **changes: Any) -> dict[str, Any]:
    return {"speculation": {"enabled": True, "history": {"sources": list(names)}, **changes}}


_ARMS = (
    Arm(name="stock", summary="stock verl: its own router and client, plain engines"),
    Arm(name="stock_priority", summary="stock verl with engine priority, by position in the batch", engine="priority"),
    Arm(name="stock_sync", summary="stock verl without vLLM's asynchronous scheduling", engine="sync"),
    _peer("margin", "verl pull request 7435: leave home when it has over 2 more in flight"),
    _peer("smg_cache_aware", "SGLang model gateway: longest prefix unless imbalanced"),
    _peer("kvcaware_like", "uni-agent: home until its KV is full, then most KV left"),
    _peer("thunderagent_like", "ThunderAgent: pause and resume programs by KV"),
    _peer("dynamo_like", "NVIDIA Dynamo: blocks to prefill + active blocks"),
    Arm(name="vllm_suffix", summary="stock verl, vLLM's suffix decoding always on", engine="suffix",
        knows_earlier_step=True),
    Arm(name="paper_like", summary="WAR as its paper is read: drafts up to 16 requests, four-term score, AIMD window",
        engine="war", policy="paper_like", knows_earlier_step=True,
        settings=_sources("own", "earlier_steps", "global", mode="always", max_batch=PAPER_THRESHOLD, share_peers=0)),
    Arm(name="war", summary="WAR: drafts, priced placement, admission", engine="war", settings=WAR,
        knows_earlier_step=True),
    Arm(name="war_tail_mode", summary="WAR with longer drafts for turns that have lasted long", engine="war",
        settings={**WAR, "speculation": {"enabled": True, "favour_long_turns": True}}, knows_earlier_step=True),
    _without("speculation", "drafts; its engines are switched off", {"speculation": {"enabled": False}},
             knows_earlier_step=False),
    _without("siblings", "drafts from siblings' text", _sources("own", "earlier_steps", "global")),
    _without("history", "drafts from earlier steps", _sources("own", "siblings"), knows_earlier_step=False),
    _without("budget", "draft budget: always drafts, as long as it can", {"speculation": {"enabled": True,
             "mode": "always"}}),
    _without("scheduling", "placement and admission: stock verl's rule, and drafts",
             {"scheduling": {"enabled": False}, "admission": {"enabled": False}}),
    _without("admission", "admission: nothing is held", {"admission": {"enabled": False}}),
    _without("moves", "moves by price: a conversation that runs stays",
             {"scheduling": {"enabled": True, "move_min_saving_s": 3600.0, "move_min_load_ratio": 100.0}}),
    _without("progress", "estimates of the turns to come: all trajectories are taken to need as many",
             {"scheduling": {"enabled": True, "estimate_progress": False}}),
    _without("groups", "placement of siblings together: the router is told of single samples", {},
             announces_groups=False),
)  # fmt: skip

ARMS: dict[str, Arm] = {arm.name: arm for arm in _ARMS}

DEFAULT_ARMS = "stock,war"


def find_arms(names: str) -> tuple[Arm, ...]:
    """The arms of a comma-separated list; `all` stands for all.

    Raises:
        ValueError: A name is unknown or given twice.
    """
    if names == "all":
        return _ARMS
    found: list[Arm] = []
    for name in names.split(","):
        if name not in ARMS:
            close = difflib.get_close_matches(name, ARMS, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise ValueError(f"--arms: {name!r} is unknown{hint}; expected all or some of {', '.join(ARMS)}")
        if ARMS[name] in found:
            raise ValueError(f"--arms: {name!r} is given twice; name every arm once")
        found.append(ARMS[name])
    return tuple(found)
