"""What each figure says of its data, drawn without a warning from odd data too."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import figure_sample as sample
from rmcore.reporting.figures.calibration import reliability_diagram_figure
from rmcore.reporting.figures.context import accuracy_in_context_figure
from rmcore.reporting.figures.length import binned_means, reward_by_length_figure
from rmcore.reporting.figures.margins import margin_histogram_figure
from rmcore.reporting.figures.training import series, training_curves_figure

history, rewards, bins, item = sample.history, sample.rewards, sample.bins, sample.item
ECE, CONTEXT = sample.ECE, sample.CONTEXT


def title_of(figure) -> str:
    return figure.get_suptitle().replace("\n", " ")


def test_training_panels_are_labelled_and_the_best_step_is_marked():
    figure = training_curves_figure(history(), best_step=400)
    assert [ax.get_ylabel() for ax in figure.axes[:5]] == [
        "loss (nats)",
        "pairwise accuracy",
        "mean reward margin (logits)",
        "learning rate",
        "norm before clipping",
    ]
    for ax in figure.axes[:5]:
        assert ax.get_xlabel() == "optimizer step"
        assert ax.get_title(loc="left")
        assert any(list(line.get_xdata()) == [400, 400] for line in ax.lines)
    assert "step 400 of 800" in title_of(figure)
    assert "57.5" in title_of(figure)
    assert title_of(training_curves_figure(history())).startswith("Validation accuracy 51.9")
    assert "without validation" in title_of(training_curves_figure(history(30, evaluated=False)))


def test_training_curves_contain_all_points():
    rows = history()
    figure = training_curves_figure(rows)
    for ax, name in zip(figure.axes, ("loss", "pairwise_accuracy", "mean_margin"), strict=False):
        low, high = ax.get_ylim()
        for part in ("train", "eval"):
            values = series(rows, f"{part}/{name}")[1]
            assert low <= values.min() <= values.max() <= high


def test_smoothing_keeps_a_straight_line_straight_inside_and_a_constant_constant():
    rows = [{"step": step, "metrics": {"train/loss": 0.5, "train/mean_margin": float(step)}} for step in range(200)]
    figure = training_curves_figure(rows)
    assert np.allclose(figure.axes[0].lines[1].get_ydata(), 0.5)
    assert np.allclose(figure.axes[2].lines[1].get_ydata()[10:-10], np.arange(200)[10:-10])


def test_series_orders_by_step_and_drops_nulls():
    rows = [{"step": s, "metrics": {"a": v}} for s, v in ((3, 1.0), (1, 2.0), (2, None), (3, 4.0))]
    steps, values = series(rows, "a")
    assert steps.tolist() == [1, 3]
    assert values.tolist() == [2.0, 4.0]


@pytest.mark.slow
@settings(max_examples=40)
@given(st.lists(st.floats(-1e6, 1e6, allow_subnormal=False).map(lambda v: round(v, 3)), min_size=1, max_size=80))
def test_margin_bars_hold_every_pair_and_zero_is_an_edge(margins):
    frame = pd.DataFrame({"reward_chosen": margins, "reward_rejected": 0.0})
    ax = margin_histogram_figure(frame).axes[0]
    bars = ax.patches[:-1]  # the last bar marks the ties inside the first bar right of zero
    ties = ax.patches[-1].get_height()
    outside = "beyond the axis" in ax.get_title(loc="left")
    assert sum(bar.get_height() for bar in bars) == len(margins) or outside
    edges = np.array([bar.get_x() for bar in bars])
    assert np.abs(edges).min() < 1e-9 * max(1, np.abs(edges).max())
    assert ties == margins.count(0.0)
    if not outside:
        low = sum(bar.get_height() for bar in bars if bar.get_x() + bar.get_width() / 2 < 0)
        assert low == sum(margin < 0 for margin in margins)
        assert ax.get_xlim()[0] <= min(margins) <= max(margins) <= ax.get_xlim()[1]


def test_margin_histogram_says_shares_and_counts_outliers(draw):
    frame = pd.DataFrame({"reward_chosen": [*np.linspace(-1, 3, 400), 1e9], "reward_rejected": 0.0})
    figure = draw(margin_histogram_figure(frame, negative_rate={"value": 0.25, "ci_low": 0.2, "ci_high": 0.3}))
    ax = figure.axes[0]
    assert "1 more beyond the axis" in ax.get_title(loc="left")
    assert ax.get_xlim()[1] < 100
    written = " ".join(text.get_text() for text in ax.texts).replace("\u00a0", " ")
    assert "24.9 % negative" in written
    assert "20.0 to 30.0 %" in written


@pytest.mark.slow
def test_ties_are_on_neither_side_of_the_margin_histogram(draw):
    frame = pd.DataFrame({"reward_chosen": [-1.0, 0.0, 0.0, 0.0, 2.0], "reward_rejected": 0.0})
    written = " ".join(text.get_text() for text in draw(margin_histogram_figure(frame)).axes[0].texts)
    for said in ("20.0 % negative", "20.0 % positive", "3 exactly 0"):
        assert said in written.replace("\u00a0", " ")


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
    covered = np.mean(np.abs(once["mean"] - 2.0) < once["half_width"])
    assert covered >= 0.8
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
    assert (top.get_ylabel(), bottom.get_ylabel()) == ("share ranked as labelled (accuracy)", "pairs")
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
        for value in (row["value"], row["ci_low"], row["ci_high"]):
            assert value is None or low < value < high


UNKNOWN = {"value": None, "ci_low": None, "ci_high": None}
WIDE = {"train/loss": 1e9, "train/mean_margin": -1e9, "train/lr": 0.0}
ODD = {
    "no history": lambda: training_curves_figure([]),
    "one step": lambda: training_curves_figure([{"step": 1, "metrics": {"train/loss": 0.69}}]),
    "no numbers": lambda: training_curves_figure([{"step": 1, "metrics": {"train/loss": None, "train/lr": np.nan}}]),
    "huge numbers": lambda: training_curves_figure([{"step": s, "metrics": WIDE} for s in range(9)]),
    "no pair": lambda: reliability_diagram_figure(bins().head(0), UNKNOWN),
    "pairs in no bin": lambda: reliability_diagram_figure(
        bins().assign(count=0, mean_confidence=None, accuracy=None, accuracy_low=None, accuracy_high=None), UNKNOWN),
    "no intervals": lambda: reliability_diagram_figure(
        bins().assign(accuracy_low=None, accuracy_high=None).head(1), UNKNOWN),
    "long names": lambda: accuracy_in_context_figure([item("x" * 300, 1.0, 0.0, "model"), item("y", 0.0, None)]),
    "nothing measured": lambda: accuracy_in_context_figure([item("this model", None, None, "model")]),
    **{f"{num} rewards of {scale}": lambda num=num, scale=scale: margin_histogram_figure(rewards(num, scale))
       for num in (1, 7) for scale in (0.0, 1.0, 1e12)},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ODD)
def test_odd_data_are_drawn_without_a_warning(draw, name):
    assert title_of(draw(ODD[name]()))


@pytest.mark.slow
@pytest.mark.parametrize(("num", "scale"), [(1, 0.0), (7, 1e12), (7, 1.0)])
def test_few_equal_or_huge_rewards_are_inside_the_axes(draw, num, scale):
    frame = rewards(num, scale)
    low, high = draw(reward_by_length_figure(frame)).axes[0].get_ylim()
    both = np.concatenate([frame["reward_chosen"], frame["reward_rejected"]])
    assert low <= both.min() <= both.max() <= high
