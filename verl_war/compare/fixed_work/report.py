"""Writes a comparison's results: table, Markdown, CSV, JSON and the page."""

from __future__ import annotations

import json
import shlex
import sys
from typing import Any, TextIO

from verl_war.compare.fixed_work import measures, records, tables
from verl_war.compare.fixed_work.arms import ARMS
from verl_war.compare.fixed_work.page import page
from verl_war.compare.fixed_work.plan import FixedWorkPlan
from verl_war.compare.machine import describe
from verl_war.compare.workspace import write_atomically

NO_BASE = "no run of {base} counts, so there are no ratios"


def write_report(plan: FixedWorkPlan, stream: TextIO) -> None:
    """Write all files and show the table. Of runs that are missing nothing is said but how many count."""
    runs = measures.judged(records.load_all(plan), plan.arms[0])
    rows = measures.rows_of(runs, plan.arms)
    report = summary(plan, runs, rows)
    write_atomically(plan.out / "report.json", json.dumps(report, indent=1) + "\n")
    write_atomically(plan.out / "report.md", tables.markdown(report, rows, runs))
    write_atomically(plan.out / "runs.csv", tables.as_csv(runs))
    write_atomically(plan.out / "report.html", page(report, rows, runs))
    stream.write(f"\n{tables.terminal(rows, runs)}\n\n")
    if not any(row.arm == plan.arms[0] for row in rows):
        stream.write(NO_BASE.format(base=plan.arms[0]) + "\n")
    stream.write(f"report: {plan.out / 'report.html'}, report.md, report.json, runs.csv; runs: {plan.runs_directory}\n")


def summary(plan: FixedWorkPlan, runs: list[records.Record], rows: list[measures.Row]) -> dict[str, Any]:
    """What `report.json` holds; single turns are in the records."""
    parts = {arm: ARMS[arm].part for arm in plan.arms if ARMS[arm].part}
    return {
        "command": shlex.join(["verl-war", *sys.argv[1:]]),
        "plan": plan.identity() | {"arms": list(plan.arms), "loads": list(plan.loads), "repeats": plan.repeats},
        "settings": {
            "model": plan.model.name if plan.model.parent.name != "demo_model" else "demo model",
            "replicas": plan.replicas,
            "KV tokens of a replica": plan.kv_tokens,
            "trajectories": plan.trace or f"recorded episodes of {plan.recipe}",
            "factor on delays": plan.clock_scale,
        },
        "environment": describe(plan.repo),
        "rows": measures.as_plain(rows),
        "parts": {f"{load:g}": found for load in plan.loads if (found := measures.parts_of(rows, load, parts))},
        "runs": [
            {"name": run.name, "attempt": run.attempt, "status": run.status, "cause": run.cause, "seed": run.case.seed,
             "begun_at": run.begun_at, "version": run.version, "totals": _finite(run.totals)}
            for run in runs
        ],
    }  # fmt: skip


def _finite(totals: dict[str, float]) -> dict[str, float | None]:
    return {name: None if value != value else value for name, value in totals.items()}
