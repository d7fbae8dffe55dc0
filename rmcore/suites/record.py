"""All that is said of a model on benchmarks, as one JSON-ready record for the terminal, reports and model cards."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from rmcore.core.arrays import BoolArray, FloatArray
from rmcore.core.files import atomic_file, exclusive
from rmcore.core.progress import Report, prefixed, progress_bar, silent
from rmcore.data.splits import compared_prompt
from rmcore.data.tokenized import Pairs
from rmcore.ensembles.score import SideScorer
from rmcore.models.seal import checkpoint_digest
from rmcore.suites.measure import from_table, measure, score_answers, to_table, without
from rmcore.suites.question import Question, Rewards
from rmcore.suites.sets import QuestionSet

_BATCH = 256


@dataclass(frozen=True, slots=True)
class Overlap:
    """Questions of a set and training pairs that share a prompt."""

    seen: BoolArray
    """(Q,) questions whose prompt is that of a training pair."""
    answers: BoolArray
    """(Q,) of these, questions of which a training pair with their prompt has an answer, too."""
    pairs: BoolArray
    """(P,) training pairs with the prompt of a question."""


def find_overlap(pairs: Pairs, questions: Sequence[Question], *, report: Report = silent) -> Overlap:
    """Compare the prompts of P training pairs with those of a benchmark's Q questions; the pairs are read once.

    As splits compare them, and without the punctuation around words (`compared_prompt`).
    """
    asked: dict[str, list[int]] = {}
    for place, one in enumerate(questions):
        asked.setdefault(compared_prompt(one.prompt), []).append(place)
    seen, answered = np.zeros(len(questions), dtype=bool), np.zeros(len(questions), dtype=bool)
    shared = np.zeros(len(pairs), dtype=bool)
    for number, pair in enumerate(pairs):
        for place in asked.get(compared_prompt(pair.prompt), ()):
            seen[place] = shared[number] = True
            answered[place] |= not {pair.chosen, pair.rejected}.isdisjoint(questions[place].answers)
        if number % _BATCH == 0:
            report(number, len(pairs), "comparing prompts with those of training")
    report(len(pairs), len(pairs), "comparing prompts with those of training")
    return Overlap(seen, answered, shared)


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


def stored_rewards(
    checkpoint: str,
    sets: Sequence[QuestionSet],
    folder: Path,
    load: Callable[[str], SideScorer],
    read_as: Mapping[str, Any],
) -> list[list[FloatArray]]:
    """Rewards of all sets by a model, which is loaded only where some are not in the folder yet.

    Args:
        checkpoint: a folder, which is known by its content, or a hub name, known by its name.
        sets: the benchmarks.
        folder: where the rewards are kept; one process at a time writes there.
        load: gives the model of a checkpoint.
        read_as: what else the rewards depend on, such as the length that texts are cut to; JSON-ready.

    Raises:
        DataError: none of a set's answers can be read as this model reads text.
        ModelError: a reward is not finite.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model = checkpoint_digest(Path(checkpoint)) if Path(checkpoint).is_dir() else checkpoint
    places = [folder / f"{one.suite.name}-{_key(model, one, read_as)}.parquet" for one in sets]
    rm = None
    with exclusive(folder / ".lock"):
        for one, place in zip(sets, places, strict=True):
            if place.is_file():
                continue
            rm = rm or load(checkpoint)
            with progress_bar("benchmark") as report:
                rewards = score_answers(rm, one.questions, report=prefixed(report, one.suite.name))
            with atomic_file(place) as unfinished:
                to_table(one.questions, rewards).to_parquet(unfinished)
    return [from_table(one.questions, pd.read_parquet(place)) for one, place in zip(sets, places, strict=True)]


def _key(model: str, one: QuestionSet, read_as: Mapping[str, Any]) -> str:
    depends = {"checkpoint": model, "questions": one.digest, **read_as}
    return sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()[:12]
