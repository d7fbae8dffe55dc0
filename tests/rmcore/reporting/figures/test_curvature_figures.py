"""Density, layers, Hessian beside Gauss-Newton: every number where it belongs, undefined ones blank, errors to size."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.image import imread

import curvature_sample as sample
from rmcore.core.errors import DataError
from rmcore.reporting.figures.density import density_figure
from rmcore.reporting.figures.gauss_newton import hessian_and_gauss_newton_figure
from rmcore.reporting.figures.layers import heatmap_cells, layers_figure, short_names
from rmcore.reporting.figures.style import DPI, save


def title_of(figure) -> str:
    return figure.get_suptitle().replace("\n", " ").replace("\u00a0", " ")


def texts(figure) -> str:
    return " ".join(text.get_text() for ax in figure.axes for text in ax.texts).replace("\n", " ")


def line(ax, label):
    return next(held for held in ax.lines if held.get_label().startswith(label))


def segments(ax) -> list:
    """Of all whiskers: ((x, y), (x, y))."""
    return [piece.tolist() for held in ax.collections if hasattr(held, "get_segments") for piece in held.get_segments()]


def tensor(block, kind, trace, error=0.0, num=4):
    held = {"name": f"{block}.{kind}", "block": block, "kind": kind, "num_parameters": num}
    return held | {"trace": trace, "trace_standard_error": error}


def block(name, lambda_max=2.0, lambda_min=-1.0):
    ends = {"lambda_max": lambda_max, "lambda_max_residual": 0.25, "lambda_min": lambda_min, "lambda_min_residual": 0.5}
    return {"name": name, "num_parameters": 4, "trace": 1.0, "trace_standard_error": 0.1} | ends


def layer_record(tensors, blocks):
    return {"blocks": blocks, "tensors": tensors, "num_pairs": 8, "num_parameters": 4 * len(tensors), "reasons": {}}


@pytest.mark.slow
def test_files_are_pngs_of_the_expected_size(tmp_path):
    spectrum, gauss_newton = sample.spectrum(), sample.gauss_newton()
    written = save(hessian_and_gauss_newton_figure(spectrum, gauss_newton), tmp_path / "deep" / "a.png")
    assert imread(written).shape[:2] == pytest.approx((4.6 * DPI, 10.0 * DPI), abs=1)
    assert imread(save(density_figure(sample.density()), tmp_path / "b.png")).min() < 0.5
    few = layer_record([], [block("a.0")])
    heights = [imread(save(layers_figure(record), tmp_path / "c.png")).shape[0] for record in (few, sample.layers())]
    assert heights[0] < heights[1]  # a row more, a strip more


@pytest.mark.slow
def test_density_draws_mean_band_and_ends_and_says_the_share(draw):
    record = sample.density()
    figure = draw(density_figure(record))
    ax = figure.axes[0]
    seen = np.array(record["density"]) > ax.get_ylim()[0]
    assert line(ax, "mean").get_xdata() == pytest.approx(record["grid"])
    assert line(ax, "mean").get_ydata()[seen] == pytest.approx(np.array(record["density"])[seen])
    outline = np.concatenate([path.vertices for held in ax.collections for path in held.get_paths()])
    top = int(np.argmax(record["density"]))
    for sign in (-1, 1):
        edge = record["density"][top] + sign * record["standard_error"][top]
        assert np.isclose(outline, [record["grid"][top], edge]).all(axis=1).any()
    assert {0.0, record["lambda_low"], record["lambda_high"]} <= {float(held.get_xdata()[0]) for held in ax.lines[1:]}
    assert title_of(figure) == "18.3 % of the curvature is negative (± 2.1 %, one standard error)"
    assert ax.get_yscale() == "log"
    assert "λmin −0.400" in texts(figure)
    assert "λmax 12.30" in texts(figure)


@pytest.mark.slow
@settings(max_examples=40)
@given(st.integers(2, 10**11), st.floats(1e-6, 1e3))
def test_a_single_eigenvalue_of_any_number_stands_out_of_the_axis(size, width):
    """The axis must reach down to one eigenvalue of N, and no further than a tenth of it."""
    grid = np.linspace(-6 * width, 30 * width, 145)
    bells = [np.exp(-0.5 * ((grid - at) / width) ** 2) / (width * np.sqrt(2 * np.pi)) for at in (0.0, 24 * width)]
    height = ((size - 1) * bells[0] + bells[1]) / size
    record = sample.density() | {"grid": grid, "density": height, "standard_error": 0 * grid, "width": width}
    record |= {"num_parameters": size, "lambda_low": 0.0, "lambda_high": 24 * width}
    low, high = density_figure(record).axes[0].get_ylim()
    peak = height[np.argmin(np.abs(grid - 24 * width))]
    assert low == pytest.approx(peak / 10, rel=1e-6)
    assert height.max() < high


def test_density_that_is_undefined_or_broken(draw):
    nothing = dict.fromkeys(("grid", "density", "standard_error", "width", "negative_mass"))
    record = sample.density() | nothing | {"reasons": {"grid": "all eigenvalues are 0"}}
    figure = draw(density_figure(record))
    assert "all eigenvalues are 0" in texts(figure)
    assert "spread" in title_of(figure)
    with pytest.raises(DataError, match="2 heights and 3 errors for 3 eigenvalues"):
        density_figure(sample.density() | {"grid": [0, 1, 2], "density": [1, 2], "standard_error": [0, 0, 0]})
    with pytest.raises(DataError, match="1 of 600 values of density"):
        density_figure(sample.density() | {"density": [float("nan"), *sample.density()["density"][1:]]})


def test_cells_hold_the_trace_of_every_tensor_once():
    record = sample.layers()
    cells = heatmap_cells(record)
    assert cells.blocks == [held["name"] for held in record["blocks"]]
    assert cells.kinds[:-1] == list(sample.KINDS)
    row = cells.blocks.index("bert.encoder.layer.3")
    for column, kind in enumerate(sample.KINDS):
        held = next(t for t in record["tensors"] if t["name"] == f"bert.encoder.layer.3.{kind}")
        assert cells.values[row, column] == pytest.approx(held["trace"] / held["num_parameters"])
        assert cells.unsure[row, column] == (abs(held["trace"]) < 2 * held["trace_standard_error"])
    own = [held for held in record["tensors"] if held["block"] == "embeddings"]
    assert cells.values[0, -1] == pytest.approx(
        sum(held["trace"] for held in own) / sum(held["num_parameters"] for held in own)
    )
    assert np.isnan(cells.values[0, :-1]).all()
    assert np.isnan(cells.values[1:-1, -1]).all()


@given(st.permutations(range(len(sample.layers()["tensors"]))))
def test_cells_do_not_depend_on_the_order_of_the_tensors(order):
    record = sample.layers()
    straight = heatmap_cells(record)
    mixed = heatmap_cells(record | {"tensors": [record["tensors"][index] for index in order]})
    place = [mixed.kinds.index(kind) for kind in straight.kinds]
    assert np.allclose(mixed.values[:, place], straight.values, equal_nan=True)


def test_unknown_traces_are_blank_and_unrepeated_tensors_keep_columns(draw):
    tensors = [tensor("a.0", "w", None), tensor("a.1", "w", -8.0, 5.0), tensor("a.1", "b", 2.0, 0.5)]
    record = layer_record(tensors, [block("a.0"), block("a.1")])
    cells = heatmap_cells(record)
    assert np.isnan(cells.values[0]).all()
    assert cells.values[1].tolist() == [-2.0, 0.5]
    assert cells.unsure[1].tolist() == [True, False]
    draw(layers_figure(record))
    single = layer_record([tensor("head", "w", 1.0), tensor("head", "b", 3.0)], [block("head")])
    assert heatmap_cells(single).kinds == ["w", "b"]


def test_colours_are_symmetric_about_a_zero_that_has_its_own():
    image = layers_figure(sample.layers()).axes[0].images[0]
    low, high = image.get_clim()
    assert low == -high
    values = np.linspace(0, high, 20)
    assert np.allclose(image.norm(values) + image.norm(-values), 1.0)
    zero, plus, minus = (np.array(image.cmap(float(image.norm(value)))) for value in (0.0, high, low))
    assert np.ptp(zero[:3]) < 0.02  # grey
    assert plus[2] > plus[0]  # blue
    assert minus[0] > minus[2]  # orange


def test_extremes_of_blocks_have_their_residuals_and_unknown_ones_are_left_out(draw):
    record = layer_record([tensor("a.0", "w", 1.0)], [block("a.0"), block("a.1", None, None), block("a.2", 5.0, -3.0)])
    figure = draw(layers_figure(record))
    ax = figure.axes[1]
    assert line(ax, "λmax").get_xdata().tolist() == [2.0, 5.0]
    assert line(ax, "λmax").get_ydata().tolist() == [0, 2]
    assert line(ax, "λmin").get_xdata().tolist() == [-1.0, -3.0]
    lengths = sorted(end[0] - start[0] for start, end in segments(ax))
    assert lengths == pytest.approx([0.5, 0.5, 1.0, 1.0])
    assert title_of(figure) == "The sharpest block is a.2 (λmax 5.000)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tensors", "blocks", "words"),
    [
        ([], [], "no block was measured"),
        ([tensor("a", "w", 0.0)], [block("a", 0.0, 0.0)], "all are zero"),
        ([tensor("a", "w", 1e-12)], [block("a", 1e9, -1e-9)], ""),
        ([tensor("a", "w", None)], [block("a", None, None)], "no extreme was measured"),
    ],
    ids=["nothing", "zero", "wide", "unknown"],
)
def test_odd_layers(tensors, blocks, words, draw):
    assert words in texts(draw(layers_figure(layer_record(tensors, blocks))))


@given(st.lists(st.from_regex(r"[a-c]{1,2}(\.[a-c0-2]){0,4}", fullmatch=True), max_size=9, unique=True))
def test_short_names_never_make_two_blocks_alike(names):
    short = short_names(names)
    assert len(set(short)) == len(names)
    assert all(name.endswith(cut) for name, cut in zip(names, short, strict=True))


@pytest.mark.slow
def test_both_spectra_share_axes_and_keep_every_eigenvalue(draw):
    spectrum, gauss_newton = sample.spectrum(), sample.gauss_newton()
    figure = draw(hessian_and_gauss_newton_figure(spectrum, gauss_newton))
    left, right = figure.axes
    assert left.get_ylim() == right.get_ylim()
    assert left.get_xlim() == right.get_xlim()
    assert (left.get_xscale(), left.get_yscale(), right.get_yscale()) == ("log", "log", "log")
    up, down = line(left, "Hessian, λ > 0"), line(left, "Hessian, λ < 0")
    assert up.get_ydata().tolist() == spectrum["eigenvalues"][:5]
    assert down.get_ydata().tolist() == [0.4, 0.3, 0.2, 0.1, 0.02]
    assert line(right, "Gauss").get_ydata().tolist() == gauss_newton["eigenvalues"]
    assert list(line(right, "Gauss").get_xdata()) == list(range(1, len(gauss_newton["eigenvalues"]) + 1))
    low, high = left.get_ylim()
    for values in (up.get_ydata(), down.get_ydata(), line(right, "Gauss").get_ydata()):
        assert low < min(values) <= max(values) < high
    assert "12.30 of the Hessian, 10.90 of the Gauss–Newton matrix" in title_of(figure)
    assert "λmin −0.400" in title_of(figure)


@pytest.mark.slow
def test_each_matrix_has_errors_of_its_own_kind(draw):
    spectrum, gauss_newton = sample.spectrum(), sample.gauss_newton()
    left, right = draw(hessian_and_gauss_newton_figure(spectrum, gauss_newton)).axes
    reach = sorted((end[1] - start[1]) / 2 for start, end in segments(left))
    assert reach == pytest.approx(sorted(spectrum["residuals"]))
    (start, end), *more = segments(right)
    assert not more
    assert (start[1], end[1]) == pytest.approx((gauss_newton["lambda_max_ci_low"], gauss_newton["lambda_max_ci_high"]))
    unknown = gauss_newton | {"lambda_max_ci_low": None, "lambda_max_ci_high": None}
    left, right = hessian_and_gauss_newton_figure(spectrum | {"residuals": None}, unknown).axes
    assert not segments(left)
    assert not segments(right)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hessian", "curved"),
    [([0.0], [0.0]), ([], [3.0]), ([1.0], []), ([5.0, -1e-30], [1e-20, 0.0]), ([-2.0, -3.0], [4.0])],
    ids=["zero", "no Hessian value", "no Gauss-Newton value", "tiny", "all negative"],
)
def test_odd_spectra(hessian, curved, draw):
    spectrum = sample.spectrum() | {"eigenvalues": hessian, "residuals": [0.0] * len(hessian)}
    figure = draw(hessian_and_gauss_newton_figure(spectrum, sample.gauss_newton() | {"eigenvalues": curved}))
    assert ("flat" in texts(figure)) == (not any(hessian) and not any(curved))


def test_spectra_that_cannot_be_drawn_are_refused():
    with pytest.raises(DataError, match="10 eigenvalues but 1 residuals"):
        hessian_and_gauss_newton_figure(sample.spectrum() | {"residuals": [0.1]}, sample.gauss_newton())
    broken = sample.gauss_newton() | {"eigenvalues": [float("inf"), 1.0]}
    with pytest.raises(DataError, match="1 of 2 eigenvalues of the Gauss-Newton matrix are not finite"):
        hessian_and_gauss_newton_figure(sample.spectrum(), broken)
