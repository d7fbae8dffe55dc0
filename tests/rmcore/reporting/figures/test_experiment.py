"""Figures of an experiment: titled, with units, holding their data, each arm named; numbers as text."""

import math
import warnings
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.image import imread

import experiment_sample as sample
from rmcore.reporting.figures import numbers
from rmcore.reporting.figures.arm_intervals import arm_intervals_figure
from rmcore.reporting.figures.arms import MOST, looks, main_metrics, short, shown
from rmcore.reporting.figures.claims import VERDICTS, subject, tally
from rmcore.reporting.figures.experiment import draw_experiment
from rmcore.reporting.figures.forest import forest_plot_figure
from rmcore.reporting.figures.learning import learning_curves_figure
from rmcore.reporting.figures.style import new_figure, unit_ticks
from rmcore.reporting.figures.tradeoff import tradeoff_figure

RESULTS = sample.results()
INFOS = RESULTS["metrics"]
MAIN = (sample.ACCURACY, True)
OTHERS = (sample.SECONDS, sample.ECE)


def matrix(num_arms: int, seed: int = 0) -> tuple[list, list, dict]:
    """Arms, cells and curves of a larger matrix with similar arms."""
    rng = np.random.default_rng(seed)
    arms, cells, curves = [], [], []
    for number in range(num_arms):
        name = f"learning_rate={10.0**-number:.0e}, smoothing={number}"
        own = []
        for cell in RESULTS["cells"][:3]:
            metrics = {key: value and value * (1 + 0.02 * rng.normal()) for key, value in cell["metrics"].items()}
            own.append(cell | {"arm": name, "metrics": metrics})
        means = {key: sample.metric([one["metrics"][key] for one in own if one["metrics"][key]]) for key in INFOS}
        arms.append(RESULTS["arms"][1] | {"name": name, "is_control": number == 0, "metrics": means})
        cells += own
        values = np.linspace(0.5, 0.6 + 0.01 * rng.random(), 8).tolist()
        curves.append({"arm": name, "seed": 0, "steps": list(range(8)), "values": values})
    return arms, cells, {"eval/pairwise_accuracy": curves}


def names(figure) -> list[str]:
    """Arms in the legend of a figure."""
    [legend] = figure.legends
    return [text.get_text() for text in legend.get_texts()]


def boxes(texts) -> list:
    return [text.get_window_extent() for text in texts]


def apart(found) -> bool:
    """No two boxes share more than a rounding error."""
    for one, other in combinations(found, 2):
        width = min(one.x1, other.x1) - max(one.x0, other.x0)
        height = min(one.y1, other.y1) - max(one.y0, other.y0)
        if min(width, height) > 0.5:
            return False
    return True


