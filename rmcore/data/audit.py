"""An audit of preference data: what is wrong with them, in numbers, before anything is trained on it.

The classic ways in which held-out numbers lie are all visible in the data: the same prompt in two splits, the same
pair twice or with both labels, and a shortcut such as "the longer answer wins", which is a reward model that costs
nothing. `audit` counts them, `format_audit` prints them with what deserves attention first.

The same text means: equal but for case, white space, Unicode normal form and invisible characters
(`rmcore.data.splits.normalized_text`).
"""

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rmcore.core.arrays import FloatArray
from rmcore.data.control_tokens import known_strings, texts_of
from rmcore.data.observation import Observation
from rmcore.data.observation_counts import describe_observations, format_observations
from rmcore.data.pair import NEIGHBOURS, PreferencePair, prompt_text
from rmcore.data.readers.columns import word
from rmcore.data.readers.fields import WORDS_FOR_NOTHING, Reason
from rmcore.data.readers.sources import LoadedPairs
from rmcore.data.splits import conversation, normalized_text

REJECTED_SHARE_WARNING = 0.05
LONGER_WINS_WARNING = 0.65
"""AlpacaEval's public judgements are at 0.75, HH-RLHF harmless at about a half: above this, length is a feature."""
PROMPT_IN_ANSWERS_WARNING = 0.05
"""Share of answers that begin with their prompt: a few repeat a short one, as in a greeting."""
COMPLETION_LEAKAGE_WARNING = 0.01
"""Share of a split's completions found in another: stock answers ("I can't help with that.") repeat by themselves."""
_SCORES = frozenset(("score", "scores", "rating", "ratings", "grade", "reward"))
_PERCENTILES = (5, 25, 50, 75, 95, 99)
_SHOWN_STRINGS = 20
_DOUBTS = {
    "num_words_for_nothing": "have NULL, None, N/A or nan alone for a text: a program that wrote the file had none. "
    "Drop them, unless it is the answer.",
    "num_against_scores": "have a chosen side with a lower score than the rejected one, in columns of their own row: "
    "labels or scores are the wrong way round, or the scores say something else.",
    "num_of_equal_scores": "have the same score for both sides, in columns of their own row: nothing there supports "
    "the label.",
    "num_negative_margins": "have a negative margin, as if the rejected side were better: take their sizes, exchange "
    "the sides, or drop them.",
}
KINDS = {"num_prompts": "prompt", "num_conversations": "conversation", "num_completions": "completions"}
"""Texts that splits may share, by their name in the audit and in `_Measured`. One kind after the other is sorted."""

Numbers = npt.NDArray[np.int64]
"""Texts, each as Python's own hash of 64 bits, which holds within a process; for collisions see `text_number`."""


def audit(
    splits: Mapping[str, Iterable[PreferencePair]],
    loaded: Sequence[LoadedPairs],
    observations: Mapping[str, Iterable[Observation]] | None = None,
) -> dict[str, Any]:
    """Count what a reader of the results must know about the data.

    The pairs are gone through once, and may lie on disk: of each some numbers are kept, 80 bytes in all.

    Args:
        splits: split name -> its pairs; one entry for a file on its own.
        loaded: what the pairs were read from, for the rejected rows; empty where they were not read from anywhere.
        observations: by split, where there is more than strict pairs.

    Returns:
        A JSON-ready dict: `num_pairs`, `num_prompts`, `num_conversations` (dialogues with the same first user turn are
        one, and so is each prompt of one turn), `sources`, `rejected` (reason -> rows), `duplicates`, `doubtful` (see
        `_doubts`), `control_tokens` (see `_control_tokens`), `leakage` (one entry for each two splits), `splits` (see
        `_describe`), `notices` (sentences on usable pairs that were left out), `observations` (split -> see
        `describe_observations`; only where there are any) and `warnings` (sentences).
    """
    num_rows = sum(source.num_rows for source in loaded)
    rejected = Counter(row.reason for source in loaded for row in source.rejected)
    measured = {name: _measure(pairs) for name, pairs in splits.items()}
    every = list(measured.values())
    texts = {kind: _shared(measured, field) for kind, field in KINDS.items()}
    result: dict[str, Any] = {
        "num_pairs": sum(one.num_pairs for one in every),
        "num_prompts": texts["num_prompts"].num_different,
        "num_conversations": texts["num_conversations"].num_different,
        "num_rows": num_rows,
        "num_rejected": rejected.total(),
        "rejected": dict(rejected.most_common()),
        "identical_sides": {
            "num_rejected_rows": rejected[Reason.IDENTICAL_SIDES],
            "num_pairs_alike": sum(one.num_alike for one in every),
        },
        "sources": [
            {
                "source": source.source,
                "layout": source.layout,
                "num_rows": source.num_rows,
                "num_pairs": len(source.pairs),
                "num_rejected": len(source.rejected),
                "num_over_row_cap": source.num_over_row_cap,
                "num_over_cap": source.num_over_cap,
                "num_held_out": source.num_held_out,
            }
            for source in loaded
        ],
        "duplicates": _duplicates(every),
        "doubtful": _doubts(every),
        "control_tokens": _control_tokens(every),
        "leakage": [_leakage(texts, first, second) for first, second in combinations(splits, 2)],
        "splits": {name: _describe(one) for name, one in measured.items()},
        "notices": [sentence for source in loaded for sentence in source.notices()],
    }
    if observations:
        result["observations"] = {name: describe_observations(said) for name, said in observations.items()}
    result["warnings"] = _warnings(result)
    return result


