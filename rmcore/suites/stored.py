"""Rewards of benchmarks that are kept by their content: one file a model and set, so that nothing is scored twice."""

import json
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import pandas as pd

from rmcore.core.arrays import FloatArray
from rmcore.core.files import atomic_file, exclusive
from rmcore.core.progress import prefixed, progress_bar
from rmcore.ensembles.score import SideScorer
from rmcore.models.seal import checkpoint_digest
from rmcore.suites.measure import from_table, score_answers, to_table
from rmcore.suites.sets import QuestionSet


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
