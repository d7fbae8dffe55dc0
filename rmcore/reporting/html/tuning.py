"""The report of a search for settings: what the winner is worth, its settings, the trials."""

from typing import Any, Literal, TypedDict

from rmcore.config.files import setting_text
from rmcore.core.cost import money_text
from rmcore.reporting.figures import numbers
from rmcore.reporting.html.blocks import Block, Table
from rmcore.reporting.html.page import date
from rmcore.reporting.schema import Metric


class TrialRow(TypedDict):
    """One trial."""

    number: int
    state: Literal["complete", "failed"]
    settings: dict[str, Any]
    """Values that it ran under, of the settings that are searched."""
    value: float | None
    """The objective, of a complete one."""
    seconds: float
    why: str
    """Why it failed."""


class TuningResults(TypedDict):
    """Everything that a search found; JSON-ready."""

    name: str
    created: str
    headline: str
    """The verdict in one sentence."""
    is_better: bool
    """Whether the winner is shown to be better than the defaults on the test pairs."""
    label: str
    unit: str
    model: str
    data: str
    num_pairs: dict[str, int]
    """By split."""
    seeds: list[int]
    """Fresh seeds of the confirmation."""
    space: dict[str, str]
    defaults: dict[str, Any]
    winner: dict[str, Any]
    """The searched settings of each."""
    winner_trial: int
    confirmed: list[int]
    """Trials for which the test pairs were looked at."""
    trials: list[TrialRow]
    test: dict[str, Metric]
    """Means over the fresh seeds, of `winner` and `defaults`."""
    difference: dict[str, float | None]
    """Winner minus defaults on the test pairs: value, ci_low, ci_high."""
    method: str
    """How its interval was made."""
    notes: list[str]
    search_seconds: float
    confirmation_seconds: float
    price_per_hour: float | None
    recipe: str
    """Path of the recipe."""


def score(value: float | None, unit: str) -> str:
    """Return a score as text."""
    return numbers.percent(value) if unit == "share" or value is None else f"{value:.4f}"


def arm_rows(results: TuningResults) -> list[list[str]]:
    """Return the winner and the defaults as rows: name, validation score by which it was chosen, test score."""
    unit, number = results["unit"], results["winner_trial"]
    rows, arms = [], [("defaults", 0)]
    for name, at in [("winner", number), *arms] if number else arms:
        test = results["test"][name]
        low, high = (score(test[end], unit) for end in ("ci_low", "ci_high"))
        interval = f" [{low}, {high}]" if test["ci_low"] is not None else ""
        selected = score(results["trials"][at]["value"], unit)
        rows.append([f"{name}, trial {at}", selected, score(test["value"], unit) + interval])
    return rows


def cost_text(results: TuningResults) -> str:
    """Return what a search cost."""
    search, confirmation = results["search_seconds"], results["confirmation_seconds"]
    money = money_text(search + confirmation, results["price_per_hour"])
    said = f"{numbers.duration(search)} of trials, {numbers.duration(confirmation)} of confirmation"
    return f"{said}{f', {money}' if money else ''}"


def tuning_block(results: TuningResults, recipe: str = "") -> Block:
    """The result of a search: the winner against the defaults, its settings, the trials.

    Args:
        results: everything that was found.
        recipe: text of the recipe; left out where the page only sums up, as in Prefect's artifact view.
    """
    pairs = ", ".join(f"{number} {split}" for split, number in results["num_pairs"].items())
    settings = [
        (name, searched, setting_text(results["defaults"][name], 4), setting_text(results["winner"][name], 4))
        for name, searched in results["space"].items()
    ]
    worth = (
        "The validation score is the best of many noisy ones, so it flatters; the test score counts. Fresh seeds: "
        f"{', '.join(map(str, results['seeds']))}. {results['method']}"
    )
    arms = Table(("", "validation, by which it was chosen", "test, fresh seeds"), arm_rows(results))
    chosen = Table(("setting", "searched", "defaults", "winner"), settings, left=range(4))
    parts = [
        Block("What the winner is worth", text=(worth,), tables=(arms,)),
        Block("The winner's settings", tables=(chosen,)),
    ]
    if recipe:
        rows = [_trial(results, one) for one in results["trials"]]
        headings = ("trial", "state", results["label"], "seconds", "settings", "why")
        cost = f"Cost: {cost_text(results)}, in device time."
        parts += [
            Block("Recipe, for `rm-opt run --config recipe.yaml`", code=recipe),
            Block("The trials", text=(cost,), tables=(Table(headings, rows, left=(0, 1, 4, 5)),)),
        ]
    about = f"{results['model']} on {results['data']}: {pairs} pairs. {date(results['created'])}."
    return Block(results["headline"], text=(about,), findings=results["notes"], parts=parts)


def _trial(results: TuningResults, one: TrialRow) -> list[str]:
    settings = ", ".join(
        f"{name.partition('.')[2]}={setting_text(value, 4)}" for name, value in one["settings"].items()
    )
    value = "" if one["value"] is None else score(one["value"], results["unit"])
    return [str(one["number"]), one["state"], value, f"{one['seconds']:.1f}", settings, one["why"]]
