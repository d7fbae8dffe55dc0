"""Every figure of an experiment, from its record."""

from collections.abc import Mapping
from pathlib import Path

from rmcore.reporting.experiment_schema import ExperimentResults, MetricInfo
from rmcore.reporting.figures.arm_intervals import arm_intervals_figure
from rmcore.reporting.figures.arms import main_metrics
from rmcore.reporting.figures.forest import forest_plot_figure
from rmcore.reporting.figures.learning import learning_curves_figure
from rmcore.reporting.figures.style import save
from rmcore.reporting.figures.tradeoff import tradeoff_figure


def draw_experiment(results: ExperimentResults, folder: Path) -> dict[str, Path]:
    """Draw what the record has data for; PNG files by name: forest_plot, arm_intervals, tradeoff.

    Args:
        results: record of the experiment.
        folder: where the files go; made if missing.
    """
    drawn = {}
    arms, cells, infos = results["arms"], results["cells"], results["metrics"]
    if results["hypotheses"]:
        drawn["forest_plot"] = forest_plot_figure(results["hypotheses"], infos)
    measured = [name for name in main_metrics(list(infos), results["hypotheses"]) if _is_measured(results, name)]
    if measured:
        drawn["arm_intervals"] = arm_intervals_figure(arms, cells, measured, infos)
    curves = {name: [curve for curve in found if curve["steps"]] for name, found in results["curves"].items()}
    curves = {name: found for name, found in curves.items() if found}
    if curves:
        main = next(((name, info["higher_is_better"]) for name, info in infos.items()), ("", None))
        drawn["learning_curves"] = learning_curves_figure(curves, arms, main)
    accuracy = next((name for name in infos if "accuracy" in name and _is_measured(results, name)), None)
    others = [name for name in (_cost(infos), _calibration(infos)) if name and _is_measured(results, name)]
    if accuracy and others:
        drawn["tradeoff"] = tradeoff_figure(arms, cells, infos, accuracy=accuracy, others=others)
    return {name: save(figure, folder / f"{name}.png") for name, figure in drawn.items()}


def _is_measured(results: ExperimentResults, name: str) -> bool:
    return any(arm["metrics"].get(name, {"value": None})["value"] is not None for arm in results["arms"])


def _cost(infos: Mapping[str, MetricInfo]) -> str | None:
    """The time of the whole training where it is reported, else the first metric in seconds."""
    found = [name for name, info in infos.items() if info["unit"] == "seconds"]
    return min(found, key=lambda name: name != "cost/train_seconds", default=None)


def _calibration(infos: Mapping[str, MetricInfo]) -> str | None:
    """The debiased calibration error where it is reported, else the plain one."""
    found = [name for name in infos if "ece" in name.rpartition("/")[2].split("_")]
    return min(found, key=lambda name: "debiased" not in name, default=None)
