"""Calibration of a real engine in a process of its own, from measuring to the files."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from verl_war.integration.profile_file import check_profile, read_profile
from verl_war.sim.hardware import load_profile

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "recipes" / "demo_model" / "checkpoint"


@pytest.mark.upstream
def test_the_demo_model_is_calibrated(tmp_path):
    out = tmp_path / "profile.json"
    command = [sys.executable, "-m", "scripts.calibrate", "--model", "demo", "--quick", "--threads", "1"]
    done = subprocess.run([*command, "--out", str(out)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    profile = read_profile(str(out))
    check_profile(profile, str(MODEL), 1)
    assert profile.dtype in ("float32", "bfloat16") and profile.kv_capacity_tokens > 10_000
    # Other processes may disturb the measurement, not by orders of magnitude.
    assert 1e-4 < profile.step_time.step_s(4, 1000) < 10.0 and profile.step_time.token_s > 0
    assert profile.step_time.draft_cost(16, 0.0).extra_s(16, 256) > 0
    assert load_profile(str(out)).step_s(1, 100) > 0
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    for words in ("R2", "decode", "draft", "prefill", "wrote"):
        assert words in done.stdout
    assert json.loads(out.read_text())["vllm_version"]


@pytest.mark.upstream
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "profile.txt"], "--out profile.txt must be a .json file"),
        (["--out", "/no/such/dir/profile.json"], "in a directory that exists"),
        (["--out", "profile.json", "--batches", "0"], "--batches 0 must be at least 1"),
        (["--out", "profile.json", "--prefills", "5000"], "--prefills 5000 must be under 2048"),
    ],
)
def test_wrong_options_are_explained(arguments, message, capsys):
    from scripts.calibrate import parse

    with pytest.raises(SystemExit):
        parse(["--model", "demo", *arguments])
    assert message in capsys.readouterr().err
