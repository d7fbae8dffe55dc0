"""All figures, drawn from example data, as a page of the site: what each shows and how to read it.

The data are those that the tests draw from (tests/support), so a figure that changes its look changes here, too. They
are invented, and each picture says so; what was really measured stands in docs/gallery.md.

    PYTHONPATH=tests/support python docs/pages.py build/docs
"""

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

import benchmark_sample
import curvature_sample
import experiment_sample
import figure_sample
import logged_sample
import policy_sample
import rlhf_sample
import tuning_sample
from rmcore.reporting.figures.active import label_efficiency_figure, label_savings_figure
from rmcore.reporting.figures.arm_intervals import arm_intervals_figure
from rmcore.reporting.figures.arms import main_metrics
from rmcore.reporting.figures.benchmarks import benchmarks_figure
from rmcore.reporting.figures.calibration import reliability_diagram_figure
from rmcore.reporting.figures.context import accuracy_in_context_figure
from rmcore.reporting.figures.density import density_figure
from rmcore.reporting.figures.ensemble import disagreement_figure
from rmcore.reporting.figures.forest import forest_plot_figure
from rmcore.reporting.figures.gauss_newton import hessian_and_gauss_newton_figure
from rmcore.reporting.figures.landscape import eigenvalues_figure
from rmcore.reporting.figures.layers import layers_figure
from rmcore.reporting.figures.learning import learning_curves_figure
from rmcore.reporting.figures.length import reward_by_length_figure
from rmcore.reporting.figures.logged_answers import logged_answers_figure
from rmcore.reporting.figures.looks import looks_figure
from rmcore.reporting.figures.margins import margin_histogram_figure
from rmcore.reporting.figures.overoptimization import overoptimization_figure
from rmcore.reporting.figures.policy import (
    SCORES,
    disagreement_by_gain_figure,
    readiness_against_gain_figure,
    reliability_figure,
)
from rmcore.reporting.figures.rlhf import rlhf_curves_figure
from rmcore.reporting.figures.runs import runs_figure
from rmcore.reporting.figures.served import served_figure
from rmcore.reporting.figures.slices import slices_figure, surface_figure
from rmcore.reporting.figures.soup import soup_figure
from rmcore.reporting.figures.tradeoff import tradeoff_figure
from rmcore.reporting.figures.training import training_curves_figure
from rmcore.reporting.figures.trajectory import curvature_trajectory_figure
from rmcore.reporting.figures.tuning import (
    importance_figure,
    optimism_figure,
    parallel_coordinates_figure,
    trials_history_figure,
)
from rmcore.reporting.figures.tuning_cost import accuracy_cost_figure
from rmcore.reporting.figures.watch import watch_figure

FOLDER = "figures"
"""Of the pictures, beside the pages."""
DOTS_PER_INCH, COLOURS = 80, 48
"""So that a picture takes 40 kB at most."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A figure of the gallery."""

    draw: Callable[[], Figure]
    command: str
    """What makes it, without `rm-opt`."""
    read: str
    """How to read it, and what it must not be read as."""


def _interval(value: float, half: float) -> dict[str, float]:
    return {"value": value, "ci_low": value - half, "ci_high": value + half}


def _saving_study() -> dict[str, Any]:
    counts = [100, 200, 400, 800]
    functions = ("random", "entropy", "variance", "bald", "d-optimal")
    censored = {"num_seeds": 10, "num_censored_active": 0, "num_censored_random": 0}

    def savings(place: int) -> list[dict[str, Any]]:
        targets = ((0.5, 0.66), (0.8, 0.7))
        rows = [_interval(0.05 * place - 0.08 * share, 0.12) for share, _ in targets]
        return [
            {"share": share, "target": target, "reason": None} | row | censored
            for (share, target), row in zip(targets, rows, strict=True)
        ]

    levels = [
        {
            "noise": noise,
            "num_labels": counts,
            "curves": {
                name: [_interval(0.54 - noise / 4 + 0.03 * np.log(count) + 0.004 * place, 0.015) for count in counts]
                for place, name in enumerate(functions)
            },
            "end": 0.75 - noise / 4,
            "savings": {name: savings(place) for place, name in enumerate(functions[1:])},
        }
        for noise in (0.0, 0.25)
    ]
    claims = [{"threshold": 0.4}, {"threshold": 0.0}]
    return {"headline": "40 % fewer labels: shown for no function", "claims": claims, "noise": levels}


