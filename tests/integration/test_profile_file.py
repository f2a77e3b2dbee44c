"""The file that `custom.war.profile_path` names: read, and refused where it is of something else."""

import dataclasses
import json

import pytest

from tests.core.test_machine_profile import PROFILE
from verl_war.integration.profile_file import PROFILE_KEY, check_profile, model_shape, read_profile

CONFIG = {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 192, "num_hidden_layers": 4, "eos_token_id": 3}


def write(tmp_path, text):
    path = tmp_path / "profile.json"
    path.write_text(text)
    return str(path)


def test_a_profile_is_read_and_no_path_is_none(tmp_path):
    assert read_profile(write(tmp_path, json.dumps(PROFILE.as_dict()))) == PROFILE
    assert read_profile(None) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"profile.json' is no JSON \(.*\); write it with scripts/calibrate.py"),
        ("{}", "profile.json': profile lacks version, model"),
        (json.dumps(PROFILE.as_dict() | {"version": 7}), "version=7, this verl_war reads 1"),
    ],
)
def test_damaged_files_are_explained(tmp_path, text, message):
    with pytest.raises(ValueError, match=message) as error:
        read_profile(write(tmp_path, text))
    assert str(error.value).startswith(PROFILE_KEY)


def test_missing_and_relative_paths_are_explained(tmp_path):
    with pytest.raises(ValueError, match="none.json' cannot be read .*No such file.* or set null"):
        read_profile(str(tmp_path / "none.json"))
    with pytest.raises(ValueError, match="'profile.json' is relative.*absolute"):
        read_profile("profile.json")


def model(tmp_path, name, **changes):
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.json").write_text(json.dumps(CONFIG | changes))
    return str(tmp_path / name)


def test_a_model_is_told_by_its_shape_where_that_is_known(tmp_path):
    calibrated = model(tmp_path, "calibrated")
    assert model_shape(calibrated) == "Qwen3ForCausalLM hidden_size=192 num_hidden_layers=4"
    assert model_shape("Qwen/Qwen3-8B") == ""
    profile = dataclasses.replace(PROFILE, model="calibrated", model_shape=model_shape(calibrated))
    check_profile(profile, model(tmp_path, "trained_further", eos_token_id=5), 1)
    with pytest.raises(ValueError, match=r"of calibrated \(.*layers=4\), .*other' is another model \(.*layers=8\)"):
        check_profile(profile, model(tmp_path, "other", num_hidden_layers=8), 1)


def test_a_model_on_a_hub_is_told_by_its_name():
    profile = dataclasses.replace(PROFILE, model="Qwen3-8B", model_shape="")
    check_profile(profile, "Qwen/Qwen3-8B", 1)
    with pytest.raises(ValueError, match="the profile is of Qwen3-8B .*Qwen3-32B' is another model"):
        check_profile(profile, "Qwen/Qwen3-32B", 1)


def test_engines_of_another_size_are_refused():
    profile = dataclasses.replace(PROFILE, model="Qwen3-8B", model_shape="")
    with pytest.raises(ValueError, match="tensor_parallel_size=1, the run has .*tensor_model_parallel_size=4"):
        check_profile(profile, "Qwen/Qwen3-8B", 4)
