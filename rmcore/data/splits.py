"""Splitting pairs by prompt, so that no prompt is in two splits, and no conversation either.

A prompt's place depends on the seed and its own text alone: it stays where it is when other pairs are added, dropped
or reordered. Prompts that differ only in case, white space, Unicode normal form or invisible characters count as one.
Dialogues with the same first user turn count as one, too, as the prompt of one may be an earlier or later turn of the
other: of HH-RLHF's harmless test set, split without this, a twelfth of the held-out pairs are such turns.
"""

import hashlib
import math
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from rmcore.core.arrays import FloatArray, IntArray
from rmcore.core.errors import ConfigError, DataError
from rmcore.data.observation import Observation
from rmcore.data.pair import NEIGHBOURS, PreferencePair, Prompt, opening, prompt_text, text_number
from rmcore.data.pairs_on_disk import prompts_of, select
from rmcore.data.parquet_rows import Record
from rmcore.data.readers.sources import LoadedPairs

FEWEST_PROMPTS = 20
"""As few as the synthetic benchmark can be made of (data.gold.num_prompts)."""
_NOTHING: IntArray = np.zeros(0, dtype=np.int64)
_ASCII_SMALL = bytes(ord(" ") if chr(code).isspace() else ord(chr(code).lower()) for code in range(128)) + bytes(128)
_FILLED_FIRST = ("train", "test")
"""Where there are fewer prompts than splits, these get one before any other: the chain cannot do without them."""


PUNCTUATION = ".,;:!?…\"'`()[]{}“”‘’«»„¿¡。，、；：！？「」『』（）"
"""Punctuation of sentences; signs of sums and of code tell prompts apart."""
_INVISIBLE = re.compile(
    "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u2800\u3164\ufe00-\ufe0f"
    "\ufeff\uffa0\ufff0-\ufff8\U000e0000-\U000e0fff]+"
)
"""Unicode's Default_Ignorable_Code_Point (UAX 44), and the empty Braille pattern."""


def normalized_text(text: str) -> str:
    """The text in one case and normal form (NFC), without invisible characters; a run of white space is one blank."""
    if not text.isascii():
        composed = unicodedata.normalize("NFC", _INVISIBLE.sub("", text))
        return " ".join(unicodedata.normalize("NFC", composed.casefold()).split())
    small = text.encode("ascii").translate(_ASCII_SMALL)  # faster than making all words
    while b"  " in small:
        small = small.replace(b"  ", b" ")
    return small.strip(b" ").decode("ascii")


def normalized_prompt(prompt: Prompt) -> str:
    """Normalize a prompt: two prompts are the same where this is equal."""
    return normalized_text(prompt_text(prompt))


def compared_prompt(prompt: Prompt) -> str:
    """Normalize a prompt, without the punctuation around words: what a model has seen is found by this."""
    text = normalized_prompt(prompt)
    return " ".join(filter(None, (word.strip(PUNCTUATION) for word in text.split()))) or text


def conversation(prompt: Prompt) -> str:
    """Identify the conversation that a prompt belongs to, for splitting and for finding leakage."""
    return normalized_text(opening(prompt))


def split_by_prompt(
    pairs: Sequence[PreferencePair], *, fractions: Mapping[str, float], seed: int
) -> dict[str, Sequence[PreferencePair]]:
    """Deal the pairs to named splits; all pairs of one conversation go to the same one, in their given order.

    A prompt, here and in what follows, is a conversation (`conversation`). Its hash is a number in [0, 1); the
    fractions, in their given order, cut that interval. With few prompts a split may come out empty: it then takes the
    prompt of lowest hash of the largest split. `train` and `test` come first, so with two prompts these two have one
    each and a validation split stays empty.

    Args:
        pairs: P of them, in memory or on disk; the splits then lie there, too.
        fractions: split name -> expected share of the prompts; together 1. A share of 0 gives an empty split.
        seed: another seed, another split.

    Raises:
        ConfigError: a fraction is negative, or they do not add up to 1.
        DataError: fewer than two prompts for two or more splits, or no pairs.
    """
    return split_together(pairs, (), fractions=fractions, seed=seed)[0]


def split_together(
    pairs: Sequence[PreferencePair], observations: Sequence[Observation], *, fractions: Mapping[str, float], seed: int
) -> tuple[dict[str, Sequence[PreferencePair]], dict[str, Sequence[Observation]]]:
    """Deal pairs and observations to the same splits: all of one conversation go to the same one.

    The pairs are dealt as `split_by_prompt` deals them alone, and the observations of their prompts follow them. The
    other observations go where the hash of their prompt is between the fractions. Without pairs the observations are
    dealt as pairs would be.

    Args:
        pairs: P of them, in memory or on disk; the splits then lie there, too.
        observations: O of them, likewise.
        fractions: see `split_by_prompt`.
        seed: see `split_by_prompt`.

    Returns:
        The splits of the pairs and those of the observations.

    Raises:
        ConfigError: see `split_by_prompt`.
        DataError: see `split_by_prompt`.
    """
    _check_fractions(fractions)
    # A number stands for its prompt: no text is kept, and two prompts of one number (48 bits) only share their split.
    place_of = lru_cache(NEIGHBOURS)(lambda prompt: _position(conversation(prompt), seed))
    position = np.fromiter(map(place_of, prompts_of(pairs)), np.float64)  # (P,)
    said = np.fromiter(map(place_of, prompts_of(observations)), np.float64)  # (O,)
    places = np.unique(position if len(position) else said)  # (C,) ascending
    wanted = [name for name, fraction in fractions.items() if fraction > 0]
    if len(places) < min(2, len(wanted)):
        raise DataError(
            f"{len(pairs)} pairs with {len(places)} different prompts cannot be split into {', '.join(wanted)}: "
            "a prompt must not be in two splits. Add pairs of other prompts, or name separate held-out data."
        )
    # The last one takes all above, as the sum may fall a rounding short of 1.
    bounds = np.cumsum([fractions[name] for name in wanted])[:-1]
    dealt = np.searchsorted(bounds, places, side="right")  # (C,) place in `wanted`
    _fill_empty(dealt, wanted)
    return (
        _by_split(pairs, _dealt(position, places, dealt, bounds), wanted, fractions),
        _by_split(observations, _dealt(said, places, dealt, bounds), wanted, fractions),
    )


