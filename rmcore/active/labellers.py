"""Who answers when a loop asks for labels: the gold world, or a file whose labels were hidden. People answer through
`rmcore.active.labels`.

A labeller is given pairs whose sides are in any order and gives them back with the preferred side as `chosen`. What it
says of a pair depends on the pair and a seed alone, never on when or with which others it is asked: two loops that
are compared then learn the same label of the same pair, and one that was cut off learns the same label again.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from scipy.special import expit

from rmcore.core.errors import ConfigError, DataError
from rmcore.data.gold.world import gold_reward
from rmcore.data.pair import PreferencePair, prompt_text

Labeller = Callable[[Sequence[PreferencePair]], Sequence[PreferencePair]]
SHOWN = 3
"""Ids that an error names."""


def swapped(pair: PreferencePair) -> PreferencePair:
    """The same pair, the other side preferred; its id stays."""
    return replace(pair, chosen=pair.rejected, rejected=pair.chosen)


def blind(pairs: Sequence[PreferencePair], *, seed: int) -> list[PreferencePair]:
    """The pairs with a coin's order of sides, so that none of it tells a label. Annotated margins are taken off."""
    hidden = [replace(pair, target_margin=None) for pair in pairs]
    # From the two texts in alphabetical order: which of them was called chosen must not move the coin.
    return [
        swapped(pair) if (_uniform(seed, "order", pair) < 0.5) == (pair.chosen < pair.rejected) else pair
        for pair in hidden
    ]


class HiddenLabels:
    """The labels of pairs as a file has them, revealed when asked for.

    Args:
        pairs: with their labels.

    Raises:
        DataError: an id is there twice.
    """

    def __init__(self, pairs: Sequence[PreferencePair]) -> None:
        self._pairs = {pair.pair_id: pair for pair in pairs}
        if len(self._pairs) < len(pairs):
            raise DataError(
                f"{len(pairs) - len(self._pairs)} of {len(pairs)} labelled pairs repeat an id, so it is not known "
                "which label counts; make ids unique."
            )

    def __call__(self, pairs: Sequence[PreferencePair]) -> list[PreferencePair]:
        """The asked pairs as the file has them.

        Raises:
            DataError: the file has no label of a pair.
        """
        unknown = [pair.pair_id for pair in pairs if pair.pair_id not in self._pairs]
        if unknown:
            raise DataError(
                f"{len(unknown)} of {len(pairs)} pairs have no hidden label: {', '.join(unknown[:SHOWN])}. Pass the "
                "file that the pool was read from."
            )
        return [self._pairs[pair.pair_id] for pair in pairs]


class GoldLabels:
    """Labels drawn from Bradley-Terry on the gold reward: P(a preferred) = sigmoid((gold_a - gold_b) / temperature).

    Args:
        seed: of the draws.
        temperature: higher is noisier.

    Raises:
        ConfigError: the temperature is not above 0.
    """

    def __init__(self, *, seed: int = 0, temperature: float = 1.0) -> None:
        if not temperature > 0:
            raise ConfigError(f"temperature={temperature}: it divides the gold gap; choose a number above 0.")
        self.seed, self.temperature = seed, temperature

    def __call__(self, pairs: Sequence[PreferencePair]) -> list[PreferencePair]:
        """The asked pairs, the preferred side first."""
        return [self._label(pair) for pair in pairs]

    def _label(self, pair: PreferencePair) -> PreferencePair:
        prompt = prompt_text(pair.prompt)
        first, second = sorted((pair.chosen, pair.rejected))
        gap = (gold_reward(prompt, first) - gold_reward(prompt, second)) / self.temperature
        first_wins = _uniform(self.seed, "gold", pair) < expit(gap)
        return pair if (pair.chosen == first) == first_wins else swapped(pair)


class NoisyLabels:
    """Another labeller who is careless: each label is turned around with the same chance.

    Args:
        labeller: who answers.
        rate: share of labels that are turned around.
        seed: of the draws.

    Raises:
        ConfigError: the rate is not in [0, 0.5).
    """

    def __init__(self, labeller: Labeller, rate: float, *, seed: int = 0) -> None:
        if not 0 <= rate < 0.5:
            raise ConfigError(f"rate={rate}: from one half on labels say nothing, or the opposite; choose 0 to 0.5.")
        self.labeller, self.rate, self.seed = labeller, rate, seed

    def __call__(self, pairs: Sequence[PreferencePair]) -> list[PreferencePair]:
        """The asked pairs with their noisy labels."""
        return [
            swapped(pair) if _uniform(self.seed, "noise", pair) < self.rate else pair for pair in self.labeller(pairs)
        ]


def checked_labels(asked: Sequence[PreferencePair], given: Sequence[PreferencePair]) -> np.ndarray:
    """Whether the label agrees with the order in which each pair was asked about: (P,) bool, in that order.

    Raises:
        DataError: a pair is missing, was not asked about, is there twice, or has other texts.
    """
    found = {pair.pair_id: pair for pair in given}
    wanted = {pair.pair_id for pair in asked}
    missing = [pair.pair_id for pair in asked if pair.pair_id not in found]
    strange = [name for name in found if name not in wanted]
    if missing or strange or len(found) < len(given):
        raise DataError(
            f"the labels of {len(asked)} pairs were asked for and {len(given)} came: {len(missing)} are missing "
            f"({', '.join(missing[:SHOWN])}), {len(strange)} were not asked for ({', '.join(strange[:SHOWN])}), "
            f"{len(given) - len(found)} came twice. Give each asked pair back once, its preferred side as chosen."
        )
    changed = [
        pair.pair_id
        for pair in asked
        if {pair.chosen, pair.rejected} != {found[pair.pair_id].chosen, found[pair.pair_id].rejected}
    ]
    if changed:
        raise DataError(
            f"{len(changed)} labelled pairs have other texts than were asked about: {', '.join(changed[:SHOWN])}. A "
            "label may exchange the sides and nothing else."
        )
    return np.array([found[pair.pair_id].chosen == pair.chosen for pair in asked])


def _uniform(seed: int, purpose: str, pair: PreferencePair) -> float:
    """A number in [0, 1) that depends on the seed, the purpose and the pair, whichever of its sides comes first."""
    texts = "\x1f".join([prompt_text(pair.prompt), *sorted((pair.chosen, pair.rejected))])
    digest = hashlib.sha256(f"{purpose} {seed}\x1f{texts}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:6], "big") / 2**48
