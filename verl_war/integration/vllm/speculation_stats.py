"""Counters of speculation in one worker, as the router and the trainer see them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class SourceCounts:
    """Drafts of one source that were verified by the model."""

    drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(slots=True)
class SpeculationCounts:
    """Sums since the engine started.

    Attributes:
        steps: Engine steps in which the proposer was called.
        drafting_steps: Steps that verified drafts.
        drafting_rows: Rows that verified a draft.
        kv_limited_steps: Steps whose drafts were cut, or left out, because KV blocks were short.
        lookups: Rows for which drafts were looked up.
        shadow_lookups: Of these, looked up only to keep acceptance known; the engine never saw them.
        draft_s: Seconds spent in the proposer.
        step_s: Seconds of the steps that followed on another one, the proposer included.
        max_draft_s: Longest call of the proposer.
    """

    sources: dict[str, SourceCounts] = field(default_factory=dict)
    steps: int = 0
    drafting_steps: int = 0
    drafting_rows: int = 0
    kv_limited_steps: int = 0
    lookups: int = 0
    shadow_lookups: int = 0
    draft_s: float = 0.0
    step_s: float = 0.0
    max_draft_s: float = 0.0

    @classmethod
    def of(cls, sources: Sequence[str]) -> SpeculationCounts:
        """Zeros for the given sources."""
        return cls(sources={name: SourceCounts() for name in sources})

    def verified(self, source: str, drafted: int, accepted: int) -> None:
        """Count one verified draft."""
        counts = self.sources[source]
        counts.drafts += 1
        counts.drafted_tokens += drafted
        counts.accepted_tokens += accepted

    def report(self) -> dict[str, float]:
        """Plain numbers by name; rates are 0 where nothing was counted."""
        drafted = sum(source.drafted_tokens for source in self.sources.values())
        accepted = sum(source.accepted_tokens for source in self.sources.values())
        report: dict[str, float] = {
            "steps": self.steps,
            "drafting_steps": self.drafting_steps,
            "drafting_rows": self.drafting_rows,
            "kv_limited_steps": self.kv_limited_steps,
            "drafted_tokens": drafted,
            "accepted_tokens": accepted,
            "acceptance_rate": accepted / drafted if drafted else 0.0,
            "mean_acceptance_length": 1.0 + accepted / self.drafting_rows if self.drafting_rows else 1.0,
            "lookups": self.lookups,
            "shadow_lookups": self.shadow_lookups,
            "draft_s": self.draft_s,
            "max_draft_s": self.max_draft_s,
            "step_s": self.step_s,
            "draft_share": self.draft_s / self.step_s if self.step_s else 0.0,
        }
        for name, counts in self.sources.items():
            report[f"source/{name}/drafts"] = counts.drafts
            report[f"source/{name}/drafted_tokens"] = counts.drafted_tokens
            report[f"source/{name}/accepted_tokens"] = counts.accepted_tokens
            rate = counts.accepted_tokens / counts.drafted_tokens if counts.drafted_tokens else 0.0
            report[f"source/{name}/acceptance_rate"] = rate
        return report
