"""Stage validation: which score tells the gains of the population apart, and what is shipped because of it.

Writes `validation.json`, `readiness_fit.json` (what `rmcore.policy` ships, once copied there), `tables/`, figures and
`summary.json`.
"""

from pathlib import Path

import pandas as pd

from rmcore.core.files import write_json
from rmcore.core.progress import Report
from rmcore.core.tracking import Tracker
from rmcore.policy.readiness.readiness_v2 import FIT_FILE
from rmcore.policy.readiness.validation import analyse
from rmcore.reporting.figures.policy import readiness_against_gain_figure
from rmcore.reporting.figures.style import save
from rmcore.stages.interface import Upstream
from rmcore.stages.population import ROWS_FILE
from rmcore.stages.settings import ValidationSettings


def run(settings: ValidationSettings, upstream: Upstream, out: Path, tracker: Tracker, report: Report) -> None:
    """Compare the scores and fit the probability."""
    rows = pd.read_parquet(upstream["population"] / ROWS_FILE)
    found = analyse(rows, optimizer=settings.planned_optimizer, min_gain=settings.min_gain, seed=settings.seed)
    write_json(out / "validation.json", found)
    population = {name: found[name] for name in ("num_models", "num_backbones", "optimizer", "min_gain", "verdict")}
    write_json(out / FIT_FILE, found["fit"] | {"planned_kl": settings.planned_kl, "population": population})
    (out / "tables").mkdir()
    rows.to_csv(out / "tables" / "models.csv", index=False)
    (out / "figures").mkdir()
    save(readiness_against_gain_figure(found, rows.to_dict("records")), out / "figures" / "readiness_against_gain.png")
    shown = {
        f"ready/spearman_{score}": by_method[settings.planned_optimizer]
        for score, by_method in found["correlations"].items()
    }
    shown["ready/spearman_v2_minus_accuracy"] = found["differences"]["v2"]
    write_json(out / "summary.json", {"metrics": shown})
