"""Stage active_check: the study's conclusion under full fine-tuning, at a few label counts.

Writes one `check_*.json` an acquisition function and seed, from which an interrupted run continues; `check.json`,
`tables/check.csv` and `summary.json`.
"""

import json
from pathlib import Path
from typing import Any

import pandas as pd

from rmcore.active.analysis import analyse_check
from rmcore.active.fine_tuning import FullRetrainer, check_record
from rmcore.core.errors import ConfigError
from rmcore.core.files import write_json
from rmcore.core.progress import Report, within
from rmcore.core.tracking import Tracker
from rmcore.data.table import read_pairs
from rmcore.stages.active import make_labeller
from rmcore.stages.features import PAIRS_FILE
from rmcore.stages.interface import Upstream
from rmcore.stages.settings import ActiveCheckSettings


def run(settings: ActiveCheckSettings, upstream: Upstream, out: Path, tracker: Tracker, report: Report) -> None:
    """Train at every label count of every seed and acquisition function, then compare."""
    study = settings.active
    check = study.check
    if check is None:
        raise ConfigError("there is no check in this study; set active.check.num_seeds.")
    pairs = read_pairs(upstream["features"] / PAIRS_FILE)
    cells = [
        (name, seed) for seed in range(settings.seed, settings.seed + check.num_seeds) for name in check.acquisitions
    ]
    records: dict[str, list[dict[str, Any]]] = {name: [] for name in check.acquisitions}
    for done, (name, seed) in enumerate(cells):
        place = out / f"check_{name}_{seed}.json"
        if not place.is_file():
            told = within(report, done, len(cells), f"seed {seed}")
            labeller = make_labeller(settings.label_temperature, pairs, seed)
            retrainer = FullRetrainer(settings.model, settings.train, device=settings.device, seed=seed)
            write_json(place, check_record(pairs, labeller, retrainer, study, acquisition=name, report=told))
        records[name].append(json.loads(place.read_text()))
    found = analyse_check(records)
    write_json(out / "check.json", found)
    rows = [
        {"acquisition": name, "num_labels": count} | row
        for name, values in found["accuracy"].items()
        for count, row in zip(found["num_labels"], values, strict=True)
    ]
    (out / "tables").mkdir(exist_ok=True)
    pd.DataFrame(rows).to_csv(out / "tables" / "check.csv", index=False)
    last = {f"eval/check_difference_{name.replace('-', '_')}": rows[-1] for name, rows in found["difference"].items()}
    write_json(out / "summary.json", {"metrics": last})
