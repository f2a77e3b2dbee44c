"""What the trajectories say: real text of the recipes cut to the lengths of a trace, or random tokens.

Drafts can only be right about text that is like what the model was trained on, so prompts and tool outputs are those of
recorded agents (`recipes.demo_model.record_texts`), joined and cut until they have the tokens that the trace asks for.
Siblings share a conversation: the same task, and tool outputs out of the same files.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Protocol
from zlib import crc32

from verl_war.sim.trace import TrajectorySpec

FORMAT = 1
"""Of the file of recorded texts."""


class Texts(Protocol):
    """Gives the tokens that are not generated."""

    def prompt(self, spec: TrajectorySpec) -> list[int]:
        """First context: what all trajectories share, then what the group shares; `spec.prompt_tokens` long."""

    def tool_output(self, spec: TrajectorySpec, turn: int) -> list[int]:
        """What the tool says after a turn; as long as the trace says."""


class RandomTexts:
    """Tokens at random, the same for the same name: for models whose text means nothing."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def prompt(self, spec: TrajectorySpec) -> list[int]:
        """See `Texts`."""
        group = self._tokens(spec.group_id, spec.prompt_tokens - spec.system_tokens)
        return self._tokens("system", spec.system_tokens) + group

    def tool_output(self, spec: TrajectorySpec, turn: int) -> list[int]:
        """See `Texts`."""
        return self._tokens(f"{spec.trajectory_id}/{turn}", spec.turns[turn].tool_tokens)

    def _tokens(self, name: str, count: int) -> list[int]:
        rng = random.Random(name)
        return [rng.randrange(2, self._vocab_size) for _ in range(count)]


@dataclass(frozen=True, slots=True)
class Conversation:
    """A recorded prompt and what its tools said."""

    prompt: list[int]
    tool_outputs: list[list[int]]


class RecordedTexts:
    """Text of recorded conversations.

    Args:
        conversations: At least one; groups take them in turn.
    """

    def __init__(self, conversations: Sequence[Conversation]) -> None:
        self._conversations = conversations
        prompts = [conversation.prompt for conversation in conversations]
        pieces = prompts + [piece for conversation in conversations for piece in conversation.tool_outputs]
        # What a model is told before it speaks; every context ends with it.
        self._header = _common_prefix([piece[::-1] for piece in pieces])[::-1]
        self._system = _common_prefix(prompts)

    def prompt(self, spec: TrajectorySpec) -> list[int]:
        """See `Texts`."""
        conversation = self._of_group(spec.group_id)
        task = [*conversation.prompt[len(self._system) :], *_joined(conversation.tool_outputs)]
        system = _cut(cycle(self._system or task), spec.system_tokens)
        return system + self._ended(cycle(task), spec.prompt_tokens - spec.system_tokens)

    def tool_output(self, spec: TrajectorySpec, turn: int) -> list[int]:
        """See `Texts`."""
        outputs = self._of_group(spec.group_id).tool_outputs
        first = crc32(f"{spec.trajectory_id}/{turn}".encode()) % len(outputs)
        return self._ended(cycle(_joined(outputs[first:] + outputs[:first])), spec.turns[turn].tool_tokens)

    def _of_group(self, group_id: str) -> Conversation:
        return self._conversations[crc32(group_id.encode()) % len(self._conversations)]

    def _ended(self, tokens: Iterator[int], count: int) -> list[int]:
        """So many tokens, the last ones those that let the model speak, if there is room for them."""
        header = self._header if count > len(self._header) else []
        return _cut(tokens, count - len(header)) + header


def read_texts(path: Path) -> RecordedTexts:
    """Read a file that `recipes.demo_model.record_texts` wrote.

    Raises:
        ValueError: It is damaged or of another version.
    """
    try:
        raw = json.loads(path.read_text())
        if raw["format"] != FORMAT:
            raise ValueError(f"format {raw['format']!r}, expected {FORMAT}")
        conversations = [Conversation(item["prompt"], item["tool_outputs"]) for item in raw["conversations"]]
        if not all(it.prompt and it.tool_outputs and all(it.tool_outputs) for it in conversations) or not conversations:
            raise ValueError("a conversation without prompt or tool outputs")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"recorded texts {path}: cannot be used ({error!r}); delete the file to record anew"
        ) from error
    return RecordedTexts(conversations)


def _common_prefix(sequences: Sequence[Sequence[int]]) -> list[int]:
    length = 0
    for column in zip(*sequences, strict=False):
        if len(set(column)) > 1:
            break
        length += 1
    return list(sequences[0][:length])


def _joined(pieces: Sequence[Sequence[int]]) -> list[int]:
    return [token for piece in pieces for token in piece]


def _cut(tokens: Iterator[int], count: int) -> list[int]:
    return list(islice(tokens, count))
