"""The report of a search for settings: one HTML file for a reader who was not there, and its numbers as text."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from rmcore.core.cost import money_text
from rmcore.reporting.figures import numbers
from rmcore.reporting.figures.style import save
from rmcore.reporting.figures.tuning import (
    importance_figure,
    optimism_figure,
    parallel_coordinates_figure,
    trials_history_figure,
)
from rmcore.reporting.figures.tuning_cost import accuracy_cost_figure
from rmcore.reporting.html.markdown import escape
from rmcore.reporting.html.page import date, write_page
from rmcore.reporting.schema import Metric
from rmcore.reporting.tuning_schema import ArmRow, TrialRow, TuningResults

TEMPLATE = "tuning.html.j2"
CAPTIONS = {
    "optimism": "The score that the winner was chosen by is the best of many noisy ones, so it flatters. What counts "
    "is on the right: fresh seeds on test pairs that no trial saw. Bars are 95 % intervals, small points single seeds.",
    "trials_history": "Every trial by its validation scores, thin lines join its rungs. Grey ones were given up: their "
    "scores are after less training, so they cannot be compared with complete ones.",
    "setting_importance": "Share of the spread of final scores that each setting explains (fANOVA, complete trials). "
    "It says what mattered within these ranges, not which value is good.",
    "parallel_coordinates": "A line is a trial, darker where its score is better: dark lines meet at good values. "
    "Trials that were given up are thin.",
    "accuracy_cost": "Complete trials by training time. The line joins those that no other beats in both.",
}
WORDS = {
    "trial": "one choice of settings, trained under the seed of the search",
    "rung": "a ninth, a third, or all of a trial's steps; after each, about two of three trials are given up",
    "given up": "not among the best third at its rung so far, or worse than the best trial on the same prompts "
    "(Wilcoxon's signed-rank test, one-sided, 5 %)",
    "selected score": "the validation score by which the winner was chosen",
    "fresh seeds": "seeds that no trial used: other initial weights, another order, other validation pairs",
    "optimism": "selected score minus the mean validation score of the fresh seeds: how much being chosen flattered",
    "fANOVA": "a forest fitted to the final scores, whose variance is shared out over the settings",
}
ARM_HEADINGS = ("", "selected", "fresh validation", "optimism", "test", "training")
SHORT_HEADINGS = ARM_HEADINGS[:-1]
TRIAL_HEADINGS = ("trial", "state", "score", "at", "seconds", "settings", "why")


def shown(value: float | None, unit: str) -> str:
    """A score as text."""
    return numbers.percent(value) if unit == "share" or value is None else f"{value:.4f}"


def with_bounds(metric: Metric, unit: str) -> str:
    """A score with its interval as text."""
    if metric["ci_low"] is None:
        return shown(metric["value"], unit)
    return f"{shown(metric['value'], unit)} [{shown(metric['ci_low'], unit)}, {shown(metric['ci_high'], unit)}]"


def arm_rows(results: TuningResults) -> list[list[str]]:
    """The winner and the defaults, as text."""
    arms: list[tuple[str, ArmRow]] = [(f"winner, trial {results['winner']['trial']}", results["winner"])]
    if results["winner"]["trial"] != 0:
        arms.append(("defaults, trial 0", results["defaults"]))
    return [
        [
            name,
            shown(arm["selected"], results["unit"]),
            with_bounds(arm["fresh"], results["unit"]),
            signed(arm["optimism"], results["unit"]),
            with_bounds(arm["test"], results["unit"]),
            numbers.duration(arm["train_seconds"]),
        ]
        for name, arm in arms
    ]


def short_rows(results: TuningResults) -> list[list[str]]:
    """The same without training times, for a terminal."""
    return [row[:-1] for row in arm_rows(results)]


def signed(value: float, unit: str) -> str:
    """A difference of scores as text: points of a share, nats with four digits."""
    return f"{100 * value:+.1f} points" if unit == "share" else f"{value:+.4f}"


def setting_text(value: Any) -> str:
    """A setting's value as text."""
    return "null" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def settings_text(settings: Mapping[str, Any]) -> str:
    """Settings in one line, without the names of their sections."""
    return ", ".join(f"{name.partition('.')[2]}={setting_text(value)}" for name, value in settings.items())


