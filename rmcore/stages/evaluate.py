"""Stage evaluate: how good the rewards are on pairs the model never saw.

Scores the test split (reported), the validation split (fits the temperature), the synthetic benchmark's
out-of-distribution split, and some training pairs (for the gap); and the judged answers of `evaluate.answers`. Writes
`rewards.parquet`, `metrics.json`, `tables/`, figures and `summary.json`; `answers.parquet` and `answers.json` where
there are answers.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from rmcore.config.evaluate import EvaluateConfig
from rmcore.core.files import write_json
from rmcore.core.printing import for_spreadsheets
from rmcore.core.progress import Report, prefixed, silent
from rmcore.core.tracking import Tracker
from rmcore.data.pair import PreferencePair
from rmcore.data.table import read_pairs
from rmcore.ensembles.score import score_pairs_table, with_texts
from rmcore.evaluation.calibration import reliability_bins
from rmcore.evaluation.report_card import evaluate_pairs, most_confident_mistakes
from rmcore.evaluation.uncertainty import MetricValue, effective_prompts
from rmcore.models.device import scoring_dtype
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.readiness.judged_answers import (
    read_judged_answers,
    report_left_out_answers,
    require_readable,
    rewards_of,
    write_judged_answers,
)
from rmcore.reporting.figures.calibration import reliability_diagram_figure
from rmcore.reporting.figures.context import accuracy_in_context_figure
from rmcore.reporting.figures.length import reward_by_length_figure
from rmcore.reporting.figures.margins import margin_histogram_figure
from rmcore.reporting.figures.style import save
from rmcore.stages.observed import Measured, measure_observations
from rmcore.stages.prepared import CEILING_FILE, observations_of
from rmcore.stages.seen_prompts import prompts_of_training
from rmcore.stages.stages import EvaluateStage
from rmcore.stages.trained import load_trained
from rmcore.training.material import read_likelihood

TRAIN_METRICS = ("pairwise_accuracy", "loss", "mean_margin")
CALIBRATION_METRICS = ("ece", "brier", "temperature")
NUM_MISTAKES = 50
"""Most confident mistakes that are kept, with their texts."""


def run(settings: EvaluateStage, out: Path, tracker: Tracker, report: Report) -> None:
    """Score the splits with the best checkpoint and measure."""
    prepared = settings.prepared.folder
    dtype = settings.evaluate.dtype or scoring_dtype(settings.device)
    rm = load_trained(settings, dtype)
    splits = {
        name: read_pairs(prepared / f"{name}.parquet", settings.evaluate.train_pairs if name == "train" else None)
        for name in ("test", "validation", "ood", "train")
        if (prepared / f"{name}.parquet").is_file()
    }
    tables, cut = {}, {}
    for name, pairs in splits.items():
        if pairs:
            tables[name], cut[name] = score_pairs_table(rm, pairs, report=prefixed(report, name))
    pd.concat([table.assign(split=name) for name, table in tables.items()]).to_parquet(out / "rewards.parquet")
    metrics = {
        name: measure(
            table,
            settings.evaluate,
            seed=settings.seed,
            beta=rm.beta,
            calibration=tables.get("validation"),
            report=prefixed(report, name),
        )
        for name, table in tables.items()
        if name in ("test", "ood")
    }
    if "train" in tables:
        of_train = prefixed(report, "train")
        train_card = measure(tables["train"], settings.evaluate, seed=settings.seed, beta=rm.beta, report=of_train)
        metrics["train"] = {name: train_card[name] for name in TRAIN_METRICS}
    else:  # of graded answers, one a prompt, no pair can be made
        metrics["train"] = {name: MetricValue(None, None, None, 0, "no pairs to train on") for name in TRAIN_METRICS}
    ceilings = json.loads((prepared / CEILING_FILE).read_text()) if (prepared / CEILING_FILE).is_file() else {}
    record: dict[str, Any] = {
        "beta": rm.beta,
        "metrics": {name: {key: value.to_dict() for key, value in card.items()} for name, card in metrics.items()},
        "context": _context(metrics, ceilings),
        "truncation": cut,
    }
    if settings.evaluate.answers is not None:
        answers = read_judged_answers(Path(settings.evaluate.answers), trained_on=prompts_of_training(prepared))
        report_left_out_answers(answers)
        require_readable(rm.renderer, answers, settings.evaluate.answers)
        rewards = rewards_of(rm, answers, report=prefixed(report, "judged answers"))
        write_judged_answers(out, answers, rewards)
    judged = _judgements(rm, settings, splits["test"], report)
    record["observations"] = None if judged is None else asdict(judged)
    write_json(out / "metrics.json", record)
    tracked = tracked_metrics(record["metrics"])
    if judged is not None:
        of_judgements = record["observations"]["metrics"]
        tracked |= tracked_metrics({"test": {name.replace(" ", "_"): one for name, one in of_judgements.items()}})
    write_json(out / "summary.json", {"metrics": tracked})
    bins = reliability_bins(tables["test"], beta=rm.beta)
    mistakes = with_texts(most_confident_mistakes(tables["test"], beta=rm.beta).head(NUM_MISTAKES), splits["test"])
    _write_tables(out / "tables", metrics["test"], bins, mistakes)
    draw(out / "figures", tables["test"], metrics["test"], bins, record["context"])


def _judgements(
    rm: BradleyTerryRM, settings: EvaluateStage, pairs: Sequence[PreferencePair], report: Report
) -> Measured | None:
    """Measure the held-out judgements of any kind, where the model was trained on such."""
    checkpoint = settings.trained.folder / "best"
    likelihood, said = read_likelihood(checkpoint), observations_of(settings.prepared.folder, "test")
    if likelihood is None or said is None:
        return None
    return measure_observations(
        rm, checkpoint, likelihood, said, pairs, settings.evaluate, seed=settings.seed, report=report
    )


def measure(
    table: pd.DataFrame,
    config: EvaluateConfig,
    *,
    seed: int,
    beta: float,
    calibration: pd.DataFrame | None = None,
    report: Report = silent,
) -> dict[str, MetricValue]:
    """Every metric of the reward table of a model with this `beta`, under the settings of `config`."""
    warn_of_unequal(table["prompt_id"])
    return evaluate_pairs(
        table,
        calibration=calibration,
        num_resamples=config.num_resamples,
        thresholds=config.thresholds,
        seed=seed,
        beta=beta,
        report=report,
    )


def warn_of_unequal(prompts: pd.Series) -> None:
    """Say on stderr where a few prompts have so many of the pairs that fewer than half of the prompts count."""
    sizes = prompts.value_counts().to_numpy(dtype=np.float64)
    effective = effective_prompts(sizes)
    if len(sizes) > 1 and effective < len(sizes) / 2:
        print(
            f"warning: the pairs of {len(sizes)} prompts say as much as those of {effective:.1f} prompts of equal size "
            f"(the largest has {int(sizes.max())} of {int(sizes.sum())}), so intervals are wide or not given. Read the "
            "accuracy in which each prompt counts alike, or limit the pairs of a prompt.",
            file=sys.stderr,
        )


def tracked_metrics(metrics: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Name the metrics as trackers show them, for example `eval/test_pairwise_accuracy` and `calib/test_brier`.

    The split is part of the name because `eval/pairwise_accuracy` is the curve of the validation pairs in training.
    """
    named = {}
    for split, card in metrics.items():
        for name, value in card.items():
            group = "calib" if name.startswith(CALIBRATION_METRICS) else "eval"
            label = name.replace("@", "_at_").replace("[", ".").replace("]", "")
            named[f"{group}/{split}_{label}"] = value
    return named


