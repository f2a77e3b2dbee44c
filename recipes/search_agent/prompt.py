"""The messages that a trajectory starts with."""

from __future__ import annotations

SYSTEM_PROMPT = "Find the answer with the tools. Then reply only <answer>the answer</answer>."


def prompt_messages(question: str) -> list[dict[str, str]]:
    """Return the chat messages that ask a question."""
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]
