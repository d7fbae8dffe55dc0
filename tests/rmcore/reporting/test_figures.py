"""Figures of a run: titled, with units, holding their data, their texts apart, and drawn from odd data, too."""

import warnings
from functools import partial

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

import logged_sample
import rlhf_sample
from capability_samples import RECORDS
from figure_sample import CONTEXT, ECE, bins, history, item, rewards
from rmcore.reporting.figures.pairs import (
    accuracy_in_context_figure,
    binned_means,
    reliability_diagram_figure,
    reward_by_length_figure,
)
from rmcore.reporting.figures.style import DPI, save
from rmcore.reporting.figures.training import runs_figure, series, training_curves_figure
from rmcore.reporting.html.blocks import capabilities_shown
from rmcore.reporting.html.logged import logged_answers_figure
from rmcore.reporting.html.rlhf import rlhf_curves_figure, watch_figure

RUNS = {"one-seed0-abcd": history(), "two-seed0-1234": history(30), "not evaluated": history(9, evaluated=False)}

UNKNOWN = {"value": None, "ci_low": None, "ci_high": None}


def title_of(figure) -> str:
    return figure.get_suptitle().replace("\n", " ").replace("\u00a0", " ")


def test_a_series_is_ordered_by_step_and_the_last_row_of_a_step_counts():
    rows = [{"step": s, "metrics": {"a": v}} for s, v in ((3, 1.0), (1, 2.0), (2, None), (3, 4.0))]
    steps, values = series(rows, "a")
    assert (steps.tolist(), values.tolist()) == ([1, 3], [2.0, 4.0])


def test_training_panels_are_labelled_hold_all_points_and_mark_the_best_step():
    figure = training_curves_figure(history(), best_step=400)
    labels = [
        "loss (nats)",
        "pairwise accuracy",
        "mean reward margin (logits)",
        "learning rate",
        "norm before clipping",
    ]
    assert [ax.get_ylabel() for ax in figure.axes[:5]] == labels
    for ax in figure.axes[:5]:
        assert ax.get_xlabel() == "optimizer step"
        assert any(list(line.get_xdata()) == [400, 400] for line in ax.lines)
    for ax, name in zip(figure.axes, ("loss", "pairwise_accuracy", "mean_margin"), strict=False):
        low, high = ax.get_ylim()
        for part in ("train", "eval"):
            values = series(history(), f"{part}/{name}")[1]
            assert low <= values.min() <= values.max() <= high
    assert {"400", "800", "57.5"} <= set(title_of(figure).replace(",", "").split())
    assert title_of(training_curves_figure(history())).startswith("Validation accuracy 51.9")
    assert "without validation" in title_of(training_curves_figure(history(30, evaluated=False)))


def test_smoothing_keeps_a_straight_line_straight_inside_and_a_constant_constant():
    rows = [{"step": step, "metrics": {"train/loss": 0.5, "train/mean_margin": float(step)}} for step in range(200)]
    figure = training_curves_figure(rows)
    assert np.allclose(figure.axes[0].lines[1].get_ydata(), 0.5)
    assert np.allclose(figure.axes[2].lines[1].get_ydata()[10:-10], np.arange(200)[10:-10])


def test_curves_of_runs_are_what_each_logged_and_told_apart():
    figure = runs_figure(RUNS)
    loss, accuracy = figure.axes
    lines = {line.get_color(): line for line in loss.lines if len(line.get_xdata()) and line.get_linestyle() != "None"}
    assert len(lines) == len({line.get_linestyle() for line in lines.values()}) == len(RUNS)
    steps, values = series(RUNS["two-seed0-1234"], "eval/pairwise_accuracy")
    drawn = [(list(line.get_xdata()), list(line.get_ydata())) for line in accuracy.lines]
    assert (list(steps), list(values)) in drawn
    assert title_of(figure) == "Highest validation accuracy: one-seed0-abcd 65.0 %, two-seed0-1234 65.0 %"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == list(RUNS)
    assert "none of which was evaluated" in title_of(runs_figure({"a": history(9, evaluated=False)}))


def test_length_correlation_in_the_title_has_the_right_sign():
    frame = rewards(300)
    frame["reward_chosen"], frame["reward_rejected"] = frame["chosen_chars"] ** 3.0, frame["rejected_chars"] ** 3.0
    assert "+1.00" in title_of(reward_by_length_figure(frame))
    frame[["reward_chosen", "reward_rejected"]] *= -1
    assert "−1.00" in title_of(reward_by_length_figure(frame))


def test_length_bins_cover_the_truth_and_widen_with_clustering():
    """Sides that are copies within a prompt carry the information of one: the interval must not shrink with copies."""
    rng = np.random.default_rng(3)
    length = rng.uniform(10, 1000, 200)
    reward = rng.normal(2.0, 1.0, 200)
    once = binned_means(length, reward, np.arange(200))
    copied = binned_means(np.repeat(length, 4), np.repeat(reward, 4), np.repeat(np.arange(200), 4))
    assert np.allclose(once["mean"], copied["mean"])
    assert np.allclose(once["half_width"], copied["half_width"])
    assert np.mean(np.abs(once["mean"] - 2.0) < once["half_width"]) >= 0.8
    textbook = 2.093 * reward[length <= np.quantile(length, 0.1)].std(ddof=1) / np.sqrt(20)
    assert once["half_width"][0] == pytest.approx(textbook, rel=1e-3)


