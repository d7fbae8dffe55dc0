"""Every figure: titled, labelled with units, its texts apart, the same bytes from the same data."""

import warnings

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.image import imread

import figure_sample as sample
import logged_sample
from capability_samples import RECORDS
from rmcore.reporting.figures.calibration import reliability_diagram_figure
from rmcore.reporting.figures.context import accuracy_in_context_figure
from rmcore.reporting.figures.length import reward_by_length_figure
from rmcore.reporting.figures.logged_answers import logged_answers_figure
from rmcore.reporting.figures.margins import margin_histogram_figure
from rmcore.reporting.figures.runs import runs_figure
from rmcore.reporting.figures.style import DPI, save
from rmcore.reporting.figures.training import series, training_curves_figure
from rmcore.reporting.html.blocks import capabilities_shown

pytestmark = pytest.mark.slow

history, rewards, bins, item = sample.history, sample.rewards, sample.bins, sample.item
ECE, CONTEXT = sample.ECE, sample.CONTEXT
RUNS = {"one-seed0-abcd": history(), "two-seed0-1234": history(30), "not evaluated": history(9, evaluated=False)}


FIGURES = [
    (margin_histogram_figure(rewards()), "reward margin (logits)", "pairs"),
    (reward_by_length_figure(rewards()), "length of the completion (characters)", "reward (logits)"),
    (logged_answers_figure(logged_sample.record()), "k, answers that the best is chosen from", "win rate over"),
    (accuracy_in_context_figure(CONTEXT), "pairwise accuracy", ""),
    (runs_figure(RUNS), "optimizer step", "loss (nats)"),
    (runs_figure({"empty": [], "too": []}), "optimizer step", "loss (nats)"),
]


@pytest.mark.parametrize(("figure", "x", "y"), FIGURES)
def test_titles_units_and_the_size_of_the_file(figure, x, y, tmp_path):
    assert len(figure.get_suptitle()) > 10
    assert figure.axes[0].get_xlabel() == x
    assert figure.axes[0].get_ylabel().startswith(y)
    pixels = imread(save(figure, tmp_path / "deep" / "figure.png"))
    assert pixels.shape[:2] == pytest.approx(DPI * figure.get_size_inches()[::-1], abs=1)
    assert pixels.min() < 0.5  # something is drawn


def test_the_same_data_gives_the_same_bytes_and_more_rows_a_higher_figure(tmp_path):
    paths = [save(reward_by_length_figure(rewards(2000)), tmp_path / name) for name in ("a.png", "b.png")]
    assert paths[0].read_bytes() == paths[1].read_bytes()
    heights = [accuracy_in_context_figure(CONTEXT * n).get_figheight() for n in (1, 7)]
    assert heights[1] > 3 * heights[0]


def drawn_ticks(axis):
    """Labels of the ticks inside the view; matplotlib keeps others that it never draws."""
    return [tick.label1 for tick in axis._update_ticks()]


@pytest.mark.parametrize(
    "figure",
    [
        training_curves_figure(history(), best_step=400),
        runs_figure(RUNS),
        runs_figure({f"run {place} of eight of a study with a long name": history(9 + place) for place in range(8)}),
        margin_histogram_figure(rewards(), negative_rate={"value": 0.3, "ci_low": 0.2, "ci_high": 0.4}),
        reliability_diagram_figure(bins(), ECE),
        reward_by_length_figure(rewards()),
        *(draw(RECORDS[one.stage]()) for one in capabilities_shown() for draw in one.figures.values()),
        logged_answers_figure(logged_sample.record(length=1.0)),
        logged_answers_figure(logged_sample.record(num_prompts=1)),
        accuracy_in_context_figure(
            [*CONTEXT, *[item(f"a long name of a subset {i} of many more", 0.6) for i in range(38)]]
        ),
    ],
)
def test_no_text_leaves_the_figure_or_overlaps_another(figure):
    canvas = FigureCanvasAgg(figure)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        canvas.draw()
    renderer = canvas.get_renderer()
    width, height = figure.get_size_inches() * figure.dpi
    labels = [
        text
        for ax in figure.axes
        for text in (*drawn_ticks(ax.xaxis), *drawn_ticks(ax.yaxis), ax._left_title, *ax.texts)
    ]
    shown = [text for text in (*labels, figure._suptitle) if text.get_text() and text.get_visible()]
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in shown]
    inside = [box for box in boxes if box[1].width > 0]
    assert len(inside) > 5
    for text, box in inside:
        assert box.x0 >= -1, text
        assert box.x1 <= width + 1, text
        assert box.y1 <= height + 1, text
    for index, (text, box) in enumerate(inside):
        for other, place in inside[index + 1 :]:
            across = min(box.x1, place.x1) - max(box.x0, place.x0)
            along = min(box.y1, place.y1) - max(box.y0, place.y0)
            assert across < 2 or along < 2, (text, other)


def test_curves_of_runs_are_what_each_logged_and_told_apart():
    figure = runs_figure(RUNS)
    loss, accuracy = figure.axes
    lines = {line.get_color(): line for line in loss.lines if len(line.get_xdata()) and line.get_linestyle() != "None"}
    assert len(lines) == len(RUNS)
    assert len({line.get_linestyle() for line in lines.values()}) == len(RUNS)
    steps, values = series(RUNS["two-seed0-1234"], "eval/pairwise_accuracy")
    assert any(
        list(line.get_xdata()) == list(steps) and list(line.get_ydata()) == list(values) for line in accuracy.lines
    )
    assert (
        figure.get_suptitle() == "Highest validation accuracy: one-seed0-abcd 65.0\u00a0%, two-seed0-1234 65.0\u00a0%"
    )
    assert [text.get_text() for text in figure.legends[0].get_texts()] == list(RUNS)
    assert "none of which was evaluated" in runs_figure({"a": history(9, evaluated=False)}).get_suptitle()
