"""An audit of preference data: what is wrong with them, in numbers, before anything is trained on it.

The classic ways in which held-out numbers lie are all visible in the data: the same prompt in two splits, the same
pair twice or with both labels, and a shortcut such as "the longer answer wins", which is a reward model that costs
nothing. `audit` counts them, `format_audit` prints them with what deserves attention first.

The same text means: equal but for case and white space (`rmcore.data.splits.normalized_text`).
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from rmcore.data.control_tokens import KNOWN_FORMS, texts_of
from rmcore.data.pair import PreferencePair, content_id, prompt_text
from rmcore.data.readers.fields import TIES, Reason
from rmcore.data.readers.sources import LoadedPairs
from rmcore.data.splits import conversation, normalized_prompt, normalized_text

REJECTED_SHARE_WARNING = 0.05
LONGER_WINS_WARNING = 0.65
"""AlpacaEval's public judgements are at 0.75, HH-RLHF harmless at about a half: above this, length is a feature."""
COMPLETION_LEAKAGE_WARNING = 0.01
"""Share of a split's completions found in another: stock answers ("I can't help with that.") repeat by themselves."""
_PERCENTILES = (5, 25, 50, 75, 95, 99)
_TOKENIZE_BATCH = 512
_SHOWN_STRINGS = 20

CountTokens = Callable[[list[str]], list[int]]


