"""Figures of slices: every measured point drawn and inside, odd records drawn too, titles that say what was seen."""

import dataclasses

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.image import imread

from rmcore.landscape.sam import SamSharpness
from rmcore.landscape.slices import LossSlice, LossSurface
from rmcore.reporting.figures.slices import slices_figure, surface_figure
from rmcore.reporting.figures.style import DPI, save

LINE = LossSlice(
    name="eigenvector of the largest eigenvalue, 12.5",
    unit="Euclidean length of the step in the weights",
    distances=(-0.4, -0.2, 0.0, 0.2, 0.4),
    loss=(1.3, 0.73, 0.5, 0.77, 1.2),
    accuracy=(0.6, 0.7, 0.75, 0.7, 0.5),
    tie_rate=(0.0,) * 5,
    quadratic=(1.46, 0.73, 0.5, 0.77, 1.54),
    slope=0.1,
    curvature=12.5,
    loss_at_model=0.5,
    length=1.0,
    num_pairs=64,
    temperature=1.0,
    num_not_finite=0,
)
SAM = SamSharpness(0.05, 0.5, 0.5625, 0.0625, 1.0, 0.05, 0.0625, 64, 1.0)
AXIS = (-1.0, -0.5, 0.0, 0.5, 1.0)


def line(**changes):
    """LINE with changes, as a record."""
    return dataclasses.replace(LINE, **changes).to_dict()


def plane(loss=None, **changes):
    """A bowl around the model, or `loss`, as a record."""
    bowl = tuple(tuple(0.5 + x**2 + 2 * y**2 for x in AXIS) for y in AXIS)
    made = LossSurface(
        name_x="random direction 1",
        name_y="random direction 2",
        unit="step relative to the norm of each filter",
        xs=AXIS,
        ys=AXIS,
        loss=bowl if loss is None else loss,
        accuracy=bowl,
        cosine=0.0123,
        loss_at_model=0.5,
        length_x=1.0,
        length_y=1.0,
        num_pairs=64,
        temperature=1.0,
        num_not_finite=0,
    )
    return dataclasses.replace(made, **changes).to_dict()


MANY = {"lines": [line(name=f"line {k}", quadratic=None) for k in range(7)]}
WITHOUT = line(
    name="random direction, filter-normalised",
    unit="step relative to the norm of each filter",
    quadratic=None,
    slope=None,
    curvature=None,
)


def title_of(figure):
    return figure.get_suptitle().replace("\n", " ")


def drawn(ax, label):
    found = next(line for line in ax.lines if line.get_label().startswith(label))
    return np.array(found.get_xdata()).tolist(), np.array(found.get_ydata()).tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("draw", "record", "inches"),
    [
        (slices_figure, {"lines": [line()] * 2, "sam": SAM.to_dict()}, (7.8, 5.0)),
        (surface_figure, plane(), (7.4, 6.6)),
    ],
)
def test_files_are_pngs_of_the_expected_size_and_always_the_same(draw, record, inches, tmp_path):
    out = save(draw(record), tmp_path / "deep" / "figure.png")
    pixels = imread(out)
    assert pixels.shape[:2] == pytest.approx((inches[1] * DPI, inches[0] * DPI), abs=1)
    assert pixels.min() < 0.5
    assert save(draw(record), tmp_path / "again.png").read_bytes() == out.read_bytes()


def test_each_line_has_its_loss_its_prediction_and_its_accuracy(draw):
    figure = draw(slices_figure({"lines": [line(), WITHOUT]}))
    loss, bare_loss, accuracy, bare_accuracy = figure.axes
    assert drawn(loss, "measured") == (list(LINE.distances), list(LINE.loss))
    assert drawn(loss, "predicted") == (list(LINE.distances), list(LINE.quadratic))
    assert drawn(loss, "this model") == ([0.0], [0.5])
    assert drawn(accuracy, "pairwise") == (list(LINE.distances), list(LINE.accuracy))
    assert not [found for found in bare_loss.lines if found.get_label().startswith("predicted")]
    assert accuracy.get_ylim() == bare_accuracy.get_ylim()
    for ax, values in ((loss, LINE.loss), (accuracy, LINE.accuracy)):
        low, high = ax.get_ylim()
        assert low < min(values) < max(values) < high
        assert ax.get_xlim() == (-0.4, 0.4)


