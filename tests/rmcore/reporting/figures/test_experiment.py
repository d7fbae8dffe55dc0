"""Figures of an experiment: titled, with units, holding their data, each arm named."""

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
from rmcore.reporting.figures.learning import learning_curves_figure, mean_curve
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


@pytest.mark.parametrize("num_arms", [2, MOST, 24])
def test_the_tradeoff_names_nine_arms_and_counts_the_others(num_arms):
    arms, cells, _ = matrix(num_arms, 0)
    figure = tradeoff_figure(arms, cells, INFOS, accuracy=MAIN[0], others=OTHERS)
    assert len(names(figure)) == min(num_arms, MOST)
    for ax in figure.axes:
        assert (f"grey: {num_arms - MOST} further arms" in ax.get_title(loc="left")) == (num_arms > MOST)


@pytest.mark.slow
@pytest.mark.parametrize("num_arms", [1, MOST, 14])
def test_learning_curves_name_their_arms(draw, num_arms):
    arms, _, curves = matrix(num_arms)
    figure = learning_curves_figure(curves, arms, MAIN)
    (ax,) = figure.axes
    assert names(figure) == [short(name) for name in shown(arms, *MAIN)]
    assert ax.get_ylabel() == "validation accuracy (%)"
    assert ax.get_xlabel() == "optimizer step"
    assert (f"grey: {num_arms - MOST} further arms" in ax.get_title(loc="left")) == (num_arms > MOST)
    draw(figure)


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


def test_mean_curve_is_the_mean_where_all_seeds_have_points():
    steps = np.array([0.0, 1.0, 2.0])
    grid, values = mean_curve([(steps, steps), (steps[:2], 3 * steps[:2]), (np.array([0.0, 0.5, 1.5]), np.zeros(3))])
    assert list(grid) == [0.0, 0.5, 1.0]
    assert list(values) == pytest.approx([0.0, (0.5 + 1.5) / 3, 4 / 3])
    assert len(mean_curve([])[0]) == 0


@given(st.integers(1, MOST))
def test_nine_arms_look_different(num):
    arms = [{"name": str(k), "is_control": k == 0, "metrics": {}} for k in range(num)]
    found = looks(arms, "x", None)
    assert len({look.colour for look in found.values()}) == num
    assert len({look.marker for look in found.values()}) == num


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
    assert len({look[name].colour for name in names}) == MOST


def test_main_metrics_hold_the_first_and_those_of_claims():
    names = [f"m{k}" for k in range(12)]
    assert main_metrics(names, [{"metric": "m9"}, {"metric": "m11"}]) == ["m0", "m1", "m2", "m3", "m9", "m11"]
    assert main_metrics(names, [{"metric": name} for name in names]) == names
    assert main_metrics([], []) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (numbers.text(0.0241, "share", "difference"), "+2.4 points"),
        (numbers.text(-0.00001, "share", "difference"), "0.0 points"),
        (numbers.text(-12.3, "seconds", "difference"), "−12.30 s"),
        (numbers.text(1.42, "seconds", "ratio"), "1.420×"),
        (numbers.text(0.631, "share", "level"), "63.1 %"),
        (numbers.text(None, "share", "difference"), "–"),
        (numbers.text(-0.068, "", "difference"), "−0.068"),
        (numbers.text(-4.2, "seconds"), "−4.2 s"),
        (numbers.text(560.4, "steps"), "560 steps"),
        (numbers.text(12.5, "steps"), "12.50 steps"),
        (numbers.text(None, "steps"), "–"),
        (numbers.interval({"ci_low": 0.019, "ci_high": 0.055}, "share", "difference"), "+1.9 to +5.5 points"),
        (numbers.interval({"ci_low": 48.0, "ci_high": 55.1}, "seconds"), "48.0 to 55.1 s"),
        (numbers.interval({"ci_low": 48.0, "ci_high": 106.0}, "seconds"), "48.0 s to 1 min 46 s"),
        (numbers.interval({"ci_low": 0.55, "ci_high": 0.73}, "share", "ratio"), "0.550× to 0.730×"),
        (numbers.interval({"ci_low": 0.62, "ci_high": 0.66}, "share"), "62.0 to 66.0 %"),
        (numbers.interval({"ci_low": None, "ci_high": 0.66}, "share"), ""),
        (numbers.distance(0.031, "share", "level"), "3.1 points"),
        (numbers.distance(75.0, "seconds", "level"), "1 min 15 s"),
        (numbers.distance(0.08, "seconds", "ratio"), "0.080×"),
        (numbers.distance(None, "share", "level"), "–"),
    ],
)
def test_quantities_read_as_people_write_them(text, expected):
    assert text.replace("\u00a0", " ") == expected


@pytest.mark.parametrize(
    ("unit", "comparison", "value", "expected"),
    [
        ("share", "difference", 0.025, "+2.5"),
        ("share", "level", 0.65, "65"),
        ("seconds", "ratio", 0.7, "0.7×"),
        ("steps", "level", -1500.0, "−1,500"),
    ],
)
def test_ticks_are_in_the_unit_of_their_axis(unit, comparison, value, expected):
    axis = new_figure(2, 2).subplots().xaxis
    unit_ticks(axis, unit, comparison)
    assert axis.get_major_formatter()(value, 0) == expected


def test_long_names_keep_both_ends():
    assert short("abc", 26) == "abc"
    assert short("a" * 30 + "z" * 30, 11) == "aaaaa…zzzzz"