def draw(
    folder: Path,
    table: pd.DataFrame,
    card: Mapping[str, MetricValue],
    bins: pd.DataFrame,
    context: list[dict[str, Any]],
) -> None:
    """Draw the evaluation figures into `folder`; `bins` are the table's `reliability_bins`."""
    drawn = {
        "margin_histogram": margin_histogram_figure(table, negative_rate=card["negative_margin_rate"].to_dict()),
        "reliability_diagram": reliability_diagram_figure(bins, card["ece_debiased"].to_dict()),
        "reward_by_length": reward_by_length_figure(table),
        "accuracy_in_context": accuracy_in_context_figure(context),
    }
    for name, figure in drawn.items():
        save(figure, folder / f"{name}.png")


def _context(metrics: Mapping[str, Mapping[str, MetricValue]], ceilings: Mapping[str, float]) -> list[dict[str, Any]]:
    """Rows of the accuracy figure: this model between what needs no model and what no model can beat."""

    def row(name: str, kind: str, value: MetricValue) -> dict[str, Any]:
        return {"name": name, "kind": kind, "value": value.value, "ci_low": value.ci_low, "ci_high": value.ci_high}

    def yardstick(name: str, value: float) -> dict[str, Any]:
        return {"name": name, "kind": "reference", "value": value, "ci_low": None, "ci_high": None}

    test = metrics["test"]
    rows = [
        row("this model", "model", test["pairwise_accuracy"]),
        yardstick("guessing", 0.5),
        row("the longer one wins", "reference", test["longer_wins_accuracy"]),
    ]
    if "test" in ceilings:
        rows.append(yardstick("label ceiling", ceilings["test"]))
    rows.append(row("length-matched", "subset", test["length_matched_accuracy"]))
    for name, value in test.items():
        if name.startswith("pairwise_accuracy["):
            rows.append(row(name.removeprefix("pairwise_accuracy[").removesuffix("]"), "subset", value))
    if "ood" in metrics:
        rows.append(row("out of distribution", "ood", metrics["ood"]["pairwise_accuracy"]))
    return rows


def _write_tables(folder: Path, card: Mapping[str, MetricValue], bins: pd.DataFrame, mistakes: pd.DataFrame) -> None:
    folder.mkdir()
    pd.DataFrame([{"metric": name} | value.to_dict() for name, value in card.items()]).to_csv(
        folder / "metrics.csv", index=False
    )
    mistakes.map(for_spreadsheets).to_csv(folder / "most_confident_mistakes.csv", index=False)
    bins.to_csv(folder / "reliability_bins.csv", index=False)
