"""Tables that are the code's own."""

from __future__ import annotations

from scripts.claims.marks import claim
from scripts.claims.results import table
from verl_war.compare.machine import CPU_MEMORY_GIB
from verl_war.core import speculation_report, step_stats
from verl_war.support import format_matrix


@claim
def metrics() -> str:
    """All metrics."""
    all_metrics = step_stats.METRICS | speculation_report.METRICS | step_stats.TRAINER_METRICS
    rows = [[f"`{name}`", unit, source] for name, (unit, source) in all_metrics.items()]
    return table(["metric", "unit", "what it is"], rows)


@claim
def support() -> str:
    """Supported versions."""
    return format_matrix()


@claim
def cpu_memory() -> str:
    """Free memory that training of the demo model asks for on a CPU machine."""
    return f"{CPU_MEMORY_GIB:g} GiB"