def _disagreement() -> Figure:
    rng = np.random.default_rng(0)
    inside, outside = rng.gamma(4, 0.08, 600), rng.gamma(4, 0.13, 300)
    bins = {
        name: [
            {"disagreement": 0.1 + 0.15 * place, "accuracy": _interval(top - 0.05 * place, 0.05)} for place in range(5)
        ]
        for name, top in (("in distribution", 0.86), ("out of distribution", 0.74))
    }
    return disagreement_figure(inside, outside, 0.6, {"value": 0.81, "ci_low": 0.78, "ci_high": 0.84}, bins)


def _soup() -> Figure:
    """Two members in different basins."""
    distances = (0.0, 0.25, 0.5, 0.75, 1.0)
    members = [
        {
            "name": name,
            "loss": [_interval(0.48 + place * (end - 0.48) + 0.12 * (1 - place) ** 2, 0.02) for place in distances],
            "height": [_interval(0.12 * (1 - place) ** 2, 0.03 * (1 - place)) for place in distances],
            "accuracy": [_interval(0.78 - 0.09 * (1 - place) ** 2, 0.02) for place in distances],
        }
        for name, end in (("a/best", 0.47), ("b/best", 0.49))
    ]
    checks = [{"name": "barrier", "passed": False}, {"name": "pairwise accuracy", "passed": False}]
    return soup_figure({"distances": distances, "members": members}, 0.01, checks)


def _study_of_readiness() -> Figure:
    rng = np.random.default_rng(0)
    gains = rng.normal(0.4, 0.5, 160)
    models = [
        {
            "world": ("plain", "flattery")[index % 2],
            "on_policy_accuracy": 0.6 + 0.08 * gain + rng.normal(0, 0.06),
            "win_rate_16": 0.5 + 0.2 * gain + rng.normal(0, 0.03),
            "best_of_n_gain": gain,
        }
        for index, gain in enumerate(gains)
    ]
    found = {
        "optimizer": "best_of_n",
        "min_gain": 0.2,
        "verdict": "The win rate ranks reward models, accuracy on labelled pairs does not",
        "correlations": {
            name: {"best_of_n": _interval(-0.15 + 1.05 * place / (len(SCORES) - 1), 0.15)}
            for place, name in enumerate(SCORES)
        },
    }
    return readiness_against_gain_figure(found, models)


def _said_probabilities() -> Figure:
    said = (0.1, 0.3, 0.5, 0.7, 0.9)
    found = {
        name: {"bins": [{"predicted": p, "gained": _interval(p + shift, 0.1) | {"num": 20}} for p in said]}
        for name, shift in (("accuracy", -0.05), ("win_rate", 0.02))
    }
    return reliability_figure(found, {"accuracy": "from on-policy accuracy", "win_rate": "from the win rate"})


def _along_training() -> Figure:
    def row(k: int) -> dict[str, Any]:
        values = {"lambda_max": 170 / k, "lambda_min": -90 / k, "trace": 50 * k - 120, "margin_scale": 0.3 * k}
        errors = {"lambda_max_residual": 2.0, "lambda_min_residual": 0.5, "trace_standard_error": 30.0}
        return {"step": 100 * k, "metrics": {f"hessian/{name}": value for name, value in (values | errors).items()}}

    return curvature_trajectory_figure([row(k) for k in range(1, 9)], best_step=300)


