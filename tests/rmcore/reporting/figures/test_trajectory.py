"""The figure of curvature along a training: all points inside, whiskers of the right size, odd histories drawn."""

import numpy as np
import pytest
from matplotlib.image import imread

from rmcore.reporting.figures.style import DPI, save
from rmcore.reporting.figures.trajectory import curvature_trajectory_figure


def row(step, lambda_max=20.0, lambda_min=-3.0, trace=100.0, margin=1.0, **errors):
    values = {"lambda_max": lambda_max, "lambda_min": lambda_min, "trace": trace, "margin_scale": margin}
    return {"step": step, "metrics": {f"hessian/{name}": value for name, value in (values | errors).items()}}


ERRORS = {"lambda_max_residual": 2.0, "lambda_min_residual": 0.5, "trace_standard_error": 30.0}
HISTORY = [row(100 * k, 170.0 / k, -90.0 / k, 50.0 * k - 120, 0.3 * k, **ERRORS) for k in range(1, 9)]


def points(ax, label):
    line = next(line for line in ax.lines if line.get_label().startswith(label))
    return np.array(line.get_xdata()).tolist(), np.array(line.get_ydata()).tolist()


@pytest.mark.slow
def test_file_is_a_png_of_the_expected_size(tmp_path):
    pixels = imread(save(curvature_trajectory_figure(HISTORY, best_step=300), tmp_path / "deep" / "figure.png"))
    assert pixels.shape[:2] == pytest.approx((4.4 * DPI, 11.0 * DPI), abs=1)
    assert pixels.min() < 0.5


@pytest.mark.slow
def test_every_point_and_whisker_is_drawn_inside_and_in_order(draw):
    figure = draw(curvature_trajectory_figure(HISTORY[::-1], best_step=300))
    ends, trace, margins = figure.axes
    steps = [100 * k for k in range(1, 9)]
    assert points(ends, "λmax") == (steps, [170.0 / k for k in range(1, 9)])
    assert points(ends, "λmin") == (steps, [-90.0 / k for k in range(1, 9)])
    assert points(trace, "trace") == (steps, [50.0 * k - 120 for k in range(1, 9)])
    assert points(margins, "margins")[1] == [0.3 * k for k in range(1, 9)]
    whiskers = trace.collections[0].get_segments()
    assert [end[1] - start[1] for start, end in whiskers] == pytest.approx([60.0] * 8)
    for ax in (ends, trace):
        low, high = ax.get_ylim()
        tips = np.concatenate([segment[:, 1] for held in ax.collections for segment in held.get_segments()])
        assert low < tips.min() < tips.max() < high


def test_titles_units_and_the_kept_step():
    figure = curvature_trajectory_figure(HISTORY, best_step=300)
    title = "Largest curvature λmax 170.0 → 21.25 from step 100 to 800; 56.67 at the kept step 300"
    assert figure.get_suptitle() == title
    assert all(ax.get_xlabel() == "optimizer step" and ax.get_title(loc="left") for ax in figure.axes)
    assert "nats per squared unit" in figure.axes[0].get_ylabel()
    assert "nats per squared unit" in figure.axes[1].get_ylabel()
    assert figure.axes[2].get_ylabel() == "RMS margin (logits)"
    assert all(points(ax, "kept checkpoint")[0] == [300, 300] for ax in figure.axes)


def test_margins_that_were_not_measured_are_said_to_be_missing(draw):
    rows = [row(k, margin=None) for k in range(1, 4)]
    margins = draw(curvature_trajectory_figure(rows)).axes[2]
    assert not margins.lines
    assert "train.callbacks" in margins.texts[0].get_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "title"),
    [
        ([], "No curvature was measured during training"),
        ([{"step": 1, "metrics": {"eval/loss": 0.5}}], "No curvature was measured during training"),
        ([row(5)], "Largest curvature λmax 20.00 at step 5"),
        ([row(5), row(10, 1e6, -1e-9, -1e7), row(15, None), row(20)], "Largest curvature λmax 20.00 → 20.00"),
        ([row(k, 10.0**-k, 0.0, 0.0, 0.0) for k in range(1, 90)], "Largest curvature λmax 0.100 → "),
    ],
    ids=["nothing", "no curvature", "one point", "huge and missing", "many tiny"],
)
def test_odd_histories(draw, rows, title):
    assert draw(curvature_trajectory_figure(rows, best_step=5)).get_suptitle().startswith(title)
