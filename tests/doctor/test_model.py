"""`verl-war doctor`: the model's directory."""

import json

import pytest

from tests.doctor.helpers import assert_remedies, by_name
from verl_war.doctor import model


@pytest.fixture
def model_dir(tmp_path):
    """A directory that looks like a checkpoint; returns a function that changes its config."""
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "..."}')
    config = {"hidden_size": 128, "num_attention_heads": 2, "max_position_embeddings": 4096}

    def change(**values):
        (tmp_path / "config.json").write_text(json.dumps({**config, **values}))
        return tmp_path

    change()
    return change


def test_good_model(model_dir):
    found = list(model.check_model(model_dir(), "cpu", 4096))
    assert {item.status for item in found} == {"ok"}
    assert set(by_name(found)) == {
        f"model.{name}"
        for name in ("path", "weights", "tokenizer", "chat_template", "max_position", "head_size")
    }  # fmt: skip


def test_missing_model(tmp_path):
    (found,) = model.check_model(tmp_path / "nowhere", "cpu")
    assert found.status == "failed" and "nowhere/config.json does not exist" in found.detail


@pytest.mark.parametrize(
    ("missing", "name", "status"),
    [
        ("model.safetensors", "model.weights", "failed"),
        ("tokenizer.json", "model.tokenizer", "failed"),
        ("tokenizer_config.json", "model.chat_template", "warning"),
    ],
)
def test_incomplete_model(model_dir, missing, name, status):
    path = model_dir()
    (path / missing).unlink()
    found = list(model.check_model(path, "cpu"))
    assert_remedies(found)
    assert by_name(found)[name].status == status
    assert [item.name for item in found if item.status != "ok"] == [name]


def test_chat_template_in_a_file_of_its_own(model_dir):
    path = model_dir()
    (path / "tokenizer_config.json").unlink()
    (path / "chat_template.jinja").write_text("")
    assert by_name(model.check_model(path, "cpu"))["model.chat_template"].status == "ok"


@pytest.mark.parametrize(
    ("config", "machine_name", "max_tokens", "name", "status"),
    [
        ({}, "cpu", 4097, "model.max_position", "failed"),
        ({"max_position_embeddings": 512}, "gpu", 512, "model.max_position", "ok"),
        ({"text_config": {"max_position_embeddings": 512}}, "gpu", 513, "model.max_position", "failed"),
        ({"hidden_size": 32}, "cpu", None, "model.head_size", "failed"),
        ({"head_dim": 16}, "cpu", None, "model.head_size", "failed"),
        ({"head_dim": 64}, "cpu", None, "model.head_size", "ok"),
    ],
)
def test_model_limits(model_dir, config, machine_name, max_tokens, name, status):
    found = by_name(model.check_model(model_dir(**config), machine_name, max_tokens))
    assert_remedies(found.values())
    assert found[name].status == status


def test_head_size_concerns_cpus_only(model_dir):
    assert "model.head_size" not in by_name(model.check_model(model_dir(head_dim=16), "gpu"))


def test_config_that_is_not_json(model_dir):
    path = model_dir()
    (path / "config.json").write_text("{")
    found = by_name(model.check_model(path, "cpu"))
    assert found["model.config"].status == "failed" and "not JSON" in found["model.config"].detail


@pytest.mark.upstream
def test_head_sizes_are_those_of_vllm():
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert list(model.CPU_HEAD_SIZES) == CPUAttentionBackend.get_supported_head_sizes()
