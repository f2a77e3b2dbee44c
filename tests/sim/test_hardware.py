import json

import pytest

from tests.core.test_machine_profile import PROFILE
from tests.sim.helpers import machine
from verl_war.sim.hardware import PROFILES, load_profile


@pytest.mark.parametrize("name", PROFILES)
@pytest.mark.parametrize("decodes,kv", [(1, 100), (7, 5000), (900, 3000), (300, 400_000)])
def test_sum_of_steps_equals_the_steps(name, decodes, kv):
    profile = PROFILES[name]
    single = sum(profile.step_s(decodes, kv + decodes * step) for step in range(250))
    assert profile.decode_steps_s(decodes, kv, 250) == pytest.approx(single, rel=1e-9)


def test_compute_bound_and_memory_bound_steps():
    hardware = machine(overlapped=True, per_token_s=0.01, weights_s=0.5, per_kv_token_s=0.001, per_request_s=0.002)
    assert hardware.step_s(1, 100) == pytest.approx(1 + 0.002 + 0.6)
    assert hardware.step_s(1, 100, 200) == pytest.approx(1 + 0.002 + 2.01)


def test_datasheet_profiles_are_plausible():
    profile = PROFILES["h100_8b"]
    assert 1 / profile.per_token_s == pytest.approx(30_000, rel=0.1)  # tokens/s of prefill
    assert profile.step_s(1, 1000) == pytest.approx(0.0096, rel=0.05)
    assert PROFILES["h200_8b"].kv_capacity_tokens == pytest.approx(804_000, rel=0.02)
    assert PROFILES["h100x4_32b"].kv_capacity_tokens == pytest.approx(924_000, rel=0.02)


def test_measured_machine_from_json(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(
        json.dumps({"base_s": 0.02, "per_request_s": 0.001, "per_token_s": 5e-4, "kv_capacity_tokens": 4096})
    )
    profile = load_profile(str(path))
    assert (profile.name, profile.overlapped, profile.kv_capacity_tokens) == ("mine", False, 4096)
    assert profile.step_s(2, 999, 100) == pytest.approx(0.02 + 0.002 + 0.05)


def test_the_file_of_a_calibration_is_taken(tmp_path):
    path = tmp_path / "calibrated.json"
    path.write_text(json.dumps(PROFILE.as_dict()))
    hardware, step_time = load_profile(str(path)), PROFILE.step_time
    assert (hardware.name, hardware.overlapped, hardware.kv_capacity_tokens) == ("calibrated", False, 16_384)
    assert hardware.step_s(5, 2000, 300) == pytest.approx(step_time.step_s(5, 2000, 300))
    path.write_text(json.dumps(PROFILE.as_dict() | {"r2": 2.0}))
    with pytest.raises(ValueError, match="calibrated.json: r2=2.0 must be at most 1"):
        load_profile(str(path))


@pytest.mark.parametrize(
    "text,message",
    [
        ("{", "line 1 is not JSON"),
        ("[]", "holds list"),
        ('{"base_s": 1}', "kv_capacity_tokens is missing"),
        ('{"base_s": 1, "kv_capacity_tokens": 64, "bases": 2}', "unknown key 'bases'=2"),
        ('{"base_s": "1", "kv_capacity_tokens": 64}', "base_s='1' is str; expected float"),
        ('{"base_s": -1, "kv_capacity_tokens": 64}', "base_s=-1.0 must be a finite number, at least 0"),
        ('{"base_s": NaN, "kv_capacity_tokens": 64}', "base_s=nan must be"),
        ('{"base_s": 1, "kv_capacity_tokens": 0}', "kv_capacity_tokens=0 must be over 0"),
    ],
)
def test_wrong_files_are_explained(tmp_path, text, message):
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="mine") as error:
        load_profile(str(path))
    assert message in str(error.value)


@pytest.mark.parametrize("name", ["h100", "missing.json"])
def test_unknown_hardware_names_what_is_known(name):
    with pytest.raises(ValueError, match="expected one of cpu_2core|cannot be read"):
        load_profile(name)
