"""The machine profile as plain data, and the mistakes that its file may hold."""

import json

import pytest

from verl_war.core.config import RegimeConfig, SchedulingConfig, WarConfig
from verl_war.core.machine_profile import PROFILE_VERSION, MachineProfile
from verl_war.core.manager import WorkloadManager
from verl_war.core.step_time import StepTime
from verl_war.core.types import Turn

PROFILE = MachineProfile(
    version=PROFILE_VERSION, model="demo", model_shape="Llama hidden_size=64", tensor_parallel_size=1,
    hardware="2 cores", dtype="float32", vllm_version="0.27.1", date="2026-01-02",
    step_time=StepTime(base_s=0.013, token_s=0.0005), r2=0.98, observations=60.0, kv_capacity_tokens=16_384,
    max_num_seqs=64, max_num_batched_tokens=2048,
)  # fmt: skip


def changed(**values):
    raw = PROFILE.as_dict()
    for key, value in values.items():
        part, name = (raw, key) if "__" not in key else (raw["step_time"], key.partition("__")[2])
        if value is None:
            del part[name]
        else:
            part[name] = value
    return raw


def test_plain_data_and_back():
    assert MachineProfile.from_dict(json.loads(json.dumps(PROFILE.as_dict())), "file") == PROFILE


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ([], r"^file: \[\] is list; expected what scripts/calibrate.py writes"),
        (None, "^file: None is NoneType"),
        ({}, "profile lacks version, model, model_shape"),
        (changed(step_time=[1]), r"\[1\] is list"),
        (changed(r2=None), "profile lacks r2; write it with scripts/calibrate.py"),
        (changed(step_time__row_s=None), "profile.step_time lacks row_s"),
        (changed(vesrion=1), "unknown key profile.vesrion .*did you mean 'version'"),
        (changed(step_time__rows_s=1.0), "unknown key profile.step_time.rows_s[ ;]"),
        (changed(version=2), "version=2, this verl_war reads 1; calibrate again"),
        (changed(model=3), "profile.model=3 is int; expected str"),
        (changed(step_time__token_s="1"), "profile.step_time.token_s='1' is str; expected float"),
        (changed(step_time__token_s=float("nan")), "step_time.token_s=nan must be a finite number, at least 0"),
        (changed(step_time__kv_token_s=-1e-9), "step_time.kv_token_s=-1e-09 must be"),
        (changed(step_time__draft_s=float("inf")), "step_time.draft_s=inf must be"),
        (changed(step_time__base_s=0.0), "step_time.base_s=0.0 must be a finite number, over 0"),
        (changed(kv_capacity_tokens=0), "kv_capacity_tokens=0 must be a finite number, over 0"),
        (changed(tensor_parallel_size=-1), "tensor_parallel_size=-1 must be"),
        (changed(observations=-1.0), "observations=-1.0 must be"),
        (changed(r2=float("nan")), "r2=nan must be a finite number"),
        (changed(r2=1.5), "r2=1.5 must be at most 1"),
    ],
)
def test_mistakes_are_named(raw, message):
    with pytest.raises(ValueError, match=message) as error:
        MachineProfile.from_dict(raw, "file")
    assert str(error.value).startswith("file: ")


def test_a_fit_worse_than_the_mean_is_still_a_profile():
    assert MachineProfile.from_dict(changed(r2=-2.0), "file").r2 == -2.0


def test_the_first_decision_is_priced_with_the_profile():
    def first_price(profile):
        config = WarConfig(scheduling=SchedulingConfig(enabled=True), regime=RegimeConfig(enter_kv_share=0.0,
                           leave_kv_share=0.0), seed=0)  # fmt: skip
        manager = WorkloadManager(config, profile=profile)
        for name in ("r0", "r1"):
            manager.on_replica_up(name, 0.0)
        (placement,) = manager.on_turn(Turn(session_id="s", trajectory_id="t", prompt_tokens=1000), 0.0)
        return placement.price_s["prefill_s"]

    assert first_price(PROFILE) == pytest.approx(1000 * PROFILE.step_time.token_s)
    assert first_price(None) == pytest.approx(1000 * StepTime().token_s)