def _dealt(position: FloatArray, places: FloatArray, dealt: IntArray, bounds: FloatArray) -> IntArray:
    """The split of each position: that of its prompt among `places`, else where it is between the bounds."""
    if not len(places):
        return _NOTHING
    at = np.minimum(np.searchsorted(places, position), len(places) - 1)
    return np.where(places[at] == position, dealt[at], np.searchsorted(bounds, position, side="right"))


def _by_split(
    records: Sequence[Record], split: IntArray, wanted: list[str], fractions: Mapping[str, float]
) -> dict[str, Sequence[Record]]:
    places_of = {name: np.flatnonzero(split == index) for index, name in enumerate(wanted)}
    return {name: select(records, places_of.get(name, _NOTHING)) for name in fractions}


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


def _fill_empty(dealt: IntArray, wanted: list[str]) -> None:
    """Give every empty wanted split one prompt, as far as they go, the indispensable ones first.

    Args:
        dealt: (C,) the split of each prompt, as a place in `wanted`; prompts by ascending hash. Changed in place.
        wanted: names of the splits.
    """
    order = sorted(range(len(wanted)), key=lambda place: (wanted[place] not in _FILLED_FIRST, place))
    for index, split in enumerate(order):
        held = np.bincount(dealt, minlength=len(wanted))
        if held[split]:
            continue
        donor: int | None = max(order, key=lambda other: held[other])
        if held[donor] < 2:  # nobody has one to spare: take it from a split that matters less
            donor = next((other for other in reversed(order[index + 1 :]) if held[other]), None)
        if donor is not None:
            dealt[np.flatnonzero(dealt == donor)[0]] = split


def cap_prompts(
    loaded: LoadedPairs,
    most: int | None,
    *,
    spared: Sequence[PreferencePair] = (),
    spared_observations: Sequence[Observation] = (),
) -> LoadedPairs:
    """Keep the first `most` pairs of each prompt, in order; None keeps all. What is left out is counted.

    Of observations the first `most` of each prompt are kept, too. The prompts of what is `spared` keep all.
    """
    if most is None:
        return loaded
    kept = _first_of_each_prompt(loaded.pairs, most, spared)
    said = _first_of_each_prompt(loaded.observations, most, spared_observations)
    return replace(
        loaded,
        pairs=select(loaded.pairs, kept),
        num_over_cap=len(loaded.pairs) - len(kept),
        cap=most,
        observations=select(loaded.observations, said),
    )


Records = Sequence[PreferencePair] | Sequence[Observation]


def _first_of_each_prompt(records: Records, most: int, spared: Records) -> IntArray:
    prompts = _numbers(records, prompt_text)  # not `prompt_id`, which names the whole conversation
    order = np.argsort(prompts, kind="stable")
    _, starts, counts = np.unique(prompts[order], return_index=True, return_counts=True)
    earlier = np.empty(len(prompts), dtype=np.int64)
    earlier[order] = np.arange(len(prompts)) - np.repeat(starts, counts)
    return np.flatnonzero((earlier < most) | np.isin(prompts, _numbers(spared, prompt_text)))


def _numbers(records: Records, text: Callable[[Prompt], str]) -> npt.NDArray[np.uint64]:
    return np.fromiter((text_number(text(prompt)) for prompt in prompts_of(records)), np.uint64)


def exclude_held_out_conversations(loaded: LoadedPairs, held_out: LoadedPairs) -> LoadedPairs:
    """Leave out of the training source all whose conversation is held out, as a pair or as an observation of any kind.

    The pairs left out are counted.

    Raises:
        DataError: that leaves too little to train on.
    """
    tested = np.union1d(_numbers(held_out.pairs, conversation), _numbers(held_out.observations, conversation))
    pairs, said = _numbers(loaded.pairs, conversation), _numbers(loaded.observations, conversation)
    kept, kept_said = (np.flatnonzero(~np.isin(numbers, tested)) for numbers in (pairs, said))
    num_taken = len(pairs) - len(kept)
    num_left = len(np.union1d(pairs[kept], said[kept_said]))
    if (num_taken or len(kept_said) < len(said)) and num_left < FEWEST_PROMPTS:
        raise DataError(
            f"{num_taken:,} of {len(loaded.pairs):,} pairs of {loaded.source} share their prompt, or a dialogue's "
            f"first user turn, with held-out pairs of {held_out.source}: a model trained on them has seen the test. "
            f"Without them {num_left} prompts are left to train on, and fewer than {FEWEST_PROMPTS} show nothing. Name "
            "held-out data with prompts of their own, or none: a share of the prompts of the source is then held out."
        )
    return replace(
        loaded,
        pairs=select(loaded.pairs, kept),
        num_held_out=num_taken,
        observations=select(loaded.observations, kept_said),
    )
