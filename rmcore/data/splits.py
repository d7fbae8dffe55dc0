"""Splitting pairs by prompt, so that no prompt is in two splits, and no conversation either.

A prompt's place depends on the seed and its own text alone: it stays where it is when other pairs are added, dropped
or reordered. Prompts that differ only in case or white space count as one, since a model would not tell them apart.
Dialogues with the same first user turn count as one, too, as the prompt of one may be an earlier or later turn of the
other: of HH-RLHF's harmless test set, split without this, a twelfth of the held-out pairs are such turns.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence

from rmcore.core.errors import ConfigError, DataError
from rmcore.data.pair import PreferencePair, Prompt, opening, prompt_text

_FILLED_FIRST = ("train", "test")
"""Where there are fewer prompts than splits, these get one before any other: the chain cannot do without them."""


def normalized_text(text: str) -> str:
    """The text without difference of case and with every run of white space as one blank."""
    return " ".join(text.casefold().split())


def normalized_prompt(prompt: Prompt) -> str:
    """Normalize a prompt: two prompts are the same where this is equal."""
    return normalized_text(prompt_text(prompt))


def conversation(prompt: Prompt) -> str:
    """Identify the conversation that a prompt belongs to, for splitting and for finding leakage."""
    return normalized_text(opening(prompt))


def split_by_prompt(
    pairs: Sequence[PreferencePair], *, fractions: Mapping[str, float], seed: int
) -> dict[str, list[PreferencePair]]:
    """Deal the pairs to named splits; all pairs of one conversation go to the same one, in their given order.

    A prompt, here and in what follows, is a conversation (`conversation`). Its hash is a number in [0, 1); the
    fractions, in their given order, cut that interval. With few prompts a split may come out empty: it then takes the
    prompt of lowest hash of the largest split. `train` and `test` come first, so with two prompts these two have one
    each and a validation split stays empty.

    Args:
        pairs: any number of pairs.
        fractions: split name -> expected share of the prompts; together 1. A share of 0 gives an empty split.
        seed: another seed, another split.

    Raises:
        ConfigError: a fraction is negative, or they do not add up to 1.
        DataError: fewer than two prompts for two or more splits, or no pairs.
    """
    _check_fractions(fractions)
    places = {conversation(pair.prompt): 0.0 for pair in pairs}
    for text in places:
        places[text] = _position(text, seed)
    wanted = [name for name, fraction in fractions.items() if fraction > 0]
    if len(places) < min(2, len(wanted)):
        raise DataError(
            f"{len(pairs)} pairs with {len(places)} different prompts cannot be split into {', '.join(wanted)}: "
            "a prompt must not be in two splits. Add pairs of other prompts, or name separate held-out data."
        )
    prompts = _deal(places, fractions)
    _fill_empty(prompts, wanted)
    split_of = {text: name for name, texts in prompts.items() for text in texts}
    split_pairs: dict[str, list[PreferencePair]] = {name: [] for name in fractions}
    for pair in pairs:
        split_pairs[split_of[conversation(pair.prompt)]].append(pair)
    return split_pairs


def _check_fractions(fractions: Mapping[str, float]) -> None:
    if not all(0 <= fraction <= 1 for fraction in fractions.values()) or not math.isclose(
        sum(fractions.values()), 1, abs_tol=1e-6
    ):
        raise ConfigError(
            f"split fractions {dict(fractions)} are not shares of a whole: each must lie in 0..1 and their sum be 1. "
            "Change data.validation_fraction or data.test_fraction."
        )


def _position(text: str, seed: int) -> float:
    """A number in [0, 1) that depends on the prompt and the seed only."""
    digest = hashlib.sha256(f"{seed}\x1f{text}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:6], "big") / 2**48  # 48 bits: exact in a double, and never rounds up to 1


def _deal(places: Mapping[str, float], fractions: Mapping[str, float]) -> dict[str, list[str]]:
    """Split name -> its prompts, lowest hash first."""
    wanted = [name for name, fraction in fractions.items() if fraction > 0]
    prompts: dict[str, list[str]] = {name: [] for name in fractions}
    for text in sorted(places, key=lambda text: (places[text], text)):
        upper = 0.0
        for name in wanted:
            upper += fractions[name]
            if places[text] < upper or name == wanted[-1]:  # the last one, as the sum may fall a rounding short of 1
                prompts[name].append(text)
                break
    return prompts


def _fill_empty(prompts: dict[str, list[str]], wanted: list[str]) -> None:
    """Give every empty wanted split one prompt, as far as they go, the indispensable ones first."""
    order = sorted(wanted, key=lambda name: (name not in _FILLED_FIRST, wanted.index(name)))
    for index, name in enumerate(order):
        if prompts[name]:
            continue
        donor = max(order, key=lambda other: len(prompts[other]))
        if len(prompts[donor]) < 2:  # nobody has one to spare: take it from a split that matters less
            donor = next((other for other in _behind(order, index) if prompts[other]), "")
        if donor:
            prompts[name].append(prompts[donor].pop(0))


def _behind(order: Iterable[str], index: int) -> list[str]:
    return list(reversed(list(order)[index + 1 :]))
