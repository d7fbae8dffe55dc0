"""Stage active: what choosing labels saves, over paired seeds and noise levels.

Writes one `seed_*.json` a noise level and seed, where an interrupted run continues; `active.json` (curves, savings,
verdicts), `tables/savings.csv`, figures and `summary.json`.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from rmcore.active.analysis import analyse
from rmcore.active.differences import CachedDifferences
from rmcore.active.labellers import GoldLabels, HiddenLabels, Labeller, NoisyLabels
from rmcore.active.study import pool_size, seed_record
from rmcore.core.files import write_json
from rmcore.core.progress import Report, within
from rmcore.core.tracking import Tracker
from rmcore.data.pair import PreferencePair
from rmcore.data.table import read_pairs
from rmcore.reporting.figures.active import label_efficiency_figure, label_savings_figure
from rmcore.reporting.figures.style import save
from rmcore.stages.features import DIFFERENCES_FILE, PAIRS_FILE
from rmcore.stages.interface import Upstream
from rmcore.stages.settings import ActiveSettings


def run(settings: ActiveSettings, upstream: Upstream, out: Path, tracker: Tracker, report: Report) -> None:
    """Run every seed at every noise level, then compare."""
    study = settings.active
    pairs = read_pairs(upstream["features"] / PAIRS_FILE)
    pool_size(len(pairs), study)  # refuses now what would fail later
    differences = CachedDifferences.of(pairs, np.load(upstream["features"] / DIFFERENCES_FILE))
    total = len(study.noise) * study.num_seeds
    records: dict[float, list[dict[str, Any]]] = {}
    done = 0
    for noise in study.noise:
        records[noise] = []
        for seed in range(settings.seed, settings.seed + study.num_seeds):
            place = out / f"seed_{noise:g}_{seed}.json"
            if not place.is_file():
                labeller = NoisyLabels(make_labeller(settings.label_temperature, pairs, seed), noise, seed=seed)
                told = within(report, done, total, f"noise {noise:g}, seed {seed}")
                write_json(place, seed_record(pairs, differences, labeller, study, seed=seed, report=told))
            records[noise].append(json.loads(place.read_text()))
            done += 1
    found = analyse(records, study)
    write_json(out / "active.json", found)
    _track(found, tracker)
    _write_outcome(found, out)


def make_labeller(temperature: float | None, pairs: list[PreferencePair], seed: int) -> Labeller:
    """Who labels: the gold world at `temperature`, anew under each seed; None: the pairs have their labels."""
    return HiddenLabels(pairs) if temperature is None else GoldLabels(seed=seed, temperature=temperature)


def _track(found: dict[str, Any], tracker: Tracker) -> None:
    """Curves without noise by label count, so that runs compare by acquisition function."""
    first = found["noise"][0]
    for place, count in enumerate(first["num_labels"]):
        tracker.metrics(
            count, {f"eval/accuracy_{_metric(name)}": rows[place]["value"] for name, rows in first["curves"].items()}
        )


def _metric(name: str) -> str:
    return name.replace("-", "_")


def _write_outcome(found: dict[str, Any], out: Path) -> None:
    rows = [
        {"noise": level["noise"], "acquisition": name} | one
        for level in found["noise"]
        for name, savings in level["savings"].items()
        for one in savings
    ]
    (out / "tables").mkdir(exist_ok=True)
    pd.DataFrame(rows).to_csv(out / "tables" / "savings.csv", index=False)
    save(label_efficiency_figure(found), out / "figures" / "label_efficiency.png")
    save(label_savings_figure(found), out / "figures" / "label_savings.png")
    shown = {
        f"eval/saving_{_metric(claim['acquisition'])}": claim["saving"]
        for claim in found["claims"]
        if claim["saving"]["value"] is not None
    }
    write_json(out / "summary.json", {"metrics": shown})