def trial_rows(results: TuningResults) -> list[list[str]]:
    """All trials, the best first; those that were given up after less training come later."""
    sign = 1 if results["higher_is_better"] else -1

    def order(one: TrialRow) -> tuple[float, float]:
        return (-len(one["values"]), -sign * one["values"][-1] if one["values"] else 0.0)

    return [
        [
            str(one["number"]),
            one["state"],
            shown(one["values"][-1] if one["values"] else None, results["unit"]),
            f"{100 * one['shares'][-1]:.0f} %" if one["shares"] else numbers.MISSING,
            f"{one['seconds']:.1f}",
            settings_text(one["settings"]),
            one["why"],
        ]
        for one in sorted(results["trials"], key=order)
    ]


def draw_tuning(results: TuningResults, folder: Path) -> dict[str, Path]:
    """Draw all figures into `folder`; their paths by name."""
    drawn = {
        "optimism": optimism_figure(results),
        "trials_history": trials_history_figure(results),
        "setting_importance": importance_figure(results),
        "parallel_coordinates": parallel_coordinates_figure(results),
        "accuracy_cost": accuracy_cost_figure(results),
    }
    return {name: save(figure, folder / f"{name}.png") for name, figure in drawn.items()}


def write_tuning_report(results: TuningResults, figures: Mapping[str, Path], recipe: str, out: Path) -> Path:
    """Write the self-contained report of a search to `out`; returns `out`.

    Args:
        results: everything that was found.
        figures: PNG files by name, those of CAPTIONS.
        recipe: text of the recipe.
        out: HTML file to write; its folder is made.

    Raises:
        DataError: a figure is not a readable PNG file.
    """
    return write_page(TEMPLATE, view(results, recipe), figures, CAPTIONS, out)


def view(results: TuningResults, recipe: str) -> dict[str, Any]:
    """Gather the values that the template prints, numbers as text."""
    cost, states = results["cost"], [one["state"] for one in results["trials"]]
    facts = [
        ("pairs", results["data"]),
        ("model", results["model"]),
        ("objective", results["label"]),
        ("trials", ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))),
        ("cost", numbers.duration(cost["device_seconds"])),
    ]
    if spent := money_text(cost["device_seconds"], cost["price_per_hour"]):
        facts.append(("money", spent))
    return {
        "name": results["name"],
        "headline": results["headline"],
        "tone": "good" if results["is_better"] else "open",
        "facts": facts,
        "created": date(results["created"]),
        "definition": results["definition"],
        "counts": f"{results['num_train']} training and {results['num_validation']} validation pairs; "
        f"{results['num_test_prompts']} test prompts",
        "seeds": ", ".join(map(str, results["seeds"])),
        "method": results["method"],
        "arm_headings": ARM_HEADINGS,
        "arms": arm_rows(results),
        "settings": [
            (name, setting_text(results["defaults"]["settings"].get(name)), setting_text(value))
            for name, value in results["winner"]["settings"].items()
        ],
        "trial_headings": TRIAL_HEADINGS,
        "trials": trial_rows(results),
        "notes": results["notes"],
        "space": yaml.safe_dump(results["space"], sort_keys=False, allow_unicode=True, width=100),
        "recipe": recipe,
        "search_cost": numbers.duration(cost["search_seconds"]),
        "confirmation_cost": numbers.duration(cost["confirmation_seconds"]),
        "words": WORDS,
    }


def tuning_markdown(results: TuningResults) -> str:
    """Say what was found, for Prefect's artifact view and a description in MLflow."""
    lines = [f"# {escape(results['name'])}", "", escape(results["headline"]), ""]
    lines += ["| " + " | ".join(ARM_HEADINGS) + " |", "|" + " --- |" * len(ARM_HEADINGS)]
    lines += ["| " + " | ".join(escape(cell) for cell in row) + " |" for row in arm_rows(results)]
    lines += ["", "| setting | defaults | winner |", "| --- | --- | --- |"]
    for name, value in results["winner"]["settings"].items():
        before = setting_text(results["defaults"]["settings"].get(name))
        lines.append(f"| {escape(name)} | {escape(before)} | {escape(setting_text(value))} |")
    return "\n".join(lines) + "\n"