def audit(
    splits: Mapping[str, Sequence[PreferencePair]],
    loaded: Sequence[LoadedPairs],
    *,
    count_tokens: CountTokens | None = None,
) -> dict[str, Any]:
    """Count what a reader of the results must know about the data.

    Args:
        splits: split name -> its pairs; one entry for a file on its own.
        loaded: what the pairs were read from, for the rejected rows; empty where they were not read from anywhere.
        count_tokens: texts -> their lengths in tokens; left out, only characters are counted.

    Returns:
        A JSON-ready dict: `num_pairs`, `num_prompts`, `num_conversations` (dialogues with the same first user turn are
        one, and so is each prompt of one turn), `sources`, `rejected` (reason -> rows), `duplicates`,
        `control_tokens` (see `_control_tokens`), `leakage` (one entry for each two splits), `splits` (see
        `_describe`), `notices` (sentences on usable pairs that were left out)
        and `warnings` (sentences).
    """
    num_rows = sum(source.num_rows for source in loaded)
    rejected = Counter(row.reason for source in loaded for row in source.rejected)
    every_pair = [pair for pairs in splits.values() for pair in pairs]
    result: dict[str, Any] = {
        "num_pairs": len(every_pair),
        "num_prompts": len({normalized_prompt(pair.prompt) for pair in every_pair}),
        "num_conversations": len({conversation(pair.prompt) for pair in every_pair}),
        "num_rows": num_rows,
        "num_rejected": rejected.total(),
        "rejected": dict(rejected.most_common()),
        "identical_sides": {
            "num_rejected_rows": rejected[Reason.IDENTICAL_SIDES],
            "num_pairs_alike": sum(normalized_text(p.chosen) == normalized_text(p.rejected) for p in every_pair),
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
        "duplicates": _duplicates(every_pair),
        "control_tokens": _control_tokens(every_pair),
        "leakage": _leakage(splits),
        "splits": {name: _describe(pairs, count_tokens) for name, pairs in splits.items()},
        "notices": [sentence for source in loaded for sentence in source.notices()],
    }
    result["warnings"] = _warnings(result)
    return result


def longer_wins(pairs: Sequence[PreferencePair]) -> dict[str, Any]:
    """How often the longer completion, in characters, is the chosen one; equal lengths count one half.

    Returns:
        `accuracy` (None without pairs), `num_pairs`, `num_ties`.
    """
    differences = [len(pair.chosen) - len(pair.rejected) for pair in pairs]
    wins, ties = sum(value > 0 for value in differences), differences.count(0)
    accuracy = (wins + ties / 2) / len(pairs) if pairs else None
    return {"accuracy": accuracy, "num_pairs": len(pairs), "num_ties": ties}


def _duplicates(pairs: Sequence[PreferencePair]) -> dict[str, int]:
    """`num_exact`: pairs that repeat an earlier one; `num_contradictory`: couples of texts preferred both ways."""
    seen = Counter(_identity(pair, pair.chosen, pair.rejected) for pair in pairs)
    reversed_pairs = {_identity(pair, pair.rejected, pair.chosen) for pair in pairs}
    # Both orders of a contradictory couple are in `seen` and in `reversed_pairs`, so each couple is counted twice.
    return {"num_exact": seen.total() - len(seen), "num_contradictory": len(reversed_pairs & seen.keys()) // 2}


def _control_tokens(pairs: Sequence[PreferencePair]) -> dict[str, Any]:
    """`num_pairs` whose text holds the string of a control token of a common tokenizer, and how many hold which."""
    held = [
        {found for text in (*texts_of(pair.prompt, pair.chosen), pair.rejected) for found in KNOWN_FORMS.findall(text)}
        for pair in pairs
    ]
    counts = Counter(string for strings in held for string in strings)
    return {"num_pairs": sum(map(bool, held)), "strings": dict(counts.most_common(_SHOWN_STRINGS))}


def _identity(pair: PreferencePair, first: str, second: str) -> str:
    return content_id(prompt_text(pair.prompt), first, second)


def _leakage(splits: Mapping[str, Sequence[PreferencePair]]) -> list[dict[str, Any]]:
    """Count prompts, conversations and completions that two splits share, and their share of the later split's."""
    prompts = {name: {content_id(normalized_prompt(pair.prompt)) for pair in pairs} for name, pairs in splits.items()}
    conversations = {name: {content_id(conversation(pair.prompt)) for pair in pairs} for name, pairs in splits.items()}
    completions = {
        name: {content_id(normalized_text(text)) for pair in pairs for text in (pair.chosen, pair.rejected)}
        for name, pairs in splits.items()
    }
    return [
        {
            "splits": [first, second],
            "num_prompts": len(prompts[first] & prompts[second]),
            "num_conversations": len(conversations[first] & conversations[second]),
            "num_completions": len(completions[first] & completions[second]),
            "share_of_completions": len(completions[first] & completions[second]) / max(1, len(completions[second])),
        }
        for first, second in combinations(splits, 2)
    ]


def _describe(pairs: Sequence[PreferencePair], count_tokens: CountTokens | None) -> dict[str, Any]:
    """One split: numbers of pairs and prompts, `longer_wins`, and how lengths and target margins are distributed.

    Lengths and margins are percentiles (`p5` ... `p99`), `mean` and `max`; None where there is nothing to count.
    """
    per_prompt = Counter(normalized_prompt(pair.prompt) for pair in pairs)
    texts = {
        "prompt": [prompt_text(pair.prompt) for pair in pairs],
        "chosen": [pair.chosen for pair in pairs],
        "rejected": [pair.rejected for pair in pairs],
    }
    margins = [pair.target_margin for pair in pairs if pair.target_margin is not None]
    return {
        "num_pairs": len(pairs),
        "num_prompts": len(per_prompt),
        "pairs_per_prompt": {
            "mean": len(pairs) / len(per_prompt) if pairs else None,
            "max": max(per_prompt.values(), default=0),
        },
        "longer_wins": longer_wins(pairs),
        "characters": {name: _distribution([len(text) for text in column]) for name, column in texts.items()},
        "tokens": None
        if count_tokens is None
        else {name: _distribution(_token_lengths(column, count_tokens)) for name, column in texts.items()},
        "target_margin": {"num_pairs": len(margins), **_distribution(margins)} if margins else None,
    }


def _token_lengths(texts: list[str], count_tokens: CountTokens) -> list[int]:
    starts = range(0, len(texts), _TOKENIZE_BATCH)
    return [length for start in starts for length in count_tokens(texts[start : start + _TOKENIZE_BATCH])]


def _distribution(values: Sequence[float]) -> dict[str, float | None]:
    names = [*(f"p{percent}" for percent in _PERCENTILES), "mean", "max"]
    if not values:
        return dict.fromkeys(names)
    array = np.asarray(values, dtype=np.float64)
    numbers = [*np.percentile(array, _PERCENTILES), array.mean(), array.max()]
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
    # Ties are no defect of the data: there is nothing to learn from them, and nothing to repair.
    num_unusable = result["num_rejected"] - sum(result["rejected"].get(reason, 0) for reason in TIES)
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
    if result["duplicates"]["num_contradictory"]:
        warnings.append(
            f"{result['duplicates']['num_contradictory']} pairs of completions are preferred both ways round: "
            "no model can be right on them."
        )
    for name, split in result["splits"].items():
        accuracy = split["longer_wins"]["accuracy"]
        if accuracy is not None and accuracy > LONGER_WINS_WARNING and _is_no_chance(accuracy, split["num_pairs"]):
            warnings.append(
                f"length bias in {name}: the longer completion wins in {accuracy:.1%} of {split['num_pairs']} pairs. "
                "A model has to beat that, and on pairs of equal length too."
            )
    return warnings


def _is_no_chance(accuracy: float, num_pairs: int) -> bool:
    """Whether a coin would rarely do as well: two of its standard errors above one half."""
    return accuracy - 0.5 > 2 * math.sqrt(0.25 / num_pairs)


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
    }
    lines += ["", *(f"{name:<36}{count:>9,}" for name, count in counts.items())]
    for shared in result["leakage"]:
        title = f"in both {' and '.join(shared['splits'])}"
        lines.append(f"{title:<36}{shared['num_prompts']:>9,} prompts, ")
        lines[-1] += f"{shared['num_conversations']:,} conversations, {shared['num_completions']:,} completions"
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
    rows = {f"{side} characters": numbers for side, numbers in split["characters"].items()}
    rows |= {f"{side} tokens": numbers for side, numbers in (split["tokens"] or {}).items()}
    lines += [
        f"{title:<24}" + "".join(f"{numbers[column]:>10,.0f}" for column in columns) for title, numbers in rows.items()
    ]
    if split["target_margin"]:
        numbers = split["target_margin"]
        lines.append(f"{'target margin':<24}" + "".join(f"{numbers[column]:>10.3g}" for column in columns))
        lines.append(f"{'':<24}{'annotated: ' + format(numbers['num_pairs'], ',') + ' pairs':>10}")
    return lines
