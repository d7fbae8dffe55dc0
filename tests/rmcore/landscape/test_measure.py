"""The record of a curvature: its error over prompts, comparable between models, and whole as numbers and a figure."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from rmcore.data.rendering import TokenizedPair, TokenizedSide
from rmcore.landscape.analyzer import HessianAnalyzer
from rmcore.landscape.measure import (
    CURVATURE_TOKEN_BUDGET,
    CurvatureSample,
    error_over_prompts,
    group_prompts,
    measure_curvature,
    random_order,
)
from rmcore.landscape.operators import LossHessian
from rmcore.landscape.settings import LandscapeConfig

SMALL = LandscapeConfig(num_pairs=8, lanczos_steps=63, trace_probes=2)


def draw(num_pairs, num_prompts, seed=0):
    rng = np.random.default_rng(seed)

    def side():
        return TokenizedSide(rng.integers(1, 8, int(rng.integers(2, 7))).tolist(), 0)

    pairs = [TokenizedPair(f"p{index}", side(), side()) for index in range(num_pairs)]
    return CurvatureSample(pairs, [f"prompt {index % num_prompts}" for index in range(num_pairs)], 0)


@pytest.fixture(scope="module")
def sample():
    return draw(8, 5)


def measure(model, sample, **settings):
    return measure_curvature(model, sample, SMALL.model_copy(update=settings), seed=1, report=lambda *at: None)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lanczos", "power_iteration"])
def test_the_record_is_the_analyzers_and_whole_as_json(tiny, sample, method):
    record = measure(tiny, sample, method=method, normalized=True)
    alone = HessianAnalyzer(tiny).compute_spectrum(
        sample.batches, method, SMALL.top_k, num_steps=63, trace_probes=2, seed=1
    )
    extra = {"over_prompts", "normalized"}
    assert {name: value for name, value in record.items() if name not in extra} == alone.to_dict()
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    over = record["over_prompts"]
    assert (over["standard_error"] is None) == (record["lambda_max"] is None) == bool(over["reasons"])


@pytest.mark.slow
def test_the_error_over_prompts_covers_what_other_prompts_give(tiny):
    """The form of a fixed vector over fresh samples varies as much as each sample says."""
    size = LossHessian(tiny, draw(2, 2).batches).num_parameters
    vector = torch.randn(size, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    vector /= vector.norm()
    values, errors = [], []
    for seed in range(40):
        fresh = draw(32, 16, seed)
        values.append(float(vector @ LossHessian(tiny, fresh.batches).product(vector)))
        errors.append(error_over_prompts(tiny, fresh, vector, SMALL, lambda *at: None)["standard_error"])
    assert np.sqrt(np.mean(np.square(errors))) == pytest.approx(np.std(values, ddof=1), rel=0.3)


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
    plain, scaled = (measure(model, sample, normalized=True) for model in (tiny, Scaled(tiny, factor)))
    assert scaled["lambda_max"] != pytest.approx(plain["lambda_max"], rel=0.1)
    assert scaled["normalized"]["temperature"] == pytest.approx(factor * plain["normalized"]["temperature"], rel=1e-9)
    assert scaled["normalized"]["lambda_max"] == pytest.approx(plain["normalized"]["lambda_max"], rel=1e-6)


def draw_pairs(lengths):
    rng = np.random.default_rng(0)

    def side(length):
        return TokenizedSide(rng.integers(1, 8, length).tolist(), 0)

    return [TokenizedPair(f"p{index}", side(a), side(b)) for index, (a, b) in enumerate(lengths)]


def test_every_pair_is_equally_likely():
    counts = np.bincount([position for seed in range(2000) for position in random_order(10, seed)[:3]], minlength=10)
    assert abs(counts - 600).max() < 5 * np.sqrt(600 * 0.7)  # five standard deviations


@given(st.lists(st.tuples(st.integers(1, 2000), st.integers(1, 2500)), min_size=1, max_size=10))
def test_micro_batches_hold_every_pair_once_under_the_budget_with_its_prompt(lengths):
    sample = CurvatureSample(draw_pairs(lengths), [str(length) for length in lengths], 0)
    found = [
        pair
        for rows in sample.batches
        for pair in zip(*(mask.sum(1).tolist() for mask in rows.attention_mask.chunk(2)), strict=True)
    ]
    assert sorted(found) == sorted(lengths)
    assert [str(pair) for pair in found] == [sample.prompts[index] for group in sample.order for index in group]
    longest = max(max(pair) for pair in lengths)
    assert max(rows.num_tokens for rows in sample.batches) <= max(CURVATURE_TOKEN_BUDGET, 2 * longest)


@given(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=40), st.integers(1, 10))
def test_groups_hold_every_pair_once_and_never_cut_a_prompt(prompts, most):
    groups = group_prompts(prompts, most)
    assert sorted(position for group in groups for position in group) == list(range(len(prompts)))
    assert len(groups) == min(most, len(set(prompts)))
    assert all(groups)
    held = [{prompts[position] for position in group} for group in groups]
    assert sum(map(len, held)) == len(set(prompts))