def test_reliability_points_are_the_bins_and_the_title_says_which_side():
    figure = reliability_diagram_figure(bins(), ECE)
    top, bottom = figure.axes
    line = next(line for line in top.lines if line.get_marker() == "o")
    assert np.allclose(line.get_xdata(), bins()["mean_confidence"])
    assert np.allclose(line.get_ydata(), bins()["accuracy"])
    assert [bar.get_height() for bar in bottom.patches] == bins()["count"].tolist()
    assert "too sure" in title_of(figure)
    assert "0.042 (95 %: 0.021 to 0.067)" in title_of(figure)
    modest = bins().assign(accuracy=1.0, accuracy_high=1.0)
    assert "too modest" in title_of(reliability_diagram_figure(modest, ECE))
    nothing = title_of(reliability_diagram_figure(modest, {"value": -0.004, "ci_low": -0.02, "ci_high": 0.041}))
    assert "No error" in nothing
    assert "modest" not in nothing


def test_context_names_the_distance_to_its_neighbours_and_contains_all_intervals():
    figure = accuracy_in_context_figure(CONTEXT)
    assert "7.8 points above “the longer one wins”, 11.9 below “label ceiling”" in title_of(figure)
    ax = figure.axes[0]
    rows = [text.get_text() for text in ax.get_yticklabels()]
    assert rows[:4] == ["label ceiling", "this model", "the longer one wins", "guessing"]
    assert rows[-1] == "tail"
    low, high = ax.get_xlim()
    for row in CONTEXT:
        assert all(value is None or low < value < high for value in (row["value"], row["ci_low"], row["ci_high"]))
    assert accuracy_in_context_figure(CONTEXT * 7).get_figheight() > 3 * figure.get_figheight()


WIDE = {"train/loss": 1e9, "train/mean_margin": -1e9, "train/lr": 0.0}
ODD = {
    "no history": lambda: training_curves_figure([]),
    "no numbers": lambda: training_curves_figure([{"step": 1, "metrics": {"train/loss": None, "train/lr": np.nan}}]),
    "huge numbers": lambda: training_curves_figure([{"step": s, "metrics": WIDE} for s in range(9)]),
    "nothing logged": lambda: runs_figure({"empty": [], "too": []}),
    "no interval": lambda: reliability_diagram_figure(bins().head(1), UNKNOWN),
    "long names": lambda: accuracy_in_context_figure([item("x" * 300, 1.0, 0.0, "model"), item("y", 0.0, None)]),
    "nothing measured": lambda: accuracy_in_context_figure([item("this model", None, None, "model")]),
    **{f"rewards of {s}": lambda s=s: reward_by_length_figure(rewards(7, s)) for s in (0.0, 1e12)},
    "one judged prompt": lambda: logged_answers_figure(logged_sample.record(num_prompts=1)),
    "nobody judged": lambda: rlhf_curves_figure(rlhf_sample.record(judged=False), rlhf_sample.best_of_n(gold=False)),
    "one point": lambda: rlhf_curves_figure(rlhf_sample.record(num_points=1), rlhf_sample.best_of_n(gold=True)),
    "back to the start": lambda: watch_figure(rlhf_sample.record(watched=False)),
    "watched": lambda: watch_figure(rlhf_sample.record(watched=True)),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ODD)
def test_odd_data_are_drawn_without_a_warning(draw, name):
    assert title_of(draw(ODD[name]()))


@pytest.mark.slow
def test_a_file_has_the_size_of_its_figure_and_the_same_bytes_from_the_same_data(tmp_path):
    paths = [save(reward_by_length_figure(rewards(2000)), tmp_path / "deep" / name) for name in ("a.png", "b.png")]
    assert paths[0].read_bytes() == paths[1].read_bytes()
    width, height = (int.from_bytes(paths[0].read_bytes()[at : at + 4]) for at in (16, 20))
    assert (width, height) == (8.0 * DPI, pytest.approx(4.6 * DPI, abs=1))


FIGURES = {
    "training": lambda: training_curves_figure(history(), best_step=400),
    "eight runs": lambda: runs_figure(
        {f"run {place} of eight of a study with a long name": history(9 + place) for place in range(8)}),
    "calibration": lambda: reliability_diagram_figure(bins(), ECE),
    "length": lambda: reward_by_length_figure(rewards()),
    "logged answers": lambda: logged_answers_figure(logged_sample.record(length=1.0)),
    "context": lambda: accuracy_in_context_figure(
        [*CONTEXT, *[item(f"a long name of a subset {i} of many more", 0.6) for i in range(38)]]),
    **{
        name: partial(draw, RECORDS[shown.stage]())
        for shown in capabilities_shown()
        for name, draw in shown.figures.items()
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", FIGURES)
def test_no_text_leaves_the_figure_or_overlaps_another(name):
    figure = FIGURES[name]()
    canvas = FigureCanvasAgg(figure)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        canvas.draw()
    width, height = figure.get_size_inches() * figure.dpi
    # Labels of the ticks inside the view; matplotlib keeps others that it never draws.
    ticks = [tick.label1 for ax in figure.axes for axis in (ax.xaxis, ax.yaxis) for tick in axis._update_ticks()]
    texts = [*ticks, *(text for ax in figure.axes for text in (ax._left_title, *ax.texts)), figure._suptitle]
    boxes = [
        (text.get_text(), text.get_window_extent(canvas.get_renderer()))
        for text in texts
        if text.get_text() and text.get_visible()
    ]
    boxes = [(text, box) for text, box in boxes if box.width > 0]
    assert len(boxes) > 5
    for index, (text, box) in enumerate(boxes):
        assert box.x0 >= -1, text
        assert box.x1 <= width + 1, text
        assert box.y1 <= height + 1, text
        for other, place in boxes[index + 1 :]:
            across = min(box.x1, place.x1) - max(box.x0, place.x0)
            along = min(box.y1, place.y1) - max(box.y0, place.y0)
            assert across < 2 or along < 2, (text, other)
