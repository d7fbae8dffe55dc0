"""Over-optimisation: proxy and gold reward against KL."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rmcore.reporting.figures import numbers
from rmcore.reporting.figures.numbers import bound
from rmcore.reporting.figures.style import BLUE, MUTED, ORANGE, SMALL, dress, headline, legend, new_figure

if TYPE_CHECKING:  # a report needs the words and numbers of this module, and draws nothing
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

REWARD_NAMES = {"proxy": "proxy reward", "gold": "true reward"}
NAMES = {"best_of_n": "best-of-n", "kl_optimum": "KL-regularised optimum"}


def overoptimization_figure(name: str, curves: Sequence[Mapping[str, Any]]) -> "Figure":
    """One panel a method: both rewards with 95 % intervals over prompts.

    Args:
        name: of the proxy.
        curves: records of `rmcore.policy.overoptimization.Overoptimization.to_dict`, of one proxy.
    """
    figure = new_figure(5.2 * len(curves), 4.4)
    axes = figure.subplots(1, len(curves), sharey=True, squeeze=False).ravel()
    for ax, curve in zip(axes, curves, strict=True):
        _panel(ax, curve)
    axes[0].set_ylabel("gain over the policy (sd within prompts)")
    legend(axes[0], loc="upper left")
    headline(figure, f"{name}: {finding(curves[0])}")
    return figure


def finding(curve: Mapping[str, Any]) -> str:
    """Say in one sentence what a curve shows."""
    best, last = curve["points"][curve["best"]], curve["points"][-1]
    gained = last["gold"]["value"]
    if curve["turned"] and curve["best"] == 0:
        return f"the true reward falls from the start, by {-gained:.2g} standard deviations to {_at(curve, last)}"
    if curve["turned"]:
        lost = f"{-curve['fall']['value']:.2g} standard deviations lower"
        turn = f"the true reward turns: highest at {_at(curve, best)}, {lost} at {_at(curve, last)}"
        return f"{turn}{_planned(curve.get('plan'))}"
    if bound(last["gold"], "ci_low") > 0:
        return f"no turn up to {_at(curve, last)}: the true reward gained {gained:.2g} standard deviations"
    return f"no turn up to {_at(curve, last)}, and no gain of the true reward that could be told from zero"


def _at(curve: Mapping[str, Any], point: Mapping[str, Any]) -> str:
    nats = f"{point['kl']:.2g} nats"
    return f"n = {point['setting']:.0f} ({nats})" if curve["method"] == "best_of_n" else nats


def _planned(plan: Mapping[str, Any] | None) -> str:
    """The part of the highest gain that is left at the plan, which a verdict is about."""
    if plan is None or plan["gain"]["value"] is None:
        return ""
    gain = numbers.with_interval(plan["gain"])
    return f"; at the planned {plan['kl']:g} nats it is {gain} standard deviations above the policy's own"


def _panel(ax: "Axes", curve: Mapping[str, Any]) -> None:
    points = curve["points"]
    distance = np.array([math.sqrt(max(point["kl"], 0.0)) for point in points])
    for key, colour, marker in (("proxy", BLUE, "s"), ("gold", ORANGE, "o")):
        values = np.array([point[key]["value"] for point in points])
        low = np.array([bound(point[key], "ci_low") for point in points])
        high = np.array([bound(point[key], "ci_high") for point in points])
        ax.fill_between(distance, low, high, color=colour, alpha=0.18, linewidth=0)
        ax.plot(distance, values, marker=marker, markersize=5, color=colour, label=_label(key, points[-1]))
    ax.axhline(0, color=MUTED, linewidth=0.8)
    ax.axvline(distance[curve["best"]], color=ORANGE, linewidth=0.9, linestyle=":")
    title = f"{NAMES[curve['method']]} · {curve['num_prompts']} prompts, {curve['num_samples']:,} samples"
    dress(ax, title=title, x="square root of the KL from the policy (root nats)", y="")
    if curve["method"] == "best_of_n":
        for index, (at, point) in enumerate(zip(distance, points, strict=True)):
            place = (at, 0.01)
            text = f"{'' if index else 'n = '}{point['setting']:.0f}"
            ax.annotate(text, place, xycoords=("data", "axes fraction"), fontsize=SMALL - 1, color=MUTED, ha="center")


def _label(key: str, point: Mapping[str, Any]) -> str:
    held = ", ends if no prompt is a disaster" if point[key].get("low_if_no_disaster") is not None else ""
    return f"{REWARD_NAMES[key]}{held}"