@pytest.mark.slow
def test_all_figures_are_drawn_and_the_same_each_time(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = draw_experiment(RESULTS, tmp_path / "deep" / "one")
        second = draw_experiment(RESULTS, tmp_path / "two")
    assert list(first) == ["forest_plot", "arm_intervals", "learning_curves", "tradeoff"]
    for name, path in first.items():
        assert path.read_bytes() == second[name].read_bytes()
        assert imread(path).min() < 0.5


@pytest.mark.slow
def test_what_has_no_data_is_skipped(tmp_path):
    results = sample.results()
    results["hypotheses"], results["curves"] = [], {"train/loss": []}
    for one in (*results["arms"], *results["cells"]):
        del one["metrics"][sample.ECE], one["metrics"][sample.SECONDS]
    assert list(draw_experiment(results, tmp_path)) == ["arm_intervals"]


@pytest.mark.slow
def test_forest_has_a_panel_a_claim_on_its_own_scale(draw):
    figure = draw(forest_plot_figure(RESULTS["hypotheses"], INFOS))
    assert figure.get_suptitle() == "4 claims: 1 supported, 1 refuted, 2 inconclusive" == tally(RESULTS["hypotheses"])
    for ax, item in zip(figure.axes, RESULTS["hypotheses"], strict=True):
        texts = {text.get_text(): text.get_color() for text in ax.texts}
        words, colour, _ = VERDICTS[item["verdict"]]
        assert texts[words] == colour
        assert item["claim"] in ax.get_title(loc="left").replace("\n", " ")
        assert subject(item) in ax.get_xlabel()
        assert INFOS[item["metric"]]["label"] in ax.get_xlabel()
        lines = {line.get_label(): line for line in ax.lines}
        assert set(lines["threshold"].get_xdata()) == {item["threshold"]}
        assert list(lines["value"].get_xdata()) == [item["value"]]
        assert lines["value"].get_color() == colour
        assert ("interval" in lines) == (item["ci_low"] is not None)
        left, right = ax.get_xlim()
        inside = [item[key] for key in ("value", "ci_low", "ci_high", "threshold") if item[key] is not None]
        assert left < min(inside)
        assert max(inside) < right
        shade = ax.patches[0].get_extents().transformed(ax.transData.inverted())
        edge = right if item["direction"] == "above" else left
        assert sorted((shade.x0, shade.x1)) == pytest.approx(sorted((item["threshold"], edge)))
    units = [ax.get_xlabel().rpartition("(")[2] for ax in figure.axes]
    assert [units[0], units[1], units[3]] == ["percentage points)", "%)", "ratio)"]


@pytest.mark.slow
def test_forest_texts_do_not_cover_one_another(draw):
    figure = draw(forest_plot_figure(RESULTS["hypotheses"] * 3, INFOS))
    figure.draw_without_rendering()
    texts = [text for ax in figure.axes for text in (*ax.texts, ax.xaxis.label)]
    assert len(texts) >= 3 * 12
    assert apart(boxes(texts))


def test_a_claim_without_value_is_drawn_as_a_sentence(draw):
    bare = RESULTS["hypotheses"][0] | {"value": None, "ci_low": None, "ci_high": None, "verdict": "inconclusive"}
    figure = draw(forest_plot_figure([bare], {}))
    assert any("no value" in text.get_text() for text in figure.axes[0].texts)
    assert bare["metric"] in figure.axes[0].get_xlabel()


@pytest.mark.slow
def test_arm_intervals_show_means_seeds_and_the_control(draw):
    metrics = list(sample.LEVELS)
    figure = draw(arm_intervals_figure(RESULTS["arms"], RESULTS["cells"], metrics, INFOS))
    assert "control" in figure.get_suptitle()
    for ax, metric in zip(figure.axes, metrics, strict=False):
        assert INFOS[metric]["label"] in ax.get_title(loc="left").replace("\n", " ")
        assert ax.get_xlabel().startswith("mean over seeds")
        for row, arm in enumerate(RESULTS["arms"]):
            mean = next(line for line in ax.lines if line.get_label() == arm["name"])
            assert (list(mean.get_xdata()), list(mean.get_ydata())) == ([arm["metrics"][metric]["value"]], [row])
        seeds = np.concatenate([line.get_xdata() for line in ax.lines if line.get_label() == "seeds"])
        known = [cell["metrics"][metric] for cell in RESULTS["cells"] if cell["metrics"][metric] is not None]
        assert sorted(seeds) == sorted(known)
        left, right = ax.get_xlim()
        assert left < min(known) <= max(known) < right
    assert [tick.get_text() for tick in figure.axes[0].get_yticklabels()] == list(sample.ARMS)


def test_an_interval_far_wider_than_the_points_does_not_flatten_them(draw):
    arms = [arm | {"metrics": dict(arm["metrics"])} for arm in RESULTS["arms"]]
    wide = sample.metric([0.5, 0.7])
    arms[2]["metrics"][sample.ACCURACY] = wide
    ax = draw(arm_intervals_figure(arms, RESULTS["cells"], [sample.ACCURACY], INFOS)).axes[0]
    points = [arm["metrics"][sample.ACCURACY]["value"] for arm in arms]
    assert np.ptp(ax.get_xlim()) < 5 * (max(points) - min(points))
    assert np.ptp(ax.get_xlim()) < 0.5 * (wide["ci_high"] - wide["ci_low"])
    edges = [line for line in ax.lines if list(line.get_xdata()) in ([ax.get_xlim()[0]], [ax.get_xlim()[1]])]
    assert len(edges) == 2


@pytest.mark.slow
def test_tradeoff_shares_the_accuracy_axis_and_names_every_arm(draw):
    figure = draw(tradeoff_figure(RESULTS["arms"], RESULTS["cells"], INFOS, accuracy=MAIN[0], others=OTHERS))
    assert [ax.get_xlabel() for ax in figure.axes] == ["training time (s)", "calibration error, debiased"]
    assert figure.axes[0].get_ylabel() == "held-out pairwise accuracy (%)"
    assert figure.axes[0].get_ylim() == figure.axes[1].get_ylim()
    assert names(figure) == list(sample.ARMS)
    for ax, other in zip(figure.axes, OTHERS, strict=True):
        for arm in RESULTS["arms"]:
            line = next(line for line in ax.lines if line.get_label() == arm["name"])
            point = [line.get_xdata()[0], line.get_ydata()[0]]
            assert point == [arm["metrics"][other]["value"], arm["metrics"][MAIN[0]]["value"]]


@pytest.mark.slow
@pytest.mark.parametrize("num_arms", [1, MOST, 14])
def test_nine_arms_are_named_and_the_others_counted(draw, num_arms):
    arms, cells, curves = matrix(num_arms)
    drawn = learning_curves_figure(curves, arms, MAIN)
    assert names(drawn) == [short(name) for name in shown(arms, *MAIN)]
    assert (drawn.axes[0].get_xlabel(), drawn.axes[0].get_ylabel()) == ("optimizer step", "validation accuracy (%)")
    for figure in (drawn, tradeoff_figure(arms, cells, INFOS, accuracy=MAIN[0], others=OTHERS)):
        draw(figure)
        assert len(names(figure)) == min(num_arms, MOST)
        for ax in figure.axes:
            assert (f"grey: {num_arms - MOST} further arms" in ax.get_title(loc="left")) == (num_arms > MOST)


@pytest.mark.slow
def test_learning_curves_draw_every_seed_and_the_mean_of_all_of_them(draw):
    metric = "eval/pairwise_accuracy"
    curves = RESULTS["curves"]
    figure = draw(learning_curves_figure(curves, RESULTS["arms"], MAIN))
    assert len(figure.axes) == 2
    thin = [line for line in figure.axes[0].lines if line.get_linewidth() < 1 and line.get_linestyle() == "-"]
    assert sorted(tuple(line.get_ydata()) for line in thin) == sorted(tuple(one["values"]) for one in curves[metric])
    stopped = [one for one in curves[metric] if one["arm"] == "A4 stopping"]
    end = next(line for line in figure.axes[0].lines if line.get_label() == "A4 stopping")
    last = min(one["steps"][-1] for one in stopped)
    assert end.get_xdata()[0] == last
    expected = np.mean([one["values"][one["steps"].index(last)] for one in stopped])
    assert end.get_ydata()[0] == pytest.approx(expected)


def test_a_diverged_seed_does_not_flatten_the_others(draw):
    curves = [dict(one, values=list(one["values"])) for one in RESULTS["curves"]["train/loss"]]
    curves[0]["values"][-1] = 1e6
    (ax,) = draw(learning_curves_figure({"train/loss": curves}, RESULTS["arms"], MAIN)).axes
    assert ax.get_ylim()[1] < 1e4


@given(st.permutations(range(15)), st.booleans(), st.integers(0, 14))
def test_the_control_and_the_best_arms_are_shown(order, better, control):
    arms = [
        {"name": str(k), "is_control": k == control, "metrics": {"m": {"value": float(rank)}}}
        for k, rank in enumerate(order)
    ]
    names = shown(arms, "m", better)
    assert len(names) == MOST
    assert str(control) in names
    assert [arm["name"] for arm in arms if arm["name"] in names] == names
    inside = [order[int(name)] for name in names if name != str(control)]
    outside = [rank for k, rank in enumerate(order) if str(k) not in names]
    assert min(inside) > max(outside) if better else max(inside) < min(outside)
    look = looks(arms, "m", better)
    assert len({look[name].colour for name in names}) == len({look[name].marker for name in names}) == MOST


def test_main_metrics_hold_the_first_and_those_of_claims():
    names = [f"m{k}" for k in range(12)]
    assert main_metrics(names, [{"metric": "m9"}, {"metric": "m11"}]) == ["m0", "m1", "m2", "m3", "m9", "m11"]
    assert main_metrics(names, [{"metric": name} for name in names]) == names
    assert short("a" * 30 + "z" * 30, 11) == "aaaaa…zzzzz"


SAID = [
    *(((0.0241, "share", "difference"), "+2.4 points"), ((-0.00001, "share", "difference"), "0.0 points")),
    *(((-12.3, "seconds", "difference"), "−12.30 s"), ((1.42, "seconds", "ratio"), "1.420×")),
    *(((0.631, "share", "level"), "63.1 %"), ((None, "share", "difference"), "–"), ((560.4, "steps"), "560 steps")),
    *(((-0.068, "", "difference"), "−0.068"), ((-4.2, "seconds"), "−4.2 s"), ((12.5, "steps"), "12.50 steps")),
]
INTERVALS = [
    *((0.019, 0.055, ("share", "difference"), "+1.9 to +5.5 points"), (48.0, 55.1, ("seconds",), "48.0 to 55.1 s")),
    *((48.0, 106.0, ("seconds",), "48.0 s to 1 min 46 s"), (0.55, 0.73, ("share", "ratio"), "0.550× to 0.730×")),
    *((0.62, 0.66, ("share",), "62.0 to 66.0 %"), (None, 0.66, ("share",), "")),
]


def test_quantities_read_as_people_write_them():
    for said, expected in SAID:
        assert numbers.text(*said).replace("\u00a0", " ") == expected
    for low, high, how, expected in INTERVALS:
        assert numbers.interval({"ci_low": low, "ci_high": high}, *how).replace("\u00a0", " ") == expected
    for said, expected in (((0.031, "share", "level"), "3.1 points"), ((75.0, "seconds", "level"), "1 min 15 s")):
        assert numbers.distance(*said).replace("\u00a0", " ") == expected
    for unit, how, value, expected in (("share", "difference", 0.025, "+2.5"), ("seconds", "ratio", 0.7, "0.7×")):
        axis = new_figure(2, 2).subplots().xaxis
        unit_ticks(axis, unit, how)
        assert axis.get_major_formatter()(value, 0) == expected


@given(st.floats(-1e12, 1e12))
def test_decimals_are_true_to_three_digits(value):
    text = numbers.decimal(value).replace("−", "-").replace(",", "")
    assert math.isclose(float(text), value, rel_tol=0.005, abs_tol=5e-4 if abs(value) >= 1e-3 else 0)
    assert len(text) <= 10


@given(st.floats(-5, 5))
def test_percent_is_true_to_a_tenth(value):
    text = numbers.percent(value)
    assert text.endswith("\u00a0%")
    assert abs(float(text[:-2].replace("−", "-")) - 100 * value) <= 0.0501
    assert not text.startswith("−0.0")


def test_missing_numbers_are_a_dash():
    for value in (None, math.nan, math.inf):
        for show in (numbers.decimal, numbers.percent, numbers.count, numbers.duration):
            assert show(value) == numbers.MISSING
        assert numbers.text(value, "logits") == numbers.MISSING
        assert numbers.interval({"ci_low": value, "ci_high": 1.0}) == ""
    assert numbers.interval({}) == ""


def test_units():
    assert numbers.text(12345, "count") == "12,345"
    assert numbers.text(0.5, "nats") == "0.500\u00a0nats"
    assert numbers.interval({"ci_low": 0.69, "ci_high": 0.734}, "share") == "69.0 to 73.4\u00a0%"
    assert [numbers.duration(s) for s in (3.21, 59.97, 125, 3599.7, 7800)] == [
        "3.2 s",
        "60.0 s",
        "2 min 05 s",
        "1 h 00 min",
        "2 h 10 min",
    ]
