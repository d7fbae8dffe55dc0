"""The report of an experiment: one HTML file for a reader who was not there."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rmcore.core.cost import money, money_text
from rmcore.reporting.experiment_schema import (
    ArmResult,
    CellResult,
    ExperimentResults,
    HypothesisResult,
    MetricInfo,
    Tuned,
)
from rmcore.reporting.figures import numbers
from rmcore.reporting.figures.arms import looks, main_metrics
from rmcore.reporting.figures.claims import VERDICTS, claimed, decided_by, subject, tally
from rmcore.reporting.figures.quantities import (
    SEED_INTERVAL,
    TWO_SEEDS,
    capital,
    claim_reason,
    compared,
    distance,
    estimate,
    level,
    mean_estimate,
)
from rmcore.reporting.html.experiment_summary import finished_seeds, measured, metric_info, web_address
from rmcore.reporting.html.glossary import EXPERIMENT_WORDS
from rmcore.reporting.html.page import date, gate_row, write_page
from rmcore.reporting.schema import Metric

TEMPLATE = "experiment.html.j2"
CAPTIONS = {
    "forest_plot": "Each claim on its own scale. A claim is supported when its whole interval lies in the shaded side, "
    "refuted when all of it lies outside, and inconclusive when it holds the threshold.",
    "looks": "Each look adds seeds. Its interval is wider than that of a single look would be, so that all looks "
    "together err in 5 %. A claim that was closed got no further seeds.",
    "arm_intervals": "Means and intervals of each arm alone. The claims are judged on paired differences, which are "
    "surer than two intervals side by side: overlap here does not mean that there is no difference.",
    "tradeoff": "Accuracy against what it costs and against how far the model's confidence can be believed.",
    "learning_curves": "How the arms got there. The mean of an arm ends where its first seed stopped.",
}
_BANDS = {"success": "pass", "failure": "fail"}
_KEY, _CELL_KEY = 12, 8  # characters of a digest that are shown
_UNKNOWN = object()


def write_experiment_report(results: ExperimentResults, figures: Mapping[str, Path], out: Path) -> Path:
    """Write the self-contained report of an experiment to `out`; returns `out`.

    Args:
        results: everything to show, see rmcore.reporting.experiment_schema.
        figures: PNG files by name; those of CAPTIONS have their place, others follow them, missing ones are mentioned.
        out: HTML file to write; its folder is made.

    Raises:
        DataError: a figure is not a readable PNG file.
    """
    return write_page(TEMPLATE, view(results), figures, CAPTIONS, out)


def view(results: ExperimentResults) -> dict[str, Any]:
    """Gather the values that the template prints, numbers as text."""
    price = results["cost"]["price_per_hour"]
    known = [name for name in results["metrics"] if _is_measured(results, name)]
    shown = main_metrics(known, results["hypotheses"])
    rest = [name for name in known if name not in shown]
    main = next(((name, info["higher_is_better"]) for name, info in results["metrics"].items()), ("", None))
    colours = {name: look.colour for name, look in looks(results["arms"], *main).items()}
    return {
        "results": results,
        "created": date(results["created"]),
        "frozen": date(results["registration"]["frozen_at"]),
        "short_hash": results["registration"]["hash"][:_KEY],
        "tally": tally(results["hypotheses"]),
        "link": web_address(results["mlflow_url"]),
        "answers": [_answer(item, metric_info(results, item["metric"]), results) for item in results["hypotheses"]],
        "detectable": [_detectable(item, metric_info(results, item["metric"])) for item in results["hypotheses"]],
        "colours": colours,
        "metrics": [results["metrics"][name] for name in shown],
        "more_metrics": [results["metrics"][name] for name in rest],
        "unmeasured": [info["label"] for name, info in results["metrics"].items() if name not in known],
        "arms": [_arm(arm, results, shown, rest) for arm in results["arms"]],
        "tuned": [_tuned(arm["name"], arm["tuned"]) for arm in results["arms"] if arm["tuned"] is not None],
        "cells": [_cell(cell, results["metrics"], shown, price) for cell in in_order(results)],
        "seed_interval": SEED_INTERVAL,
        "priced": price is not None,
        "cost": _cost(results),
        "num_cells": len(results["cells"]),
        "num_failed": sum(cell["status"] == "failed" for cell in results["cells"]),
        "base_yaml": yaml.safe_dump(dict(results["base"]), sort_keys=False, allow_unicode=True, width=100),
        "words": EXPERIMENT_WORDS,
    }


def _is_measured(results: ExperimentResults, name: str) -> bool:
    """Whether any arm or cell has a value of the metric."""
    means = (arm["metrics"][name]["value"] for arm in results["arms"] if name in arm["metrics"])
    return any(value is not None for value in (*means, *(cell["metrics"].get(name) for cell in results["cells"])))


def in_order(results: ExperimentResults) -> list[CellResult]:
    """The cells by arm as declared, then by seed."""
    order = {arm["name"]: position for position, arm in enumerate(results["arms"])}
    return sorted(results["cells"], key=lambda cell: (order.get(cell["arm"], len(order)), cell["seed"]))


def setting_text(value: Any) -> str:
    """A setting's value as it is written in YAML, numbers with four digits."""
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return f"{value:.4g}"
    return yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("\n").removesuffix("\n...")