class _Measured(NamedTuple):
    """All that is kept of the P pairs of a split."""

    prompt: Numbers  # (P,) normalized
    conversation: Numbers  # (P,)
    completions: Numbers  # (P, 2) normalized, chosen and rejected
    same: Numbers  # (P,) the three texts as they are
    swapped: Numbers  # (P,) with the completions the other way round
    characters: Numbers  # (P, 3) of prompt, chosen, rejected
    margins: FloatArray  # of the pairs that have one
    doubtful: Counter[str]  # see `_doubts`
    held_strings: Counter[str]  # of control tokens, each counted once a pair
    num_with_strings: int

    @property
    def num_pairs(self) -> int:
        """P."""
        return len(self.prompt)

    @property
    def num_alike(self) -> int:
        """Pairs whose completions are the same text, see above."""
        return int((self.completions[:, 0] == self.completions[:, 1]).sum())


def _measure(pairs: Iterable[PreferencePair]) -> _Measured:
    numbers, margins = array("q"), array("d")
    doubtful: Counter[str] = Counter()
    held: Counter[str] = Counter()
    num_with_strings = 0
    number_of = lru_cache(NEIGHBOURS)(lambda text: hash(normalized_text(text)))
    for pair in pairs:
        text, chosen, rejected = prompt_text(pair.prompt), pair.chosen, pair.rejected
        asked, number = text.strip(), number_of(text)
        opening = number if isinstance(pair.prompt, str) else hash(conversation(pair.prompt))
        numbers.extend((number, opening, hash(normalized_text(chosen)), hash(normalized_text(rejected))))
        numbers.extend((hash((text, chosen, rejected)), hash((text, rejected, chosen))))
        numbers.extend((len(text), len(chosen), len(rejected)))
        if pair.target_margin is not None:
            margins.append(pair.target_margin)
        for side in (chosen, rejected):
            if side.lstrip().startswith(asked):
                doubtful["num_answers_with_the_prompt"] += 1
        if text in WORDS_FOR_NOTHING or chosen in WORDS_FOR_NOTHING or rejected in WORDS_FOR_NOTHING:
            doubtful["num_words_for_nothing"] += 1
        if pair.metadata:
            doubtful.update(_of_scores(pair.metadata))
        if strings := known_strings((*texts_of(pair.prompt, chosen), rejected)):
            held.update(strings)
            num_with_strings += 1
    by_pair = np.frombuffer(numbers, np.int64).reshape(-1, 9)
    return _Measured(
        prompt=by_pair[:, 0],
        conversation=by_pair[:, 1],
        completions=by_pair[:, 2:4],
        same=by_pair[:, 4],
        swapped=by_pair[:, 5],
        characters=by_pair[:, 6:],
        margins=np.frombuffer(margins, np.float64),
        doubtful=doubtful,
        held_strings=held,
        num_with_strings=num_with_strings,
    )


