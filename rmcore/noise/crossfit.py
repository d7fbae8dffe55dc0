"""Margins from models that never saw the pair: each fold of prompts is scored by a reward head fitted on the others.

Folds are dealt by conversation (`rmcore.data.splits`), so no prompt is both learned from and scored: by pair, the other
labels of a prompt would tell a model what to say of this one. The heads are exact Bradley-Terry fits on the features of
a backbone that stays as it is, so one pass over the data serves all folds; its features are kept in a file.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rmcore.core.arrays import FloatArray, IntArray
from rmcore.core.errors import ConfigError, DataError
from rmcore.core.files import atomic_file, write_json
from rmcore.core.progress import Report, silent
from rmcore.data.pair import PreferencePair, content_id, prompt_text
from rmcore.data.splits import conversation, split_by_prompt
from rmcore.ensembles.features import pair_features
from rmcore.ensembles.linear_probes import fit_head
from rmcore.models.reward_model import BradleyTerryRM

FEATURES_FILE, RECORD_FILE = "features.npy", "features.json"
L2_FACTORS = (10.0, 1.0, 0.1)
"""Penalties that the folds choose from, in units of the default; the strongest of equally good ones wins."""


def deal_folds(pairs: Sequence[PreferencePair], num_folds: int, *, seed: int) -> IntArray:
    """The fold of each of P pairs, (P,), by conversation; as good as equal in prompts.

    Raises:
        ConfigError: fewer than two folds.
        DataError: fewer conversations than folds.
    """
    if num_folds < 2:
        raise ConfigError(f"{num_folds} folds: what is scored must not be trained on, so there are at least two.")
    opened = [conversation(pair.prompt) for pair in pairs]
    num_prompts = len(set(opened))
    if num_prompts < num_folds:
        raise DataError(f"{num_prompts} prompts for {num_folds} folds of prompts: add pairs, or take fewer folds.")
    names = [str(fold) for fold in range(num_folds)]
    dealt = split_by_prompt(pairs, fractions=dict.fromkeys(names, 1 / num_folds), seed=seed)
    fold_of = {conversation(pair.prompt): int(name) for name in names for pair in dealt[name]}
    return np.array([fold_of[text] for text in opened], dtype=np.int64)


def kept_differences(
    rm: BradleyTerryRM,
    pairs: Sequence[PreferencePair],
    backbone: Mapping[str, Any],
    folder: Path,
    *,
    report: Report = silent,
) -> FloatArray:
    """Features of the chosen minus those of the rejected sides of P pairs, (P, D), kept in `folder`.

    Args:
        rm: the backbone.
        pairs: that it can read.
        backbone: what it is, JSON-ready: the record of the kept file.
        folder: where they are kept, and read where an earlier run left them.
        report: told of the sides done.

    Raises:
        DataError: the folder holds those of other pairs, or of another backbone.
    """
    texts = "\x1e".join(content_id(prompt_text(pair.prompt), pair.chosen, pair.rejected) for pair in pairs)
    record = {"pairs": hashlib.sha256(texts.encode()).hexdigest()[:16], **json.loads(json.dumps(backbone))}
    place, known = folder / FEATURES_FILE, folder / RECORD_FILE
    if place.is_file() and known.is_file():
        there = json.loads(known.read_text(encoding="utf-8"))
        different = sorted(name for name in record.keys() | there.keys() if record.get(name) != there.get(name))
        if different:
            raise DataError(
                f"{folder} holds features of something else ({', '.join(different)} differ), and margins of two runs "
                "must not be mixed. Name another folder, or remove that one."
            )
        return np.load(place, allow_pickle=False).astype(np.float64)
    chosen, rejected = pair_features(rm, pairs, report=report)
    with atomic_file(place) as unfinished, unfinished.open("wb") as file:
        np.save(file, (chosen - rejected).astype(np.float32), allow_pickle=False)
    write_json(known, record)
    return np.asarray(chosen - rejected, dtype=np.float32).astype(np.float64)


def cross_fit(differences: FloatArray, folds: IntArray) -> FloatArray:
    """Margins of P pairs, (P,), each from a head fitted on the other folds; above 0 where it agrees with the label.

    The penalty is one for all folds, since margins under different ones are in different units: that among `L2_FACTORS`
    times the default of `fit_head` under which the labels of the folds are likeliest, each scored by the others.

    Args:
        differences: (P, D) features of the chosen minus those of the rejected sides.
        folds: (P,) as `deal_folds` deals them.
    """
    tried = [_held_out(differences, folds, factor * differences.shape[1]) for factor in L2_FACTORS]
    return in_one_unit(min(tried, key=lambda margins: float(np.logaddexp(0, -margins).sum())), folds)


def _held_out(differences: FloatArray, folds: IntArray, l2: float) -> FloatArray:
    found = np.zeros(len(folds))
    for number in np.unique(folds):
        held = folds == number
        found[held] = differences[held] @ fit_head(differences[~held], l2=l2)
    return found


def in_one_unit(margins: FloatArray, folds: IntArray) -> FloatArray:
    """Margins of P pairs, (P,), with the same root mean square in every fold, which is that over all.

    Each fold has a model of its own, and one whose margins are larger for no better reason would look confidently
    wrong. No label enters: a mean square is the same whichever side was chosen.
    """
    size = np.sqrt(np.mean(margins**2))
    own = np.sqrt(np.bincount(folds, margins**2) / np.maximum(np.bincount(folds), 1))
    return np.asarray(margins * size / np.where(own > 0, own, 1.0)[folds])
