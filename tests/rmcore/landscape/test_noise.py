"""Errors over prompts: equal to what drawing other prompts really does, and the effect of bf16."""

import math

import numpy as np
import pytest
import torch

from rmcore.core.errors import ConfigError
from rmcore.data.rendering import TokenizedPair, TokenizedSide
from rmcore.landscape.analyzer import hessian_spectrum
from rmcore.landscape.noise import MAX_GROUPS, curvature_noise
from rmcore.landscape.operators import LossHessian
from rmcore.landscape.sample import CurvatureSample


def draw_sample(num_prompts, pairs_a_prompt=1, seed=0):
    rng = np.random.default_rng(seed)

    def side():
        return TokenizedSide(rng.integers(1, 8, int(rng.integers(2, 7))).tolist(), 0)

    num = num_prompts * pairs_a_prompt
    pairs = [TokenizedPair(f"p{index}", side(), side()) for index in range(num)]
    return CurvatureSample(pairs, [f"prompt {index % num_prompts}" for index in range(num)], 0)


def ends_of(model, sample):
    return hessian_spectrum(LossHessian(model, sample.batches), num_steps=63, trace_probes=2)[:2]


@pytest.mark.slow
def test_values_are_those_of_the_whole_sample(tiny):
    sample = draw_sample(7, 2)
    spectrum, ends = ends_of(tiny, sample)
    noise = curvature_noise(tiny, sample, ends, num_probes=300).to_dict()
    assert noise["lambda_max"]["value"] == pytest.approx(spectrum.lambda_max, rel=1e-9)
    assert noise["lambda_min"]["value"] == pytest.approx(spectrum.lambda_min, rel=1e-9)
    full = hessian_spectrum(LossHessian(tiny, sample.batches), "full").record.trace_estimate
    probe_error = hessian_spectrum(LossHessian(tiny, sample.batches), trace_probes=300).record.trace_standard_error
    assert abs(noise["trace"]["value"] - full) < 4 * probe_error
    assert (noise["num_pairs"], noise["num_prompts"], noise["num_groups"]) == (14, 7, 7)


@pytest.mark.slow
def test_the_error_is_the_spread_over_samples_of_prompts(tiny):
    """Fixed directions, so that nothing but the draw of the prompts moves the forms."""
    _, ends = ends_of(tiny, draw_sample(40, seed=99))
    runs = [curvature_noise(tiny, draw_sample(6, seed=s), ends, num_probes=2).quantities for s in range(200)]
    for name in ("lambda_max", "lambda_min"):
        values = np.array([run[name]["value"] for run in runs])
        errors = np.array([run[name]["standard_error"] for run in runs])
        spread = values.std(ddof=1)  # itself known to 5 %
        assert math.sqrt((errors**2).mean()) == pytest.approx(spread, rel=0.2)


def test_a_prompt_repeated_is_no_more_evidence(tiny):
    once, thrice = draw_sample(6), draw_sample(6)
    thrice = CurvatureSample([*once.pairs] * 3, [*once.prompts] * 3, 0)
    _, ends = ends_of(tiny, once)
    single = curvature_noise(tiny, once, ends, num_probes=2).quantities["lambda_max"]
    triple = curvature_noise(tiny, thrice, ends, num_probes=2).quantities["lambda_max"]
    assert triple["standard_error"] == pytest.approx(single["standard_error"], rel=1e-9)
    assert triple["pairs_for_10_percent"] == pytest.approx(3 * single["pairs_for_10_percent"], rel=1e-9)


def test_prompts_beyond_the_groups_share_one(tiny):
    sample = draw_sample(MAX_GROUPS + 5)
    _, ends = ends_of(tiny, sample)
    calls = []
    noise = curvature_noise(tiny, sample, ends, num_probes=2, report=lambda *at: calls.append(at[:2]))
    assert noise.num_groups == MAX_GROUPS
    assert calls == [(number, MAX_GROUPS) for number in range(1, MAX_GROUPS + 1)]


def test_one_prompt_gives_no_error_and_a_reason(tiny):
    sample = draw_sample(1, 4)
    _, ends = ends_of(tiny, sample)
    noise = curvature_noise(tiny, sample, ends, num_probes=2)
    assert noise.quantities == {}
    assert set(noise.reasons) == {"lambda_max", "lambda_min", "trace"}


def test_bf16_errs_by_what_its_digits_allow(world):
    torch.manual_seed(3)
    model = world.TinyReward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.5)
    sample = draw_sample(12)
    spectrum, ends = ends_of(model, sample)
    noise = curvature_noise(model, sample, ends, num_probes=2)
    assert 2**-12 < noise.bf16_relative_error < 0.1  # bf16 rounds at 2^-9
    assert noise.bf16_lambda_max == pytest.approx(spectrum.lambda_max, rel=3 * noise.bf16_relative_error)


def test_vectors_of_other_parameters_are_refused(tiny):
    sample = draw_sample(3)
    _, ends = ends_of(tiny, sample)
    with pytest.raises(ConfigError, match="both ends"):
        curvature_noise(tiny, sample, ends, num_probes=2, parameters="head")
