"""Stage features: what a frozen backbone makes of every pair, once.

Writes `pairs.parquet` (train, validation and test pairs in this order) and `differences.npy`, (P, D) float32: features
of the chosen side minus those of the rejected side. `part_*.npy` are pieces from which an interrupted run continues.
"""

from pathlib import Path

import numpy as np

from rmcore.core.files import atomic_file, write_json
from rmcore.core.progress import Report
from rmcore.core.tracking import Tracker
from rmcore.data.pair import PreferencePair
from rmcore.data.table import read_pairs, write_pairs
from rmcore.ensembles.features import head_of, pair_features
from rmcore.ensembles.score import readable_pairs
from rmcore.models.device import pick_device
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.stages.interface import Upstream
from rmcore.stages.settings import FeaturesSettings

PAIRS_FILE, DIFFERENCES_FILE = "pairs.parquet", "differences.npy"
PART = 512
"""Pairs of one piece."""


def run(settings: FeaturesSettings, upstream: Upstream, out: Path, tracker: Tracker, report: Report) -> None:
    """Run the backbone over the prepared splits."""
    rm = BradleyTerryRM.new(settings.model, seed=settings.seed, device=pick_device(settings.device))
    pairs = readable_pairs(rm, read_splits(upstream["prepare"]))
    parts = []
    for number, start in enumerate(range(0, len(pairs), PART)):
        report(start, len(pairs), "pairs")
        place = out / f"part_{number:05d}.npy"
        if not place.is_file():
            first, second = pair_features(rm, pairs[start : start + PART])
            with atomic_file(place) as unfinished, unfinished.open("wb") as file:
                np.save(file, (first - second).astype(np.float32))
        parts.append(place)
    write_pairs(pairs, out / PAIRS_FILE)
    np.save(out / DIFFERENCES_FILE, np.concatenate([np.load(place) for place in parts]))
    for place in parts:
        place.unlink()
    costs = {"cost/num_pairs": len(pairs), "cost/num_features": head_of(rm).in_features}
    write_json(out / "summary.json", {"metrics": costs})


def read_splits(prepared: Path) -> list[PreferencePair]:
    """Train, validation and test pairs, each id once."""
    places = (prepared / f"{name}.parquet" for name in ("train", "validation", "test"))
    pairs = {pair.pair_id: pair for place in places if place.is_file() for pair in read_pairs(place)}
    return list(pairs.values())