def _answer(item: HypothesisResult, info: MetricInfo, results: ExperimentResults) -> dict[str, Any]:
    value, bounds = measured(item, info["unit"])
    prompts = item["num_prompts"]
    tests = [
        ("p", item["p"], "two-sided, of a value equal to the threshold"),
        ("p after Holm", item["p_holm"], "adjusted for all claims of this experiment"),
        ("sign-flip p", item["sign_flip_p"], "of no difference at all, over prompts"),
    ]
    over = numbers.count(item["num_seeds"]) + (" seed" if item["num_seeds"] == 1 else " seeds")
    return {
        "name": item["name"],
        "claim": item["claim"],
        "verdict": item["verdict"],
        "words": VERDICTS[item["verdict"]].words,
        "subject": f"{capital(info['label'])}, {subject(item)}",
        "value": value,
        "bounds": bounds if bounds == TWO_SEEDS else f"95 %: {bounds}" if bounds else "no interval",
        "claimed": f"claimed: {claimed(item, info['unit'])}",
        "reason": claim_reason(item),
        "closed": item["closed"],
        "decided_by": decided_by(item, results["sizes"].get(item["name"]), results["cells"]),
        "over": over if prompts is None else f"{over}, {numbers.count(prompts)} prompts",
        "tests": [(name, numbers.decimal(p), meaning) for name, p, meaning in tests if numbers.finite(p) is not None],
        "method": item["method"],
    }


def _detectable(item: HypothesisResult, info: MetricInfo) -> dict[str, str]:
    """Give the effect that this matrix could have detected and the one that it saw, as distances from the threshold."""
    unit, comparison = info["unit"], item["comparison"]
    value = numbers.finite(item["value"])
    seen = None if value is None else abs(value - item["threshold"])
    return {
        "name": item["name"],
        "what": f"{info['label']}, {subject(item)}",
        "threshold": compared(item["threshold"], unit, comparison),
        "smallest": distance(item["smallest_detectable"], unit, comparison),
        "seen": distance(seen, unit, comparison),
        "words": VERDICTS[item["verdict"]].words,
        "verdict": item["verdict"],
    }


