"""All that is said of a model on benchmarks, as one JSON-ready record for the terminal, reports and model cards."""

from collections.abc import Sequence
from typing import Any

from rmcore.core.progress import Report, prefixed, silent
from rmcore.data.tokenized import Pairs
from rmcore.suites.measure import measure, without
from rmcore.suites.overlap import Overlap, find_overlap
from rmcore.suites.question import Rewards
from rmcore.suites.sets import QuestionSet


def find_overlaps(pairs: Pairs, sets: Sequence[QuestionSet], *, report: Report = silent) -> list[Overlap]:
    """Compare each benchmark with the training pairs."""
    return [find_overlap(pairs, one.questions, report=prefixed(report, one.suite.name)) for one in sets]


def benchmark_record(
    model: str, sets: Sequence[QuestionSet], rewards: Sequence[Rewards], overlaps: Sequence[Overlap] = ()
) -> dict[str, Any]:
    """Measure a model on every set, next to the rule that the longer answer is better.

    Args:
        model: its name.
        sets: the benchmarks.
        rewards: of the model on each set.
        overlaps: of its training pairs with each set; none: they are not known.

    Returns:
        {"checkpoint", "suites": {name: see `_of_one`}}.
    """
    suites = {}
    for place, (one, own) in enumerate(zip(sets, rewards, strict=True)):
        told = _of_one(one, own)
        if overlaps:
            told["overlap"] = _overlap(one, own, overlaps[place])
        suites[one.suite.name] = told
    return {"checkpoint": model, "suites": suites}


def _of_one(one: QuestionSet, rewards: Rewards) -> dict[str, Any]:
    found = measure(one.suite, one.questions, rewards)
    return {
        "title": one.suite.title,
        "rule": one.suite.rule,
        "terms": one.suite.terms,
        "hub": one.suite.hub,
        "source": one.source,
        "digest": one.digest,
        "missing": one.missing,
        "scores": {name: value.to_dict() for name, value in found.scores.items()},
        "longer_wins": found.longer,
        "over_longer_wins": found.over_longer.to_dict(),
        "num_questions": len(one.questions),
        "num_unreadable": found.num_unreadable,
    }


def _overlap(one: QuestionSet, rewards: Rewards, overlap: Overlap) -> dict[str, Any]:
    return {
        "num_seen": int(overlap.seen.sum()),
        "num_with_answer": int(overlap.answers.sum()),
        "num_training_pairs": int(overlap.pairs.sum()),
        "score_without": without(one.suite, one.questions, rewards, overlap.seen) if overlap.seen.any() else None,
    }
