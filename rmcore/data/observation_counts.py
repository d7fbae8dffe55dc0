"""Observations for people to check: kinds, ties, grades and annotators in numbers, and some as they were understood."""

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rmcore.data.observation import Kind, Observation
from rmcore.data.pair import prompt_messages, prompt_text
from rmcore.data.survey import Scale

_SHOWN = 20
_NAMED = 3
SHOWN_BEGINNING, SHOWN_END = 150, 60
"""Characters that are shown of a longer text."""


def describe_observations(observations: Iterable[Observation]) -> dict[str, Any]:
    """Count what a reader must know about observations, which are gone through once.

    Returns:
        JSON-ready: `num_observations`, `num_prompts`, `kinds` (kind -> number), `answers` (K -> number), `ties`
        ({num, num_ranked, share}: ranked observations in which two answers or more share a rank; the share is None
        where nothing is ranked), `attributes` (name -> see `_describe_attribute`), `annotators` ({num, num_unknown,
        labels: those with most}), `weights` ({min, max, num_not_1}).
    """
    kinds: Counter[str] = Counter()
    sizes: Counter[int] = Counter()
    annotators: Counter[str | None] = Counter()
    grades: dict[str, Counter[float]] = {}
    missing: Counter[str] = Counter()
    prompts, weights = array("q"), array("d")
    num_ranked = num_tied = 0
    for one in observations:
        kinds[str(one.kind)] += 1
        sizes[len(one.answers)] += 1
        annotators[one.annotator] += 1
        prompts.append(hash(prompt_text(one.prompt)))
        weights.append(one.weight)
        if one.ranks is not None and one.kind is not Kind.BEST:
            num_ranked += 1
            num_tied += len(set(one.ranks)) < len(one.ranks)
        for name, given in one.grades.items():
            missing[name] += sum(value is None for value in given)
            grades.setdefault(name, Counter()).update(value for value in given if value is not None)
    num_unknown = annotators.pop(None, 0)
    return {
        "num_observations": len(weights),
        "num_prompts": len(np.unique(np.frombuffer(prompts, np.int64))) if prompts else 0,
        "kinds": {str(kind): kinds[str(kind)] for kind in Kind if kinds[str(kind)]},
        "answers": {str(size): sizes[size] for size in sorted(sizes)},
        "ties": {"num": num_tied, "num_ranked": num_ranked, "share": num_tied / num_ranked if num_ranked else None},
        "attributes": {name: _describe_attribute(counts, missing[name]) for name, counts in grades.items()},
        "annotators": {
            "num": len(annotators),
            "num_unknown": num_unknown,
            "labels": {str(who): count for who, count in annotators.most_common(_SHOWN)},
        },
        "weights": {
            "min": min(weights, default=None),
            "max": max(weights, default=None),
            "num_not_1": sum(weight != 1 for weight in weights),
        },
    }


def _describe_attribute(counts: Mapping[float, int], num_missing: int) -> dict[str, Any]:
    """One attribute: `scale` (binary, ordinal, real), `num`, `num_missing`, `min`, `max`, `mean`, `levels`.

    Which scale it is says `rmcore.data.survey.Scale`; `levels` has how often each grade is given, None of real ones.
    """
    found = Scale.of("", counts)  # None of a single value, which is a level
    scale = "ordinal" if found is None else found.link
    num = sum(counts.values())
    return {
        "scale": scale,
        "num": num,
        "num_missing": num_missing,
        "min": min(counts),
        "max": max(counts),
        "mean": math.fsum(value * count for value, count in counts.items()) / num,
        "levels": None if scale == "real" else {f"{value:g}": counts[value] for value in sorted(counts)},
    }


def format_observations(name: str, found: Mapping[str, Any]) -> list[str]:
    """Lines of text for what `describe_observations` counted."""
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in found["kinds"].items()) or "none"
    lines = [f"{name}: {found['num_observations']:,} judgements of {found['num_prompts']:,} prompts: {kinds}"]
    sizes = list(found["answers"].items())
    shown = [f"{count:,} with {size}" for size, count in sizes[:_SHOWN]] + ["..."] * (len(sizes) > _SHOWN)
    lines.append(_line("answers", ", ".join(shown)))
    ties = found["ties"]
    if ties["num_ranked"]:
        lines.append(_line("with a tie", f"{ties['num']:,} of {ties['num_ranked']:,} ({ties['share']:.1%})"))
    for attribute, one in found["attributes"].items():
        text = f"{one['scale']}, {one['num']:,} grades from {one['min']:g} to {one['max']:g}, mean {one['mean']:.3g}"
        text += f", {one['num_missing']:,} missing" if one["num_missing"] else ""
        levels = ", ".join(f"{count:,} of {level}" for level, count in (one["levels"] or {}).items())
        lines.append(_line(attribute, f"{text} ({levels})" if levels else text))
    annotators = found["annotators"]
    if annotators["num"]:
        most = ", ".join(f"{who} {count:,}" for who, count in list(annotators["labels"].items())[:_NAMED])
        lines.append(_line("annotators", f"{annotators['num']:,}; most labels: {most}"))
        lines[-1] += f"; {annotators['num_unknown']:,} judgements name none" if annotators["num_unknown"] else ""
    weights = found["weights"]
    if weights["num_not_1"]:
        lines.append(_line("weights", f"{weights['min']:g} to {weights['max']:g}, {weights['num_not_1']:,} not 1"))
    return lines


def _line(title: str, text: str) -> str:
    return f"{title:<24}{text}"


def examples(observations: Sequence[Observation]) -> list[dict[str, Any]]:
    """Return the first, the middle and the last observation as lines: who says what, and how each answer was judged.

    Returns:
        For each a dict with `number` (from 1, of the observations that are used) and `lines`, pairs of a label (role of
        a turn, or the judgement of an answer) and a text, which is cut in the middle where it is long and has no
        control characters.
    """
    places = sorted({0, len(observations) // 2, len(observations) - 1} & set(range(len(observations))))
    return [{"number": place + 1, "lines": _example_lines(observations[place])} for place in places]


def format_examples(found: Sequence[dict[str, Any]], total: int) -> str:
    """The examples as text for a terminal."""
    lines = []
    for example in found:
        lines += ["", f"as understood: {example['number']:,} of {total:,}"]
        width = max(len(label) for label, _ in example["lines"])
        lines += [f"  {label:<{width}}  {text}" for label, text in example["lines"]]
    return "\n".join(lines)


def _example_lines(observation: Observation) -> list[tuple[str, str]]:
    turns = [(_shown(turn.role), _shown(turn.text)) for turn in prompt_messages(observation.prompt)]
    answers = [(f"→ {_judged(observation, place)}", _shown(answer)) for place, answer in enumerate(observation.answers)]
    return turns + answers


def _judged(observation: Observation, place: int) -> str:
    if observation.ranks is None:
        return ", ".join(
            f"{name} {given[place]:g}" for name, given in observation.grades.items() if given[place] is not None
        )
    rank = observation.ranks[place]
    if len(observation.ranks) == 2:
        return "tied" if len(set(observation.ranks)) == 1 else "chosen" if rank == 1 else "rejected"
    if observation.top_only:
        return "best" if rank == 1 else "not best"
    return f"rank {rank}"


def _shown(text: str) -> str:
    """One line of a text, cut in the middle; what a terminal would act on is written as an escape."""
    if len(text) > SHOWN_BEGINNING + SHOWN_END:
        left_out = len(text) - SHOWN_BEGINNING - SHOWN_END
        text = f"{text[:SHOWN_BEGINNING]} … {left_out:,} characters … {text[-SHOWN_END:]}"
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)
