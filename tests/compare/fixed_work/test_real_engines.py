"""The whole command with real vLLM engines and Ray: two replicas, two trajectories for each.

All arms share the engines, which take most of the time to start: a policy of the simulator behind WAR's protocol, WAR
with its drafts switched off, and WAR. Warm-up and earlier step are verl's own router and client.
"""

import subprocess
import sys

import pytest

from tests.compare.fixed_work.helpers import ROOT, plan, spec
from verl_war.compare.fixed_work import records
from verl_war.sim.trace import write_trace

pytestmark = [pytest.mark.upstream, pytest.mark.e2e]

SPECS = [spec(f"g{i // 2}-{i}", turns=3, group=f"g{i // 2}", output=12, tool=20, prompt=200) for i in range(4)]


ARMS = ("paper_like", "war_no_speculation", "war")


def test_arms_do_the_same_work_on_real_engines(tmp_path):
    trace = tmp_path / "trace.jsonl"
    write_trace(trace, SPECS)
    out = tmp_path / "out"
    words = ["compare", "--mode", "fixed-work", "--arms", ",".join(ARMS), "--trace", str(trace)]
    words += ["--kv-tokens", "2048", "--clock-scale", "0.05", "--memory-gb", "4", "--out", str(out)]
    done = subprocess.run([sys.executable, "-m", "verl_war.cli", *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr + (out / "console.log").read_text()[-5000:]
    runs = {run.arm: run for run in records.load_all(plan(out, arms=ARMS, loads=(2,)))}
    assert set(runs) == set(ARMS)
    for run in runs.values():
        assert run.status == "complete"
        assert run.totals["output_tokens"] == sum(spec.output_tokens for spec in SPECS)
        assert run.totals["turns"] == 12
        # What the engines computed is what the turns did not find cached.
        computed = run.totals["prompt_tokens"] - run.totals["prompt_tokens_cached"]
        assert run.totals["prompt_tokens_computed"] == pytest.approx(computed, abs=12)
        assert 0 < run.totals["prompt_tokens_cached"] < run.totals["prompt_tokens"]
        assert {turn.replica_id for turn in run.turns} == {"r0", "r1"}
        assert run.totals["peak_rss_bytes"] > 2**29
    # The texts repeat, so that there is something to draft from.
    assert all(runs[arm].totals["drafted_tokens"] > 0 for arm in ("paper_like", "war"))
    assert runs["war_no_speculation"].totals["drafted_tokens"] == 0
    assert "faster than the first" in done.stdout
    assert (out / "report.html").read_text().count("<svg") >= 3
