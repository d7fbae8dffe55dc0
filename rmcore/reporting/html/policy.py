"""Measurements on a policy's samples: their sections, for a report, a terminal and Prefect, and their figures."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rmcore.core.metrics import METRICS
from rmcore.reporting.figures import numbers, style
from rmcore.reporting.figures.numbers import bound
from rmcore.reporting.html.blocks import Block, Table
from rmcore.reporting.verdict_style import check_result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CAPTIONS = {
    "overoptimization": "Further right, the reward model selects harder among the samples. The proxy rises by "
    "construction; where the true reward no longer follows, optimising further does harm."
}
REWARD_NAMES = {"proxy": "proxy reward", "gold": "true reward"}
METHOD_NAMES = {"best_of_n": "best-of-n", "kl_optimum": "KL-regularised optimum"}
PARTS = {
    **{name: METRICS[name].definition for name in ("on_policy_accuracy", "hard_accuracy")},
    "win_rate_16": "how often the best of 16 beats another sample",
    "planned_gain": "gain of the true reward at the planned KL (sd within prompts)",
    "gain_without_length": "that gain with length taken out of the judge's scores (their sd)",
    "gain_of_longest": "gain of choosing by length at the planned KL",
    "planned_fall": "gain at the planned KL minus the highest before it",
    "pairwise_accuracy": "accuracy on labelled pairs",
    "length_matched_accuracy": "the same where both sides are about as long",
    "ece_tempered_debiased": "calibration error after temperature",
}
"""Parts of readiness v2 in reading order, with what they are."""
EMPTY = "(an empty answer)"


def number_or_reason(value: Mapping[str, Any]) -> str:
    """A number with its interval, or why there is none."""
    if value["value"] is None:
        return str(value.get("reason") or numbers.MISSING)
    return numbers.with_interval(value)


def policy_block(results: Mapping[str, Any]) -> Block:
    """The report's section on a policy's samples: proxy against the true reward, best-of-n, the parts of readiness v2.

    Args:
        results: {"sampling", "overoptimization", "readiness"}: records of the stages samples, overoptimization and
            readiness_v2.
    """
    judged = results["readiness"]["readiness"]
    plan = judged["plan"]
    worst = _worst_prompts(results["overoptimization"], plan["optimizer"])
    return Block(
        "On the policy's own samples: readiness v2",
        text=(
            "Whether a policy may be optimised against this reward model is decided on the policy's samples, not on "
            f"labelled pairs alone. The plan is {numbers.decimal(plan['kl'])} nats by "
            f"{METHOD_NAMES[plan['optimizer']]}; the true reward is that of {judged['judge']}. Gains are in standard "
            "deviations of the true reward within prompts, intervals are 95 % over prompts.",
        ),
        figures=("overoptimization",),
        parts=[
            best_of_n_block(results),
            Block("The parts of readiness v2", tables=(_parts(results["readiness"]),)),
            *([Block("The prompts where the plan gains least", tables=(worst,))] if worst.rows else []),
        ],
    )


def best_of_n_block(results: Mapping[str, Any]) -> Block:
    """n, KL, reward and, where it is known, the gold gain, one row an n; what follows from it."""
    headings = ("n", "KL, nats", "log n - (n-1)/n", "reward", "gain of the true reward (sd within prompts)")
    table = Table(headings, _best_of_n(results["overoptimization"]), left=())
    findings = _best_of_n_findings(results["sampling"], results["overoptimization"])
    return Block("Best-of-n", tables=(table,), findings=findings)


def best_of_n_headline(results: Mapping[str, Any]) -> str:
    """Say what choosing the best of the most samples by this reward model comes to, in one sentence."""
    *_, (n, kl, _, reward, gold) = _best_of_n(results["overoptimization"])
    judged = "not judged" if gold == "-" else f"gain of the true reward {gold} sd within prompts"
    return f"Best of {n}, {kl} nats from the policy: reward {reward}, {judged}"


def _best_of_n(record: Mapping[str, Any]) -> list[tuple[str, ...]]:
    points = [
        point for curve in record.get("curves", []) if curve["method"] == "best_of_n" for point in curve["points"]
    ]
    gold = {int(point["setting"]): number_or_reason(point["gold"]) for point in points}
    return [
        (
            str(row["n"]),
            f"{row['kl']:.3f}",
            f"{row['nominal_kl']:.3f}",
            f"{row['reward']:+.3f}",
            gold.get(row["n"], "-"),
        )
        for row in record["best_of_n"]
    ]


def _best_of_n_findings(sampling: Mapping[str, Any], record: Mapping[str, Any]) -> list[str]:
    curves = record.get("curves", [])
    lines = [
        f"{sampling['num_samples']} samples of {sampling['num_prompts']} prompts by {sampling['engine'] or 'a file'}; "
        f"{sampling['finished_share']:.1%} ended by themselves, {sampling['num_empty']} are empty, {record['num_cut']} "
        "exceeded the reward model's length limit"
    ]
    lines += [f"{METHOD_NAMES[curve['method']]}: {curve_finding(curve)}" for curve in curves]
    if curves:
        plan = curves[0]["plan"]
        lines.append(
            f"intervals of the gain of the true reward are over {plan['num_telling']} independent prompts that the "
            "judge tells apart, and assume that an unseen prompt loses at most as much as the worst judged sample, "
            f"{plan['worst']:.1f} sd"
        )
        if plan["num_short"]:
            lines.append(f"{plan['num_short']} prompts have fewer samples than the plan needs and are left out of it")
    return [*lines, *record.get("left_out", [])]


def readiness_block(results: Mapping[str, Any]) -> Block:
    """Verdict, parts and checks of readiness v2."""
    checks = [f"{check_result(check)}: {check['text']}" for check in results["gate"]]
    return Block(results["verdict"]["headline"], tables=(_parts(results),), findings=checks)


def _parts(results: Mapping[str, Any]) -> Table:
    parts = results["readiness"]["parts"]
    others = (name for name in parts if name.startswith("win_rate_") and name not in PARTS)
    fewer = {name: f"how often the best of {name.removeprefix('win_rate_')} beats another sample" for name in others}
    rows = [(meaning, number_or_reason(parts[name])) for name, meaning in (PARTS | fewer).items() if name in parts]
    return Table(("part", "value, 95 %"), rows, left=range(2))


def _worst_prompts(record: Mapping[str, Any], optimizer: str) -> Table:
    """The prompts where the plan gains least, worst first; no rows where there is no judge."""
    worst = record.get("worst_prompts", {}).get(optimizer, [])
    rows = [(row["prompt"], f"{row['gain']:+.2f}", row["response"] or EMPTY) for row in worst]
    headings = ("prompt", "gain of the true reward at the plan, sd", "the sample that the reward model likes best")
    return Table(headings, rows, left=(0, 2))


def confirmation_block(results: Mapping[str, Any]) -> Block:
    """The gain by serving best-of-n, with the first prompts and those that lose most."""
    verdict = results["verdict"]
    headings = ("prompt", f"best of {results['n']}", "another one", f"judged, {results['unit']}")

    def examples(title: str, name: str) -> Block:
        rows = [
            (row["prompt"], *(row[side] or EMPTY for side in ("chosen", "other")), f"{row['difference']:+.2f}")
            for row in results[name]
        ]
        return Block(title, tables=(Table(headings, rows, left=range(3)),))

    return Block(
        verdict["headline"],
        tables=(Table(("of the chosen response", "value, 95 % whenever one stops"), _confirmed(results), range(2)),),
        findings=verdict["reasons"],
        parts=[examples("The first prompts", "examples"), examples("The prompts that lose most", "worst")],
    )


def _confirmed(results: Mapping[str, Any]) -> list[tuple[str, str]]:
    gold, length, labels = results["gold"], results["characters"], f"{results['num_labels']:,}"
    ended = "decided" if results["is_decided"] else "not decided"
    rows = [
        (f"gain over a sample, {results['unit']}", number_or_reason(gold["gain"])),
        ("win rate over a sample", number_or_reason(gold["win_rate"])),
        ("length in characters, and of a sample", f"{length['chosen']:.0f}, {length['other']:.0f}"),
        ("KL from the policy, nats, at most", f"{results['kl']:.2f}"),
        ("labels", f"{labels} ({results['num_prompts']} of {results['num_allowed']} prompts; {ended})"),
    ]
    if results["unit_error"] is not None:
        clipped = f"the same of differences as they are ({results['clipped_share']:.1%} of them are clipped above)"
        rows[1:1] = [
            ("the unit itself, which is measured, ± standard error", f"1 ± {results['unit_error']:.0%}"),
            (clipped, number_or_reason(gold["unclipped_gain"])),
        ]
    return rows


def curve_finding(curve: Mapping[str, Any]) -> str:
    """Say in one sentence what a curve shows."""
    best, last = curve["points"][curve["best"]], curve["points"][-1]
    gained = last["gold"]["value"]
    if curve["turned"] and curve["best"] == 0:
        return f"the true reward falls from the start, by {-gained:.2g} standard deviations to {_at(curve, last)}"
    if curve["turned"]:
        lost = f"{-curve['fall']['value']:.2g} standard deviations lower"
        turn = f"the true reward turns: highest at {_at(curve, best)}, {lost} at {_at(curve, last)}"
        return f"{turn}{_planned(curve['plan'])}"
    if bound(last["gold"], "ci_low") > 0:
        return f"no turn up to {_at(curve, last)}: the true reward gained {gained:.2g} standard deviations"
    return f"no turn up to {_at(curve, last)}, and no gain of the true reward that could be told from zero"


def _at(curve: Mapping[str, Any], point: Mapping[str, Any]) -> str:
    nats = f"{point['kl']:.2g} nats"
    return f"n = {point['setting']:.0f} ({nats})" if curve["method"] == "best_of_n" else nats


def _planned(plan: Mapping[str, Any]) -> str:
    """The part of the highest gain that is left at the plan, which a verdict is about."""
    if plan["gain"]["value"] is None:
        return ""
    gain = numbers.with_interval(plan["gain"])
    return f"; at the planned {plan['kl']:g} nats it is {gain} standard deviations above the policy's own"


def overoptimization_figure(name: str, curves: Sequence[Mapping[str, Any]]) -> "Figure":
    """Proxy and true reward against KL with 95 % intervals over prompts, one panel a method.

    Args:
        name: of the proxy.
        curves: records of `rmcore.policy.overoptimization.Overoptimization.to_dict`, of one proxy.
    """
    figure = style.new_figure(5.2 * len(curves), 4.4)
    axes = figure.subplots(1, len(curves), sharey=True, squeeze=False).ravel()
    for ax, curve in zip(axes, curves, strict=True):
        _panel(ax, curve)
    axes[0].set_ylabel("gain over the policy (sd within prompts)")
    style.legend(axes[0], loc="upper left")
    style.headline(figure, f"{name}: {curve_finding(curves[0])}")
    return figure


def _panel(ax: "Axes", curve: Mapping[str, Any]) -> None:
    points = curve["points"]
    distance = np.array([math.sqrt(max(point["kl"], 0.0)) for point in points])
    for key, colour, marker in (("proxy", style.BLUE, "s"), ("gold", style.ORANGE, "o")):
        values = np.array([point[key]["value"] for point in points])
        low = np.array([bound(point[key], "ci_low") for point in points])
        high = np.array([bound(point[key], "ci_high") for point in points])
        is_conditional = points[-1][key].get("low_if_no_disaster") is not None
        label = f"{REWARD_NAMES[key]}{', ends if no prompt is a disaster' if is_conditional else ''}"
        ax.fill_between(distance, low, high, color=colour, alpha=0.18, linewidth=0)
        ax.plot(distance, values, marker=marker, markersize=5, color=colour, label=label)
    ax.axhline(0, color=style.MUTED, linewidth=0.8)
    ax.axvline(distance[curve["best"]], color=style.ORANGE, linewidth=0.9, linestyle=":")
    title = f"{METHOD_NAMES[curve['method']]} · {curve['num_prompts']} prompts, {curve['num_samples']:,} samples"
    style.dress(ax, title=title, x="square root of the KL from the policy (root nats)", y="")
    if curve["method"] == "best_of_n":
        small: dict[str, Any] = {"fontsize": style.SMALL - 1, "color": style.MUTED, "ha": "center"}
        for index, (at, point) in enumerate(zip(distance, points, strict=True)):
            text = f"{'' if index else 'n = '}{point['setting']:.0f}"
            ax.annotate(text, (at, 0.01), xycoords=("data", "axes fraction"), **small)