def test_titles_and_units():
    figure = slices_figure({"lines": [line(), WITHOUT], "sam": SAM.to_dict()})
    loss, bare, accuracy, _ = figure.axes
    assert title_of(figure) == (
        "Loss 0.500 nats a pair at this model; no measured point is lower. "
        "A step of 0.05 straight uphill adds 0.062 (SAM)"
    )
    assert loss.get_title(loc="left").split("\n") == [
        "eigenvector of the largest eigenvalue, 12.5",
        "slope 0.100, curvature 12.50",
        "predict the loss to 5 % up to a distance of 0.200",
    ]
    assert bare.get_title(loc="left") == "random direction, filter-normalised"
    assert loss.get_ylabel() == "loss (nats a pair)"
    assert accuracy.get_ylabel() == "accuracy"
    assert accuracy.get_xlabel() == LINE.unit


def test_a_lower_point_is_named_with_its_line():
    lower = line(name="the way down", loss=(0.9, 0.8, 0.5, 0.4, 0.7))
    title = title_of(slices_figure({"lines": [line(), lower]}))
    assert "lowest on these lines 0.400 (the way down)" in title
    same = line(loss=(0.9, 0.8, 0.5, 0.4999999, 0.7))  # lower by rounding only
    assert "no measured point is lower" in title_of(slices_figure({"lines": [same]}))


@pytest.mark.parametrize(
    ("quadratic", "reach"),
    [((1.3, 0.73, 0.5, 0.77, 1.2), 0.4), ((1.3, 0.73, 0.5, 0.9, 1.2), 0.0), ((5.0, 0.73, 0.5, 0.77, 1.2), 0.2)],
    ids=["everywhere", "nowhere", "not at one end"],
)
def test_a_prediction_reaches_as_far_as_it_is_close_on_both_sides(quadratic, reach):
    title = slices_figure({"lines": [line(quadratic=quadratic)]}).axes[0].get_title(loc="left")
    assert float(title.rpartition(" ")[2]) == reach


def test_a_prediction_far_off_does_not_flatten_the_measured_loss(draw):
    figure = draw(slices_figure({"lines": [line(quadratic=(-1e6, -1e3, 0.5, 1e3, 1e6))]}))
    low, high = figure.axes[0].get_ylim()
    assert low < min(LINE.loss)
    assert max(LINE.loss) < high < low + 3 * (max(LINE.loss) - min(LINE.loss))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("record", "title"),
    [
        ({}, "No slice of the loss was measured"),
        ({"lines": []}, "No slice of the loss was measured"),
        ({"lines": [line(distances=(0.0,), loss=(0.5,), accuracy=(0.7,), quadratic=(0.5,))]}, "Loss 0.500"),
        ({"lines": [line(loss=(None,) * 5, accuracy=(None,) * 5, num_not_finite=5)]}, "Loss 0.500"),
        ({"lines": [line(loss=(0.5,) * 5, quadratic=(0.5,) * 5)]}, "Loss 0.500"),
        ({"lines": [line(loss=(1e-9, 1e-5, 0.5, 1e8, 1e30))]}, "Loss 0.500"),
        ({"lines": [line(loss=(0.5, 0.5, 0.5, 8.0, 40.0))]}, "Loss 0.500"),
        ({"lines": [line(loss=(0.0, 0.0, 0.5, 1e8, 1e30))]}, "Loss 0.500"),
        ({"lines": [line(name="word " * 60)]}, "Loss 0.500"),
        (MANY, "Loss 0.500"),
    ],
    ids=["nothing", "no line", "one point", "never finite", "flat", "huge", "wide", "from zero", "long name", "many"],
)
def test_odd_records(draw, record, title):
    assert title_of(draw(slices_figure(record))).startswith(title)


def test_points_left_out_are_counted_and_their_place_is_kept(draw):
    partial = line(loss=(None, 0.7, 0.5, 0.7, None), accuracy=(None, 0.5, 0.7, 0.5, None), num_not_finite=2)
    ax = draw(slices_figure({"lines": [partial]})).axes[0]
    assert "not finite, left out: 2 of 5 points" in ax.get_title(loc="left")
    assert ax.get_xlim() == (-0.4, 0.4)


