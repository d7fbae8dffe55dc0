"""All figures, drawn from example data, as a page of the site: what each shows and how to read it.

The data are those that the tests draw from (tests/support), so a figure that changes its look changes here, too. They
are invented, and each picture says so; what was measured is in docs/numbers.md. docs/figures.md calls it.
"""

import io
from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from matplotlib.figure import Figure
from PIL import Image

import experiment_sample
import figure_sample
import logged_sample
import policy_sample
import rlhf_sample
from capability_samples import RECORDS
from rmcore.reporting.figures.arms import arm_intervals_figure, main_metrics
from rmcore.reporting.figures.experiment import forest_plot_figure, learning_curves_figure
from rmcore.reporting.figures.pairs import (
    accuracy_in_context_figure,
    reliability_diagram_figure,
    reward_by_length_figure,
)
from rmcore.reporting.figures.training import runs_figure, training_curves_figure
from rmcore.reporting.html.blocks import capabilities_shown
from rmcore.reporting.html.logged import logged_answers_figure
from rmcore.reporting.html.policy import overoptimization_figure
from rmcore.reporting.html.rlhf import rlhf_curves_figure, watch_figure

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


def _arms() -> Figure:
    metrics = main_metrics(list(EXPERIMENT["metrics"]), EXPERIMENT["hypotheses"])
    return arm_intervals_figure(EXPERIMENT["arms"], EXPERIMENT["cells"], metrics, EXPERIMENT["metrics"])


HISTORY, REWARDS = figure_sample.history(), figure_sample.rewards()
EXPERIMENT, POLICY = experiment_sample.results(), policy_sample.policy()
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
        "The model between guessing, the longer answer and, on the synthetic benchmark, a perfect model, all on the "
        "same pairs. An interval that reaches the longer answer's shows nothing.",
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
    "logged_answers": Shown(
        lambda: logged_answers_figure(logged_sample.record()),
        "run",
        "The model's best of k answers that were logged, between the labels' own choice (above) and the longest "
        "answer. Shown up to the k that prompts have; a policy's own samples are another question.",
    ),
    "runs": Shown(
        lambda: runs_figure({"adamw-seed0": HISTORY, "muon-seed0": figure_sample.history(50)}),
        "compare RUN RUN",
        "One line a run, over optimizer steps, not over time. One seed each: `rm-opt diff` says whether they differ.",
    ),
    "forest_plot": Shown(
        lambda: forest_plot_figure(EXPERIMENT["hypotheses"], EXPERIMENT["metrics"]),
        "experiment",
        "One row per claim that was frozen before: supported where the whole interval is on the shaded side, "
        "refuted where it is outside, else inconclusive. Each panel has a scale of its own.",
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
    "overoptimization": Shown(
        lambda: overoptimization_figure("reward model", POLICY["overoptimization"]["curves"]),
        "readiness best-of-n",
        "Where orange turns while blue rises. No turn up to the n that was measured is no promise beyond it.",
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
        "On the right a line above the dashed one convinces. On the left the star is what was kept, on fresh prompts.",
    ),
    **{
        name: Shown(partial(draw, RECORDS[one.stage]()), "run", one.captions.get(name, ""))
        for one in capabilities_shown()
        for name, draw in one.figures.items()
    },
}
"""All figures by the name of their file."""


def sections() -> str:
    """Every figure, drawn small and marked as example data, with its command and how to read it, as Markdown."""
    parts = []
    for name, one in SHOWN.items():
        title = name.replace("_", " ").capitalize()
        parts += [f"## {title}", f'<img alt="{title}, example data" src="data:image/png;base64,{picture(one)}">']
        parts += [f"`rm-opt {one.command}`: `{name}.png`. {one.read}"]
    return "\n\n".join(parts)


def picture(one: Shown) -> str:
    """A figure as a PNG in base64."""
    figure, held, small = one.draw(), io.BytesIO(), io.BytesIO()
    figure.text(0.995, 0.99, "example data", ha="right", va="top", fontsize=9, color="#8c959f")
    figure.savefig(held, format="png", dpi=DOTS_PER_INCH, metadata={"Software": None})
    Image.open(held).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(small, format="PNG", optimize=True)
    return b64encode(small.getvalue()).decode()
