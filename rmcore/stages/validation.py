"""Stage validation: which score tells the gains of two populations apart, and what is shipped because of it.

Writes `validation.json`, `readiness_fit.json` (what `rmcore.policy` ships, once copied there), `tables/`, figures and
`summary.json`.
"""

from pathlib import Path

import pandas as pd

from rmcore.core.files import write_json
from rmcore.core.progress import Report
from rmcore.core.tracking import Tracker
from rmcore.policy.readiness.readiness_v2 import FIT_FILE, conditions, shipped_fit
from rmcore.policy.readiness.validation import analyse
from rmcore.reporting.figures.policy import readiness_against_gain_figure, reliability_figure
from rmcore.reporting.figures.style import save
from rmcore.reporting.html.validation import FITS
from rmcore.stages.interface import POPULATIONS, Upstream
from rmcore.stages.population import ROWS_FILE
from rmcore.stages.settings import ValidationSettings


def run(settings: ValidationSettings, upstream: Upstream, out: Path, tracker: Tracker, report: Report) -> None:
    """Compare the scores and fit the probability."""
    plan = settings.readiness
    tables = [
        pd.read_parquet(upstream[role] / ROWS_FILE).assign(world=world)
        for role, world in zip(POPULATIONS, settings.worlds, strict=True)
    ]
    rows = pd.concat(tables, ignore_index=True)
    found = analyse(
        rows,
        optimizer=plan.planned_optimizer,
        min_gain=plan.min_gain,
        conditions=conditions(plan),
        shipped=shipped_fit(),
        seed=settings.seed,
        report=report,
    )
    write_json(out / "validation.json", found)
    population = {name: found[name] for name in ("num_models", "num_backbones", "optimizer", "min_gain", "verdict")}
    write_json(out / FIT_FILE, found["fit"] | {"planned_kl": plan.planned_kl, "population": population})
    (out / "tables").mkdir()
    rows.to_csv(out / "tables" / "models.csv", index=False)
    (out / "figures").mkdir()
    save(readiness_against_gain_figure(found, rows.to_dict("records")), out / "figures" / "readiness_against_gain.png")
    save(reliability_figure(found["calibration"], FITS), out / "figures" / "reliability.png")
    shown = {
        f"ready/spearman_{score}": by_method[plan.planned_optimizer]
        for score, by_method in found["correlations"].items()
    }
    shown |= {f"ready/{one['name']}": one for one in found["claims"]}
    write_json(out / "summary.json", {"metrics": shown})
