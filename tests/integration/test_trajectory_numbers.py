"""Numbers of trajectories, from nested tensors as verl keeps them."""

import json
from types import SimpleNamespace

import pytest

from verl_war.patches.verl_trajectory_numbers import PATCH

pytestmark = pytest.mark.upstream


@pytest.fixture
def batch():
    keys = ["a_0_0", "a_1_0", "b_0_0", "pad_0_0"]
    return SimpleNamespace(keys=keys, tags=[{}, {}, {}, {"is_padding": True}], partition_id="train")


@pytest.fixture(params=[(6, 4, 2, 0), (6, 6, 6, 6)], ids=["different-turns", "equal-turns"])
def data(request):
    import torch
    from tensordict import NonTensorData, NonTensorStack, TensorDict

    def nested(rows, dtype=torch.float32):
        return torch.nested.as_nested_tensor([torch.tensor(row, dtype=dtype) for row in rows], layout=torch.jagged)

    turns = request.param
    all_equal = len(set(turns)) == 1
    columns = {
        # Agents may begin all tasks with the same words.
        "prompts": nested([[1, 2], [1, 2], [1, 2], [0]], torch.int64),
        "index": NonTensorStack(3, 3, 5, 3),
        "response_mask": nested([[1, 0, 1], [1, 1], [1], [0]], torch.int64),
        "rm_scores": nested([[0, 0, 0.5], [0, 1], [0.25], [0]]),
        "rollout_log_probs": nested([[-1, 0, -2], [-1, -1], [-3], [0]]),
        "old_log_probs": nested([[-1.5, 9, -2.25], [-1, -1], [-2.5], [0]]),
        # The two forms in which tensordict keeps a column of plain numbers.
        "num_turns": NonTensorData(turns[0], batch_size=[4]) if all_equal else NonTensorStack(*turns),
    }
    return TensorDict(columns, batch_size=[4])


def trainer(has_log_probs):
    rollout = SimpleNamespace(calculate_log_probs=has_log_probs)
    return SimpleNamespace(config=SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout)), global_steps=7)


@pytest.mark.parametrize("has_log_probs", [True, False])
def test_numbers_are_written_behind_verls_own_dump(monkeypatch, tmp_path, batch, data, has_log_probs):
    import transfer_queue

    def kv_batch_get(keys, partition_id, select_fields):
        assert (keys, partition_id) == (batch.keys, "train")
        return data.select(*select_fields)

    monkeypatch.setattr(transfer_queue, "kv_batch_get", kv_batch_get)
    calls = []
    patched = PATCH.make(lambda self, batch, timing_raw, rollout_data_dir: calls.append(rollout_data_dir))
    patched(trainer(has_log_probs), batch, {}, str(tmp_path))
    assert calls == [str(tmp_path)]
    (path,) = (tmp_path / "numbers").iterdir()
    assert path.name == "7.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["key"] for row in rows] == ["a_0_0", "a_1_0", "b_0_0"]
    assert [row["reward"] for row in rows] == [0.5, 1.0, 0.25]
    assert [row["generated_tokens"] for row in rows] == [2, 2, 1]
    assert [row["turns"] for row in rows] == data.get("num_turns").tolist()[:3]
    assert rows[0]["prompt"] == rows[1]["prompt"] != rows[2]["prompt"]
    if has_log_probs:
        # What the tools said is masked: its 9 does not count.
        assert [(row["log_prob_diff_mean"], row["log_prob_diff_max"]) for row in rows] == [
            (0.375, 0.5),
            (0.0, 0.0),
            (0.5, 0.5),
        ]
    else:
        assert not any("log_prob_diff_mean" in row for row in rows)
