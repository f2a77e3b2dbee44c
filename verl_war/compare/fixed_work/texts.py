"""What the trajectories say: recorded episodes word for word, the same text cut to the lengths of a trace, or random
tokens.

Drafts can only be right about text that is like what the model was trained on. Recorded work has just that. A trace has
lengths of its own: for it, prompts and tool outputs of the recording are joined and cut until they have the tokens that
the trace asks for. Siblings share a conversation: the same task, and tool outputs out of the same files.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Protocol
from zlib import crc32

from verl_war.compare.fixed_work.episodes import Task, find_episode
from verl_war.sim.trace import TrajectorySpec

MIN_TOOL_OUTPUTS = 2
"""A conversation with fewer of them would say the same thing again and again."""


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


class EpisodeTexts:
    """Exactly what was recorded, for trajectories of `workload.recorded`.

    Args:
        tasks: The recording.
    """

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks = tasks

    def prompt(self, spec: TrajectorySpec) -> list[int]:
        """See `Texts`."""
        return find_episode(self._tasks, spec.trajectory_id)[0].prompt

    def tool_output(self, spec: TrajectorySpec, turn: int) -> list[int]:
        """See `Texts`."""
        return find_episode(self._tasks, spec.trajectory_id)[1][turn].tool_output


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
        self._header = common_prefix([piece[::-1] for piece in pieces])[::-1]
        self._system = common_prefix(prompts)

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


def conversations_of(tasks: Sequence[Task]) -> list[Conversation]:
    """Each task's prompt and the tool outputs of its first episode that has enough of them.

    Raises:
        ValueError: No episode has.
    """
    found = []
    for task in tasks:
        outputs = [[turn.tool_output for turn in episode if turn.tool_output] for episode in task.episodes]
        long = next((it for it in outputs if len(it) >= MIN_TOOL_OUTPUTS), None)
        if long is not None:
            found.append(Conversation(task.prompt, long))
    if not found:
        raise ValueError(
            f"no recorded episode has {MIN_TOOL_OUTPUTS} tool outputs, so there is no text for a trace; "
            "record more tasks"
        )
    return found


def common_prefix(sequences: Sequence[Sequence[int]]) -> list[int]:
    """What all of them begin with."""
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