def longer_wins(chosen: npt.ArrayLike, rejected: npt.ArrayLike) -> dict[str, Any]:
    """How often the longer completion is the chosen one; equal lengths count one half.

    Args:
        chosen: (P,) lengths in characters.
        rejected: (P,) the same of the others.

    Returns:
        `accuracy` (None without pairs), `num_pairs`, `num_ties`.
    """
    differences = np.asarray(chosen) - np.asarray(rejected)
    wins, ties = int((differences > 0).sum()), int((differences == 0).sum())
    accuracy = (wins + ties / 2) / len(differences) if len(differences) else None
    return {"accuracy": accuracy, "num_pairs": len(differences), "num_ties": ties}


class _Shared(NamedTuple):
    """How many different texts of a kind there are, in all and in each split, and how many two splits share."""

    num_different: int
    sizes: dict[str, int]
    shared: dict[tuple[str, str], int]


def _shared(measured: Mapping[str, _Measured], field: str) -> _Shared:
    different = {name: np.unique(getattr(one, field)) for name, one in measured.items()}
    every = np.unique(np.concatenate([np.zeros(0, np.int64), *different.values()]))
    return _Shared(
        len(every),
        {name: len(numbers) for name, numbers in different.items()},
        {
            (first, second): len(np.intersect1d(different[first], different[second], assume_unique=True))
            for first, second in combinations(different, 2)
        },
    )