def _arm(arm: ArmResult, results: ExperimentResults, shown: Sequence[str], rest: Sequence[str]) -> dict[str, Any]:
    changes = []
    for setting, value in arm["changes"].items():
        before = _in_base(results["base"], setting)
        changes.append((setting, setting_text(value), None if before is _UNKNOWN else setting_text(before)))
    units = {name: info["unit"] for name, info in results["metrics"].items()}
    return {
        "name": arm["name"],
        "is_control": arm["is_control"],
        "merged": arm["merged"],
        "changes": changes,
        "seeds": f"{finished_seeds(results)[arm['name']]} of {len(results['seeds'])}",
        "metrics": [_mean(name, arm["metrics"].get(name), units[name]) for name in shown],
        "more_metrics": [_mean(name, arm["metrics"].get(name), units[name]) for name in rest],
        "bands": [(name, band, _BANDS.get(band, "muted")) for name, band in arm["bands"].items()],
    }


def _mean(name: str, metric: Metric | None, unit: str) -> tuple[str, str]:
    """A mean over seeds and its interval, or why there is none."""
    if metric is None:
        return numbers.MISSING, "not measured"
    value, bounds = mean_estimate(name, metric, unit)
    return value, bounds or metric["reason"] or "no interval"


def _in_base(base: Mapping[str, Any], setting: str) -> Any:
    """The base's value of a dotted setting; _UNKNOWN where it has none."""
    found: Any = base
    for part in setting.split("."):
        if not isinstance(found, Mapping) or part not in found:
            return _UNKNOWN
        found = found[part]
    return found


def _tuned(arm: str, tuned: Tuned) -> dict[str, Any]:
    unit = "share" if "accuracy" in tuned["metric"] else ""
    trials = [
        {
            "value": setting_text(trial["value"]),
            "score": "failed" if trial["score"] is None else level(trial["score"], unit),
            "chosen": trial["value"] == tuned["chosen"],
        }
        for trial in sorted(tuned["trials"], key=lambda trial: trial["value"])
    ]
    low, high, chosen = (setting_text(tuned[key]) for key in ("low", "high", "chosen"))
    return {**tuned, "arm": arm, "low": low, "high": high, "chosen": chosen, "trials": trials}


def _cell(
    cell: CellResult, infos: Mapping[str, MetricInfo], shown: Sequence[str], price: float | None
) -> dict[str, Any]:
    gate = [gate_row(check) for check in cell["gate"]]
    return {
        **cell,
        "values": [estimate(name, _alone(cell["metrics"].get(name)), infos[name]["unit"])[0] for name in shown],
        "num_passed": sum(check["passed"] for check in gate),
        "gate": gate,
        "failed_checks": [check for check in gate if not check["passed"]],
        "took": numbers.duration(cell["device_seconds"]),
        "cost": "" if (spent := money(cell["device_seconds"], price)) is None else f"{spent:.2f}",
        "short_key": cell["key"][:_CELL_KEY] if cell["key"] else numbers.MISSING,
    }


def _alone(value: float | None) -> dict[str, float | None]:
    """A value without an interval."""
    return {"value": value, "ci_low": None, "ci_high": None}


def _cost(results: ExperimentResults) -> list[tuple[str, str, str]]:
    """(name, value, meaning) of what the matrix took."""
    cost = results["cost"]
    estimated, took = numbers.finite(cost["estimated_seconds"]), cost["run_seconds"]
    against = f"; it took {numbers.decimal(took / estimated)} times that" if estimated else ""
    spent = money_text(cost["device_seconds"], cost["price_per_hour"])
    no_estimate = "no throughput was known, so none was made" if estimated is None else "made before the first cell ran"
    return [
        ("estimate of this run", numbers.duration(estimated), f"{no_estimate}{against}"),
        ("this run", numbers.duration(took), "wall time of the command"),
        (
            "all artifacts",
            numbers.duration(cost["measured_seconds"]),
            "whenever they were made; one that several cells share counts once",
        ),
        ("device time", numbers.duration(cost["device_seconds"]), "that part of them during which a device was held"),
        *([("cost", spent, "of the device time")] if spent else []),
        ("cells computed", numbers.count(cost["num_computed"]), "in this run"),
        ("cells cached", numbers.count(cost["num_cached"]), "found finished"),
        ("cells failed", numbers.count(cost["num_failed"]), "run the command again: only these are repeated"),
    ]