def _tradeoff() -> Figure:
    others = ["cost/train_seconds", experiment_sample.ECE]
    return tradeoff_figure(
        EXPERIMENT["arms"],
        EXPERIMENT["cells"],
        EXPERIMENT["metrics"],
        accuracy=experiment_sample.ACCURACY,
        others=others,
    )


def _arms() -> Figure:
    metrics = main_metrics(list(EXPERIMENT["metrics"]), EXPERIMENT["hypotheses"])
    return arm_intervals_figure(EXPERIMENT["arms"], EXPERIMENT["cells"], metrics, EXPERIMENT["metrics"])


HISTORY, REWARDS = figure_sample.history(), figure_sample.rewards()
CURVATURE, EXPERIMENT, POLICY = curvature_sample.curvature(), experiment_sample.results(), policy_sample.policy()
IN_LOOKS = experiment_sample.in_looks()
TUNING: Any = tuning_sample.results()
FEW_TRIALS = [one for one in TUNING["trials"] if one["number"] < 10 or one["number"] == TUNING["winner"]["trial"]]
"""Forty lines that cross do not fit into a small picture."""
SHOWN = {
    "training_curves": Shown(
        lambda: training_curves_figure(HISTORY, best_step=400),
        "run",
        "Look at validation loss against training loss, and where `best/` was taken. Validation accuracy moves in "
        "steps of 1/n pairs: a jump of one step is nothing.",
    ),
    "accuracy_in_context": Shown(
        lambda: accuracy_in_context_figure(figure_sample.CONTEXT),
        "run",
        "The model between what guessing, the longer answer and, in the gold world, a perfect model reach on the "
        "same pairs. An interval that reaches the longer answer's shows nothing.",
    ),
    "margin_histogram": Shown(
        lambda: margin_histogram_figure(REWARDS, negative_rate={"value": 0.3, "ci_low": 0.26, "ci_high": 0.34}),
        "run",
        "The share left of zero is the error rate. A second hump there is a slice of the data that it has "
        "backwards. The scale means nothing between models of different β.",
    ),
    "reliability_diagram": Shown(
        lambda: reliability_diagram_figure(figure_sample.bins(), figure_sample.ECE),
        "run",
        "Dots under the diagonal: surer than right. A bin with few pairs (beneath) has a wide bar, and may lie "
        "anywhere.",
    ),
    "reward_by_length": Shown(
        lambda: reward_by_length_figure(REWARDS),
        "run",
        "Rising means alone are no fault where longer answers are better. Compare with length-matched accuracy.",
    ),
    "benchmarks": Shown(
        lambda: benchmarks_figure(benchmark_sample.record()["suites"]),
        "run",
        "Scores on public benchmarks. A model left of the diamonds does less than counting characters.",
    ),
    "logged_answers": Shown(
        lambda: logged_answers_figure(logged_sample.record()),
        "run",
        "The model's best of k answers that were logged, between the labels' own choice (above) and the longest "
        "answer. Told up to the k that prompts have; a policy's own samples are another question.",
    ),
    "eigenvalues": Shown(
        lambda: eigenvalues_figure(CURVATURE["spectrum"]),
        "analyze",
        "Both signed ends; whiskers say how far each may be off. A negative end as large as the positive one: no "
        "minimum. λmax falls merely because margins grow.",
    ),
    "density": Shown(
        lambda: density_figure(CURVATURE["density"]),
        "analyze --type all",
        "Where the bulk is and how far outliers stand from it, on a logarithmic axis: nearly all of it is near zero.",
    ),
    "hessian_and_gauss_newton": Shown(
        lambda: hessian_and_gauss_newton_figure(CURVATURE["spectrum"], CURVATURE["gauss_newton"]),
        "analyze --type all",
        "Two matrices that are taken for one another: only the left has negative eigenvalues. Where sizes differ "
        "much, the residual of the loss dominates, as it does early in training.",
    ),
    "layers": Shown(
        lambda: layers_figure(CURVATURE["layers"]),
        "analyze --type all",
        "Trace a parameter, by block and kind of tensor. Small tensors (norms, biases) are often the sharpest; a "
        "dot marks what may as well be zero.",
    ),
    "slices": Shown(
        lambda: slices_figure(CURVATURE["slices"]),
        "analyze --type all",
        "How far the quadratic prediction (dashed) holds along a line through the weights: only as far do "
        "eigenvalues describe the loss.",
    ),
    "surface": Shown(
        lambda: surface_figure(CURVATURE["slices"]["surface"]),
        "analyze --type all",
        "Two random directions of millions: a bowl here does not say that there is no way down elsewhere.",
    ),
    "curvature_trajectory": Shown(
        _along_training,
        "trajectory",
        "Read λmax together with the margins below it: where margins grow as it falls, the loss has not become "
        "flatter in any useful sense.",
    ),
    "runs": Shown(
        lambda: runs_figure({"adamw-seed0": HISTORY, "muon-seed0": figure_sample.history(50)}),
        "compare RUN RUN",
        "One line a run, over optimizer steps, not over time. One seed each: `rm-opt diff` says whether they differ.",
    ),
    "looks": Shown(
        lambda: looks_figure(IN_LOOKS["hypotheses"], IN_LOOKS["metrics"], IN_LOOKS["looks"]),
        "experiment --looks 5,8,12,20",
        "How the interval of each claim shrank as seeds were added in registered looks. It is that over all looks "
        "so far, wider than that of one look. Grey: the claim was closed, and got no further seeds.",
    ),
    "forest_plot": Shown(
        lambda: forest_plot_figure(EXPERIMENT["hypotheses"], EXPERIMENT["metrics"]),
        "experiment",
        "One row a claim that was frozen before: supported where the whole interval lies in the shaded side, "
        "refuted where it lies outside, else inconclusive. Each panel has a scale of its own.",
    ),
    "arm_intervals": Shown(
        _arms,
        "experiment",
        "Means over seeds with intervals, each seed a small point. Arms share prompts and seeds: two overlapping "
        "intervals may hide a clear paired difference, so read the forest plot for claims.",
    ),
    "learning_curves": Shown(
        lambda: learning_curves_figure(EXPERIMENT["curves"], EXPERIMENT["arms"], (experiment_sample.ACCURACY, True)),
        "experiment",
        "Lines are means over the steps that all seeds reach, seeds thin behind them. Early order is often not "
        "final order.",
    ),
    "tradeoff": Shown(
        _tradeoff,
        "experiment",
        "Up and to the left is better. An arm that is more accurate and slower is only better where the claims say so.",
    ),
    "optimism": Shown(
        lambda: optimism_figure(TUNING),
        "tune",
        "The hollow diamond is the score that the winner was chosen by, and too good. What counts is on the right; "
        "whether winner and defaults differ is the title, not whether their intervals overlap.",
    ),
    "trials_history": Shown(
        lambda: trials_history_figure(TUNING),
        "tune",
        "A trial's points are its rungs. Grey ones were given up after less training, so their height is not "
        "comparable with complete ones.",
    ),
    "setting_importance": Shown(
        lambda: importance_figure(TUNING),
        "tune",
        "What mattered within the ranges that were searched, not which value is good; a setting that was hardly varied "
        "explains nothing.",
    ),
    "parallel_coordinates": Shown(
        lambda: parallel_coordinates_figure(TUNING | {"trials": FEW_TRIALS}),
        "tune",
        "Dark lines that meet on an axis mark good values. The winner is one line of many: look whether others as dark "
        "agree with it.",
    ),
    "accuracy_cost": Shown(
        lambda: accuracy_cost_figure(TUNING),
        "tune",
        "Trials on the line are beaten by no other in both score and time. Scores are those of one seed, so small "
        "steps of the line are noise.",
    ),
    "overoptimization": Shown(
        lambda: overoptimization_figure("reward model", POLICY["overoptimization"]["curves"]),
        "best-of-n",
        "Where orange turns while blue rises. No turn up to the n that was measured is no promise beyond it.",
    ),
    "ensemble_disagreement": Shown(
        lambda: disagreement_by_gain_figure(
            POLICY["overoptimization"]["disagreement"], POLICY["overoptimization"]["conservative"]
        ),
        "best-of-n",
        "Left: rising with n means that search finds answers that members do not agree on. Right: whether a more "
        "conservative reward would have gained more gold; overlapping intervals are no difference.",
    ),
    "disagreement": Shown(
        _disagreement,
        "ensemble",
        "Left: two separate humps, and disagreement tells unfamiliar answers. Right: falling accuracy, and it "
        "tells errors. It may do one and not the other.",
    ),
    "soup": Shown(
        _soup,
        "soup",
        "Left end: the average; right end: each member. In the middle panel nothing may rise above the dashed line, "
        "with its bars: that would be a barrier, and the average is refused. It may be so by accuracy alone, too.",
    ),
    "readiness_against_gain": Shown(
        _study_of_readiness,
        "readiness validate",
        "A dot is a reward model. A good score makes a thin rising cloud; on the right an interval that holds 0 "
        "ranks nothing.",
    ),
    "reliability": Shown(
        _said_probabilities,
        "readiness validate",
        "Models that were given 70 % should gain in 70 %: below the diagonal too much was promised. The dot's area "
        "is its number of models.",
    ),
    "rlhf": Shown(
        lambda: rlhf_curves_figure(rlhf_sample.record(), rlhf_sample.best_of_n()),
        "rlhf",
        "Compare at equal KL (top right), with best-of-n dashed. Orange that falls while blue rises is over- "
        "optimisation; orange at step 0 shows the noise.",
    ),
    "watch": Shown(
        lambda: watch_figure(rlhf_sample.record(watched=True, num_seeds=1)),
        "rlhf",
        "Top right: a line above the dashed one convinces. Bottom right: what is kept is better than the start where "
        "the band leaves zero.",
    ),
    "served": Shown(
        lambda: served_figure(policy_sample.served()),
        "readiness confirm",
        "It may be read, and ended, after any pair: gold rose where the band leaves zero, by as much as was asked for "
        "where it leaves the dashed line.",
    ),
    "label_efficiency": Shown(
        lambda: label_efficiency_figure(_saving_study()),
        "active study",
        "A curve above random's saves labels. Panels are shares of wrong labels; bands are over seeds.",
    ),
    "label_savings": Shown(
        lambda: label_savings_figure(_saving_study()),
        "active study",
        "Right of zero saves labels against random choice; an interval across zero shows nothing. The dotted line "
        "is the claim.",
    ),
}
"""All figures by the name of their file."""


def page() -> str:
    """The page with every figure, its command and how to read it."""
    lines = [
        "# All figures, and how to read each",
        "Drawn from example data: the numbers are invented, the looks are real. Bars and bands are 95 % intervals. "
        "What was measured stands in the [results](gallery.md); what the numbers mean, [here](numbers.md).",
    ]
    for name, one in SHOWN.items():
        title = name.replace("_", " ").capitalize()
        lines += ["", f"## {title}", "", f"![{title}, example data]({FOLDER}/{name}.png)", ""]
        lines += [f"`rm-opt {one.command}`: `{name}.png`. {one.read}"]
    return "\n".join(lines) + "\n"


def draw(out: Path) -> None:
    """Write every figure as a small picture into a folder, marked as example data."""
    out.mkdir(parents=True, exist_ok=True)
    for name, one in SHOWN.items():
        figure = one.draw()
        figure.text(0.995, 0.99, "example data", ha="right", va="top", fontsize=9, color="#8c959f")
        held = io.BytesIO()
        figure.savefig(held, format="png", dpi=DOTS_PER_INCH, metadata={"Software": None})
        Image.open(held).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(
            out / f"{name}.png", optimize=True
        )