def _duplicates(every: Sequence[_Measured]) -> dict[str, int]:
    """`num_exact`: pairs that repeat an earlier one; `num_contradictory`: couples of texts preferred both ways."""
    same, swapped = (
        np.concatenate([np.zeros(0, np.int64), *(getattr(one, name) for one in every)]) for name in ("same", "swapped")
    )
    different = np.unique(same)
    # Both orders of a contradictory couple are in both, so each couple is counted twice.
    both = np.intersect1d(np.unique(swapped), different, assume_unique=True)
    return {"num_exact": len(same) - len(different), "num_contradictory": len(both) // 2}


def _doubts(every: Sequence[_Measured]) -> dict[str, int]:
    """Count what casts doubt on labels and texts.

    `num_answers_with_the_prompt`: answers that begin with their whole prompt; `num_words_for_nothing`: pairs of which a
    text is one of `WORDS_FOR_NOTHING`; `num_against_scores` and `num_of_equal_scores`: pairs with scores of both sides
    in their metadata, of which the chosen one's is the lower, or as high; `num_negative_margins`.
    """
    counts = sum((one.doubtful for one in every), Counter[str]())
    names = ("num_answers_with_the_prompt", "num_words_for_nothing", "num_against_scores", "num_of_equal_scores")
    return {name: counts[name] for name in names} | {
        "num_negative_margins": sum(int((one.margins < 0).sum()) for one in every)
    }


def _of_scores(metadata: Mapping[str, Any]) -> set[str]:
    found = set()
    for chosen, rejected in _score_names(tuple(metadata)):
        try:
            gap = float(metadata[chosen]) - float(metadata[rejected])
        except (TypeError, ValueError, OverflowError):
            continue
        if gap <= 0:
            found.add("num_against_scores" if gap else "num_of_equal_scores")
    return found


@lru_cache(maxsize=1024)
def _score_names(names: tuple[str, ...]) -> list[tuple[str, str]]:
    """Which columns have a score of the chosen and of the rejected side."""
    both = ((name, name.replace("chosen", "rejected")) for name in names if "chosen" in name)
    return [pair for pair in both if pair[1] in names and not _SCORES.isdisjoint(word(pair[0]).split("_"))]


def _control_tokens(every: Sequence[_Measured]) -> dict[str, Any]:
    """`num_pairs` whose text holds the string of a control token of a common tokenizer, and how many hold which."""
    counts = sum((one.held_strings for one in every), Counter[str]())
    return {
        "num_pairs": sum(one.num_with_strings for one in every),
        "strings": dict(counts.most_common(_SHOWN_STRINGS)),
    }


def _leakage(texts: Mapping[str, _Shared], first: str, second: str) -> dict[str, Any]:
    """Count prompts, conversations and completions that two splits share, and their share of the later split's."""
    shared = {kind: one.shared[first, second] for kind, one in texts.items()}
    share = shared["num_completions"] / max(1, texts["num_completions"].sizes[second])
    return {"splits": [first, second], **shared, "share_of_completions": share}


def _describe(split: _Measured) -> dict[str, Any]:
    """One split: numbers of pairs and prompts, `longer_wins`, and how lengths and target margins are distributed.

    Lengths and margins are percentiles (`p5` ... `p99`), `mean` and `max`; None where there is nothing to count.
    """
    _, per_prompt = np.unique(split.prompt, return_counts=True)
    prompt, chosen, rejected = split.characters.T
    return {
        "num_pairs": split.num_pairs,
        "num_prompts": len(per_prompt),
        "pairs_per_prompt": {
            "mean": split.num_pairs / len(per_prompt) if len(per_prompt) else None,
            "max": int(per_prompt.max(initial=0)),
        },
        "longer_wins": longer_wins(chosen, rejected),
        "characters": {
            name: _distribution(lengths)
            for name, lengths in (("prompt", prompt), ("chosen", chosen), ("rejected", rejected))
        },
        "target_margin": {"num_pairs": len(split.margins), **_distribution(split.margins)}
        if len(split.margins)
        else None,
    }


def _distribution(values: Numbers | FloatArray) -> dict[str, float | None]:
    names = [*(f"p{percent}" for percent in _PERCENTILES), "mean", "max"]
    if not len(values):
        return dict.fromkeys(names)
    numbers = [*np.percentile(values, _PERCENTILES), values.mean(), values.max()]
    return {name: round(float(value), 4) for name, value in zip(names, numbers, strict=True)}


def _warnings(result: Mapping[str, Any]) -> list[str]:
    warnings = []
    for shared in result["leakage"]:
        first, second = shared["splits"]
        if shared["num_prompts"]:
            warnings.append(
                f"{shared['num_prompts']} prompts are in both {first} and {second}: numbers on {second} flatter the "
                "model. Split by prompt, or drop them from one side."
            )
        elif shared["num_conversations"]:
            warnings.append(
                f"{shared['num_conversations']} dialogues of {second} began like one of {first}, so that a prompt of "
                f"one may be an earlier or later turn of the other: numbers on {second} flatter the model. Split by "
                "the first user turn, or drop them from one side."
            )
        if shared["share_of_completions"] > COMPLETION_LEAKAGE_WARNING:
            warnings.append(
                f"{shared['num_completions']} completions of {second} ({shared['share_of_completions']:.1%}) are also "
                f"in {first}: the model may know them by heart."
            )
    num_unusable = result["num_rejected"]
    if num_unusable > REJECTED_SHARE_WARNING * result["num_rows"]:
        warnings.append(
            f"{num_unusable} of {result['num_rows']} rows "
            f"({num_unusable / result['num_rows']:.1%}) were set aside: see the reasons below, "
            "and whether the columns are the right ones."
        )
    control = result["control_tokens"]
    if control["num_pairs"]:
        first = ", ".join(f"{string} in {count}" for string, count in list(control["strings"].items())[:3])
        warnings.append(
            f"{control['num_pairs']} pairs hold strings of control tokens ({first}). In data they are read as text and "
            "never as the tokens; if these are dialogues that a chat template has rendered already, give the messages."
        )
    warnings += _warnings_of_doubts(result)
    if result["duplicates"]["num_contradictory"]:
        warnings.append(
            f"{result['duplicates']['num_contradictory']} pairs of completions are preferred both ways round: "
            "no model can be right on them."
        )
    for name, split in result["splits"].items():
        accuracy = split["longer_wins"]["accuracy"]
        luck = 2 * math.sqrt(0.25 / max(1, split["num_pairs"]))  # two standard errors of a coin
        if accuracy is not None and accuracy > max(LONGER_WINS_WARNING, 0.5 + luck):
            warnings.append(
                f"length bias in {name}: the longer completion wins in {accuracy:.1%} of {split['num_pairs']} pairs. "
                "A model has to beat that, and on pairs of equal length too."
            )
    return warnings


def _warnings_of_doubts(result: Mapping[str, Any]) -> list[str]:
    doubtful, num_pairs, alike = result["doubtful"], result["num_pairs"], result["identical_sides"]["num_pairs_alike"]
    warnings = [f"{doubtful[name]} of {num_pairs} pairs {what}" for name, what in _DOUBTS.items() if doubtful[name]]
    num_answers = doubtful["num_answers_with_the_prompt"]
    if num_answers > PROMPT_IN_ANSWERS_WARNING * 2 * num_pairs:
        warnings.append(
            f"{num_answers} of {2 * num_pairs} answers begin with their whole prompt, which a model would read twice: "
            "remove it from them."
        )
    if alike:
        warnings.append(
            f"{alike} of {num_pairs} pairs have sides that differ in case, white space, Unicode normal form or "
            "invisible characters alone."
        )
    return warnings


def format_audit(result: Mapping[str, Any]) -> str:
    """The audit as plain text for a terminal: warnings, counts, then a table for each split."""
    lines = [f"WARNING  {sentence}" for sentence in result["warnings"]] or ["No warnings."]
    lines += [f"NOTE     {sentence}" for sentence in result["notices"]]
    lines.append("")
    for source in result["sources"]:
        lines.append(f"{source['source']}: {source['layout']}, {source['num_rows']:,} rows read, ")
        lines[-1] += f"{source['num_pairs']:,} pairs, {source['num_rejected']:,} rows set aside"
    lines += [f"    set aside: {reason:<32}{count:>9,}" for reason, count in result["rejected"].items()]
    duplicates, alike = result["duplicates"], result["identical_sides"]
    counts = {
        "pairs": result["num_pairs"],
        "different prompts": result["num_prompts"],
        "different conversations": result["num_conversations"],
        "repeated pairs": duplicates["num_exact"],
        "contradictory pairs": duplicates["num_contradictory"],
        "pairs with control tokens as text": result["control_tokens"]["num_pairs"],
        "sides alike but for case or spaces": alike["num_pairs_alike"],
        "answers that begin with the prompt": result["doubtful"]["num_answers_with_the_prompt"],
    }
    lines += ["", *(f"{name:<36}{count:>9,}" for name, count in counts.items())]
    for shared in result["leakage"]:
        title = f"in both {' and '.join(shared['splits'])}"
        lines.append(f"{title:<36}{shared['num_prompts']:>9,} prompts, ")
        lines[-1] += f"{shared['num_conversations']:,} conversations, {shared['num_completions']:,} completions"
    for name, said in result.get("observations", {}).items():
        lines += ["", *format_observations(name, said)]
    for name, split in result["splits"].items():
        lines += ["", *_format_split(name, split)]
    return "\n".join(lines) + "\n"


def _format_split(name: str, split: Mapping[str, Any]) -> list[str]:
    lines = [f"{name}: {split['num_pairs']:,} pairs of {split['num_prompts']:,} prompts"]
    if not split["num_pairs"]:
        return lines
    per_prompt, longer = split["pairs_per_prompt"], split["longer_wins"]
    lines[0] += f" (a prompt has {per_prompt['mean']:.1f} on average, {per_prompt['max']:,} at most)"
    lines.append(f"the longer completion wins: {longer['accuracy']:.1%} ({longer['num_ties']:,} ties, each a half)")
    columns = ["mean", *(f"p{percent}" for percent in _PERCENTILES), "max"]
    lines.append(f"{'':<24}" + "".join(f"{column:>10}" for column in columns))
    for side, numbers in split["characters"].items():
        title = f"{side} characters"
        lines.append(f"{title:<24}" + "".join(f"{numbers[column]:>10,.0f}" for column in columns))
    if split["target_margin"]:
        numbers = split["target_margin"]
        lines.append(f"{'target margin':<24}" + "".join(f"{numbers[column]:>10.3g}" for column in columns))
        lines.append(f"{'':<24}{'annotated: ' + format(numbers['num_pairs'], ',') + ' pairs':>10}")
    return lines
