"""Exact-match reward of a question-answering trajectory, as verl's ``custom_reward_function``.

verl gives the whole response as one text: assistant turns, tool results, and whatever the chat template puts between
them, with special tokens removed. Only the last turn counts, and only when it calls no tool. Tool results must be
enclosed in ``<tool_response>`` tags that survive decoding, as in the Qwen and Hermes chat templates. Our tools also
break up tags inside their results (``retrieval.neutralise``), so that a document cannot answer the question.

Standard library only: verl may load this file by its path.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from typing import Any

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")


def normalise(text: str) -> str:
    """Return the text in lower case, without punctuation, articles and surplus blanks.

    Source: the SQuAD 1.1 evaluation's normalisation (Rajpurkar et al. 2016), here for punctuation of all scripts.
    """
    folded = unicodedata.normalize("NFKC", text).casefold()
    letters = "".join(char for char in folded if not unicodedata.category(char).startswith("P"))
    return " ".join(_ARTICLES.sub(" ", letters).split())


def final_answer(solution: str) -> str | None:
    """Return what the last assistant turn puts between its one pair of answer tags.

    None when the trajectory ends inside a tool result, the last turn calls a tool or breaks off while thinking, or
    there is not exactly one pair of tags.
    """
    last_turn = solution.rpartition("</tool_response>")[2].rpartition("</think>")[2]
    if any(tag in last_turn for tag in ("<tool_response>", "<tool_call>", "<think>")):
        return None
    answers = _ANSWER.findall(last_turn)
    if len(answers) != 1 or last_turn.count("<answer>") != 1 or last_turn.count("</answer>") != 1:
        return None
    return answers[0].strip()


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str | Iterable[str],
    extra_info: dict[str, Any] | None = None,
    **kwargs: Any,
) -> dict[str, float]:
    """Score a trajectory: 1 if its final answer equals one of the right ones after normalisation, otherwise 0.

    Returns:
        ``score``; ``acc``, the same under the name by which verl picks its validation metric; and ``answered``, 1 if
        there was a well-formed answer at all.

    Raises:
        ValueError: ``ground_truth`` holds no answer.
    """
    accepted = {normalise(answer) for answer in ([ground_truth] if isinstance(ground_truth, str) else ground_truth)}
    accepted.discard("")
    if not accepted:
        raise ValueError(f"ground_truth of a {data_source} row is {ground_truth!r}; expected one or more answers")
    answer = final_answer(solution_str)
    score = float(answer is not None and normalise(answer) in accepted)
    return {"score": score, "acc": score, "answered": float(answer is not None)}
