"""All parts as one record: each alone as together, comparable between models, and whole as figures and numbers."""

import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from rmcore.config.landscape import LandscapeConfig
from rmcore.core.errors import ConfigError
from rmcore.data.rendering import TokenizedPair, TokenizedSide
from rmcore.landscape import measure as module
from rmcore.landscape.budget import TimeBudget
from rmcore.landscape.measure import PARTS, measure_curvature
from rmcore.landscape.sample import CurvatureSample
from rmcore.reporting.html.curvature import view
from rmcore.stages.landscape import write_curvature

SMALL = LandscapeConfig(
    num_pairs=8,
    minutes=60.0,
    lanczos_steps=63,
    trace_probes=2,
    layer_steps=20,
    density_vectors=2,
    slice_points=5,
    surface_points=3,
)


@pytest.fixture(scope="module")
def sample():
    rng = np.random.default_rng(0)

    def side():
        return TokenizedSide(rng.integers(1, 8, int(rng.integers(2, 7))).tolist(), 0)

    pairs = [TokenizedPair(f"p{index}", side(), side()) for index in range(8)]
    return CurvatureSample(pairs, [f"prompt {index % 5}" for index in range(8)], 0)


def measure(model, sample, *parts, **settings):
    config = SMALL.model_copy(update={"parts": parts, **settings})
    return measure_curvature(model, sample, config, seed=1, report=lambda *at: None)


@pytest.mark.slow
def test_every_part_is_measured_and_none_changes_another(tiny, sample):
    together = measure(tiny, sample, *PARTS)
    assert set(together) == {"spectrum", *PARTS}
    assert json.loads(json.dumps(together, allow_nan=False))
    for part in PARTS:
        alone = measure(tiny, sample, part)
        assert set(alone) == {"spectrum", part}
        assert alone["spectrum"] == together["spectrum"]
        assert json.dumps(alone[part]) == json.dumps(together[part]), part


@pytest.mark.slow
def test_a_budget_that_suffices_changes_nothing(tiny, sample):
    assert measure(tiny, sample, *PARTS, minutes=60.0) == measure(tiny, sample, *PARTS, minutes=1e9)


def test_the_fewer_pairs_are_held_to_the_budget_too(tiny, sample, monkeypatch):
    """A clock that ticks with each report: fewer pairs are no faster, so four of the eight are too slow as well."""
    limits = []

    def budget(minutes):
        limits.append(minutes)
        return TimeBudget(1.2, clock=itertools.count().__next__)

    monkeypatch.setattr(module, "TimeBudget", budget)
    record = measure(tiny, sample, "normalized", minutes=None)
    assert limits == [1.0]  # on a CPU
    assert record["spectrum"]["num_pairs"] == 2


def test_without_time_two_pairs_and_the_ends_are_left_and_the_rest_is_said(tiny, sample):
    record = measure(tiny, sample, *PARTS, minutes=1e-9)
    assert record["spectrum"]["num_pairs"] == 2
    assert "2 of the 8 pairs were taken" in record["left_out"][0]
    named = {sentence.split()[1]: sentence for sentence in record["left_out"][1:]}
    for part in PARTS:
        assert (part in record) != (part in named)  # one that ends with its first report is there
        assert part in record or "was left out: it would have taken about" in named[part]
    assert {"density", "layers", "slices", "normalized"} <= named.keys()
    assert {f"{sentence}." for sentence in record["left_out"]} <= set(view(record)["measured"])
    alone = measure(tiny, sample.some(2, 1))
    assert record["spectrum"] == alone["spectrum"]


@pytest.mark.slow
def test_the_parts_agree_where_they_measure_the_same(tiny, sample):
    record = measure(tiny, sample, *PARTS)
    top = record["spectrum"]["lambda_max"]
    assert record["noise"]["lambda_max"]["value"] == pytest.approx(top, rel=1e-9)
    trace = record["spectrum"]["trace_estimate"]  # the same probes everywhere
    assert record["noise"]["trace"]["value"] == pytest.approx(trace, rel=1e-9)
    assert sum(block["trace"] for block in record["layers"]["blocks"]) == pytest.approx(trace, rel=1e-9)
    assert record["density"]["lambda_high"] == pytest.approx(top, rel=1e-6)
    assert max(block["lambda_max"] for block in record["layers"]["blocks"]) <= top * (1 + 1e-9)  # Cauchy's interlacing
    along = record["slices"]["lines"][0]
    assert along["curvature"] == top
    middle = len(along["distances"]) // 2
    assert along["loss"][middle] == pytest.approx(along["loss_at_model"], rel=1e-12)


class Scaled(nn.Module):
    """A model whose rewards are multiplied by a constant."""

    def __init__(self, inner, factor):
        super().__init__()
        self.inner, self.factor = inner, factor

    def forward(self, **rows):
        return SimpleNamespace(logits=self.inner(**rows).logits * self.factor)


@pytest.mark.slow
@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_at_margins_of_size_1_the_scale_of_the_rewards_does_not_matter(tiny, sample, factor):
    plain, scaled = (measure(model, sample, "normalized") for model in (tiny, Scaled(tiny, factor)))
    assert scaled["spectrum"]["lambda_max"] != pytest.approx(plain["spectrum"]["lambda_max"], rel=0.1)
    assert scaled["normalized"]["temperature"] == pytest.approx(factor * plain["normalized"]["temperature"], rel=1e-9)
    for end in ("lambda_max", "lambda_min"):
        assert scaled["normalized"][end] == pytest.approx(plain["normalized"][end], rel=1e-6)


def test_margins_of_zero_have_no_size_and_a_reason(tiny, sample):
    with torch.no_grad():
        tiny.score.weight.zero_()
    record = measure(tiny, sample, "normalized")["normalized"]
    assert "lambda_max" not in record
    assert "margin" in record["reasons"]["lambda_max"]


def test_another_checkpoint_needs_slices(tiny, sample):
    config = SMALL.model_copy(update={"parts": ()})
    with pytest.raises(ConfigError, match="add slices"):
        measure_curvature(tiny, sample, config, seed=0, report=lambda *at: None, other=tiny)


@pytest.mark.slow
def test_the_artifact_holds_the_record_its_numbers_and_its_figures(tiny, sample, tmp_path):
    record = measure(tiny, sample, *PARTS)
    write_curvature(record, tmp_path)
    assert json.loads((tmp_path / "curvature.json").read_text()) == json.loads(json.dumps(record))
    figures = {path.stem for path in (tmp_path / "figures").glob("*.png")}
    assert figures == {"eigenvalues", "hessian_and_gauss_newton", "density", "layers", "slices", "surface"}
    metrics = json.loads((tmp_path / "summary.json").read_text())["metrics"]
    assert metrics["hessian/test_lambda_max_normalized"] == record["normalized"]["lambda_max"]
    curved = metrics["hessian/test_gauss_newton_lambda_max"]
    assert curved["ci_low"] <= curved["value"] <= curved["ci_high"]
    assert all(name.count("/") == 1 for name in metrics)