@pytest.mark.slow
@pytest.mark.parametrize("record", [{"lines": [line(), WITHOUT, line()], "sam": SAM.to_dict()}, MANY, plane()])
def test_no_text_leaves_the_figure_or_overlaps_a_title(record):
    figure = slices_figure(record) if "lines" in record else surface_figure(record)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    width, height = figure.get_size_inches() * figure.dpi
    texts = [text for ax in figure.axes for text in (ax._left_title, ax.xaxis.label, ax.yaxis.label)]
    texts = [text for text in (*texts, figure._suptitle) if text.get_text()]
    boxes = [text.get_window_extent(canvas.get_renderer()) for text in texts]
    for text, box in zip(texts, boxes, strict=True):
        assert box.x0 >= -1, text
        assert box.x1 <= width + 1, text
        assert box.y0 >= -1, text
        assert box.y1 <= height + 1, text
    for index, box in enumerate(boxes):
        for place, other in zip(boxes[index + 1 :], texts[index + 1 :], strict=True):
            across = min(box.x1, place.x1) - max(box.x0, place.x0)
            along = min(box.y1, place.y1) - max(box.y0, place.y0)
            assert across < 2 or along < 2, (texts[index], other)


# The surface.


def test_the_surface_has_the_model_in_the_middle_and_says_what_is_lower(draw):
    figure = draw(surface_figure(plane()))
    ax, bar = figure.axes
    assert (
        title_of(figure)
        == "Loss 0.500 nats a pair at this model, up to 3.500 on this plane; no measured point is lower"
    )
    assert drawn(ax, "this model") == ([0.0], [0.0])
    assert (ax.get_xlim(), ax.get_ylim()) == ((-1.0, 1.0), (-1.0, 1.0))
    assert ax.get_xlabel() == "random direction 1\nstep relative to the norm of each filter"
    assert ax.get_ylabel() == "random direction 2\nstep relative to the norm of each filter"
    assert ax.get_title(loc="left").startswith("64 pairs, 5 × 5 points\n")
    assert "cosine was 0.012" in ax.get_title(loc="left")
    assert bar.get_ylabel() == "loss (nats a pair)"
    assert bar.get_ylim() == pytest.approx((0.5, 3.5))


def test_rows_of_the_surface_are_the_second_direction(draw):
    tilted = tuple(tuple(1.0 + 0.1 * x + 0.4 * y for x in AXIS) for y in AXIS)
    figure = draw(surface_figure(plane(tilted, loss_at_model=1.0)))
    assert drawn(figure.axes[0], "lowest") == ([-1.0], [-1.0])
    assert "12 of 25 points are lower, down to 0.500 at (−1.000, −1.000)" in title_of(figure)
    only_y = tuple(tuple(1.0 + 0.4 * y + 0.01 * x**2 for x in AXIS) for y in AXIS)
    assert drawn(surface_figure(plane(only_y)).axes[0], "lowest") == ([0.0], [-1.0])


HOLES = tuple(tuple(None if x + y > 1.2 else 0.5 + x**2 for x in AXIS) for y in AXIS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("record", "title"),
    [
        (plane(((None,) * 5,) * 5, num_not_finite=25), "Loss 0.500 nats a pair at this model, finite nowhere"),
        (plane(((0.5,) * 5,) * 5), "Loss 0.500"),
        (plane(((0.0,) * 5,) * 5, loss_at_model=0.0), "Loss 0"),
        (plane(((0.5,),), xs=(0.0,), ys=(0.0,)), "Loss 0.500"),
        (plane(tuple(tuple(0.5 * 10 ** (9 * abs(x)) for x in AXIS) for _ in AXIS)), "Loss 0.500"),
        (plane(HOLES, num_not_finite=3), "Loss 0.500"),
    ],
    ids=["never finite", "flat", "zero", "one point", "wide", "holes"],
)
def test_odd_surfaces(draw, record, title):
    assert title_of(draw(surface_figure(record))).startswith(title)


def test_a_legend_says_where_the_loss_is_not_finite():
    def labels(figure):
        return [text.get_text() for text in figure.legends[0].get_texts()]

    assert "loss not finite" in labels(surface_figure(plane(HOLES, num_not_finite=3)))
    assert "loss not finite" not in labels(surface_figure(plane()))
