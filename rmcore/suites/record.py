"""All that is said of models on benchmarks, as one JSON-ready record: the terminal, reports and model cards read it."""

from collections.abc import Mapping, Sequence
from typing import Any

from rmcore.core.progress import Report, prefixed, silent
from rmcore.data.tokenized import Pairs
from rmcore.suites.measure import difference, measure, overall, without
from rmcore.suites.overlap import Overlap, find_overlap
from rmcore.suites.question import Rewards
from rmcore.suites.sets import QuestionSet
from rmcore.suites.standing import Difference, compare_models, places
from rmcore.suites.words import WordModel, learn_words


def find_overlaps(pairs: Pairs, sets: Sequence[QuestionSet], *, report: Report = silent) -> list[Overlap]:
    """Compare each benchmark with the training pairs."""
    return [find_overlap(pairs, one.questions, report=prefixed(report, one.suite.name)) for one in sets]


def benchmark_record(
    sets: Sequence[QuestionSet],
    rewards: Mapping[str, Sequence[Rewards]],
    *,
    published: Mapping[str, Mapping[str, float]] | None = None,
    pairs: Pairs | None = None,
    overlaps: Sequence[Overlap] = (),
) -> dict[str, Any]:
    """Measure the first model on every set, next to the others and next to rules that read little.

    Args:
        sets: the benchmarks.
        rewards: of each model on each set; the first model is what the record is about.
        published: overall scores of further models, by benchmark.
        pairs: that the first model was trained on, for the bag-of-words model; None: not known.
        overlaps: of these pairs with each set.

    Returns:
        {"checkpoint", "against": [models], "suites": {name: see `_of_one`}}.
    """
    first, *others = rewards
    published = published or {}
    words = None if pairs is None else learn_words(pairs)
    differences = compare_models(sets, rewards, published) if others or published else []
    suites = {}
    for place, one in enumerate(sets):
        told = _of_one(one, rewards[first][place])
        if pairs is not None:
            told["bag_of_words"] = _bag_of_words(one, rewards[first][place], words)
        if overlaps:
            told["overlap"] = _overlap(one, rewards[first][place], overlaps[place])
        if others or published:
            told |= _compared(one, {model: own[place] for model, own in rewards.items()}, published, differences)
        suites[one.suite.name] = told
    return {"checkpoint": first, "against": [*others, *published], "suites": suites}


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
        "more_markdown_wins": found.markdown,
        "length_matched": found.length_matched.to_dict(),
        "num_questions": len(one.questions),
        "num_unreadable": found.num_unreadable,
    }


def _bag_of_words(one: QuestionSet, rewards: Rewards, words: WordModel | None) -> dict[str, Any] | None:
    """Score of a bag of words that learnt from the training pairs, and how far the model is above it."""
    if words is None:
        return None
    theirs = words.rewards(one.questions)
    above, _ = difference(one.suite, one.questions, rewards, theirs)
    return {"score": overall(one.suite, one.questions, theirs), "above": above.to_dict()}


def _overlap(one: QuestionSet, rewards: Rewards, overlap: Overlap) -> dict[str, Any]:
    return {
        "num_exact": int(overlap.exact.sum()),
        "num_near": int(overlap.near.sum()),
        "num_with_answer": int(overlap.answers.sum()),
        "num_training_pairs": int(overlap.pairs.sum()),
        "score_without": without(one.suite, one.questions, rewards, overlap.seen) if overlap.seen.any() else None,
    }


def _compared(
    one: QuestionSet,
    rewards: Mapping[str, Rewards],
    published: Mapping[str, Mapping[str, float]],
    differences: Sequence[Difference],
) -> dict[str, Any]:
    """Differences of the first model to the others, and the places of all."""
    name, first = one.suite.name, next(iter(rewards))
    scores = {model: overall(one.suite, one.questions, own) for model, own in rewards.items()}
    if not one.missing:
        scores |= {model: own[name] for model, own in published.items() if name in own}
    known = {model: score for model, score in scores.items() if score is not None}
    listed = [
        {"model": model, "place": place, "score": known[model], "is_published": model in published}
        for model, place in places(name, known, differences).items()
    ]
    own = {
        each.second: {**each.value.to_dict(), "p": each.p, "p_adjusted": each.p_adjusted, "verdict": each.verdict}
        for each in differences
        if each.suite == name and each.first == first
    }
    return {"differences": own, "standing": listed}
