"""Numbers of every trajectory that a training step used, one line of JSON each."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FIELDS = ["prompts", "index", "response_mask", "rm_scores", "num_turns"]
LOG_PROB_FIELDS = ["rollout_log_probs", "old_log_probs"]


def write(batch: Any, folder: str, step: int, has_log_probs: bool) -> None:
    """Write `FOLDER/numbers/STEP.jsonl` in one go, before verl logs the step.

    Args:
        batch: verl's `KVBatchMeta` of the step, whose fields are still in the transfer queue.
        folder: verl's `trainer.rollout_data_dir`.
        step: The training step.
        has_log_probs: Whether the rollout computed log-probs.
    """
    import transfer_queue as tq

    fields = FIELDS + (LOG_PROB_FIELDS if has_log_probs else [])
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
    path = Path(folder) / "numbers" / f"{step}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text("".join(json.dumps(line) + "\n" for line in lines(batch.keys, batch.tags, data)))
    os.replace(partial, path)


def lines(keys: list[str], tags: list[dict[str, Any]], data: Any) -> Iterator[dict[str, Any]]:
    """One dictionary per trajectory, without the rows that verl adds to fill the batch.

    `prompt` tells tasks apart, and is the same in all runs: a digest of the row of the dataset and of the prompt's
    tokens, since agents may begin all tasks with the same words. `log_prob_diff_mean` and `_max` are those of the
    distance between log-probs of rollout and actor, over the generated tokens.
    """
    numbers = ("index", "num_turns")
    columns = {name: data[name].unbind() for name in data.keys() if name not in numbers}
    # `data["num_turns"]` would be a list or, where all are equal, a single number.
    index, turns = (data.get(name).tolist() for name in numbers)
    for row, (key, tag) in enumerate(zip(keys, tags, strict=True)):
        if tag.get("is_padding", False):
            continue
        mask = columns["response_mask"][row].bool()
        line = {
            "key": key,
            "prompt": _digest(index[row], columns["prompts"][row].tolist()),
            "reward": float(columns["rm_scores"][row].sum()),
            "generated_tokens": int(mask.sum()),
            "turns": int(turns[row]),
        }
        if "rollout_log_probs" in columns and mask.any():
            distance = (columns["rollout_log_probs"][row] - columns["old_log_probs"][row]).abs()[mask]
            line |= {"log_prob_diff_mean": float(distance.mean()), "log_prob_diff_max": float(distance.max())}
        yield line


def _digest(index: int, tokens: list[int]) -> str:
    return hashlib.sha256(repr((index, tokens)).encode()).hexdigest()[:16]
