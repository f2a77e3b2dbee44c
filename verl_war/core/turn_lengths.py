"""How many tokens a turn still has to generate, by how many it has: whoever lasts long will last on.

A step ends with its last trajectory, so a token of a turn that has long to go is worth more than one of a turn that
is nearly over.
"""

from __future__ import annotations

from collections.abc import Sequence

OCTAVES = 24
"""Lengths of a turn by powers of 2, the last for all of 4M tokens and more."""

MEMORY_TURNS = 512.0
"""Turns that are remembered: about as many as a loaded replica serves in a minute."""

PRIOR_TURNS = 1.0
"""Weight of a turn that lasts twice as long as the one in question: the rule of a Pareto tail of index 2, which decides
where no turn was that long."""

WEIGHTS = (1.0, 2.0, 4.0)
"""What an accepted draft token can be worth, in tokens of the average turn of the batch. Not less than one: the
trajectory of a turn that is nearly over goes on, and its tokens are work like all others."""


class TurnLengths:
    """Lengths of the turns that a replica has generated."""

    def __init__(self) -> None:
        self._turns = [0.0] * OCTAVES
        self._tokens = [0.0] * OCTAVES
        self._left_tokens: list[float] = []

    def observe(self, tokens: int) -> None:
        """A turn ended after so many tokens."""
        if tokens < 1:
            return
        octave = _octave(tokens)
        self._turns[octave] += 1.0
        self._tokens[octave] += tokens
        if sum(self._turns) > MEMORY_TURNS:
            self._turns = [turns / 2 for turns in self._turns]
            self._tokens = [tokens / 2 for tokens in self._tokens]
        self._left_tokens.clear()

    def remaining_tokens(self, generated: int) -> float:
        """Expected tokens that a turn generates beyond those that it has: the mean residual life, at least 1."""
        at = _octave(generated)
        turns = sum(self._turns[at:]) + PRIOR_TURNS
        tokens = sum(self._tokens[at:]) + PRIOR_TURNS * 2.0 * generated
        return max(1.0, tokens / turns - generated)

    def weights(self, generated: Sequence[int]) -> list[float]:
        """What a draft token of each turn is worth, of `WEIGHTS`; all 1 before any turn has ended.

        In proportion to what is left of the turn, tokens bring down the sum of the squares of what is left fastest, a
        smooth form of its maximum, which is when the step ends. To every turn the mean length of one is added, for
        those of its trajectory that are to come.

        Args:
            generated: Tokens that each turn of the batch has.
        """
        turns = sum(self._turns)
        if not generated or not turns:
            return [1.0] * len(generated)
        if not self._left_tokens:
            later = sum(self._tokens) / turns
            self._left_tokens = [later + self.remaining_tokens(_middle(octave)) for octave in range(OCTAVES)]
        octaves = [_octave(tokens) for tokens in generated]
        mean = sum(self._left_tokens[octave] for octave in octaves) / len(octaves)
        weights = [_nearest(left / mean) for left in self._left_tokens]
        return [weights[octave] for octave in octaves]


def _octave(tokens: int) -> int:
    return min(tokens.bit_length(), OCTAVES - 1)


def _middle(octave: int) -> int:
    """A length in the middle of those of an octave."""
    return (3 << octave) // 4


def _nearest(ratio: float) -> float:
    """The weight that is nearest by ratio."""
    return min(WEIGHTS, key=lambda weight: max(weight / ratio, ratio / weight))
