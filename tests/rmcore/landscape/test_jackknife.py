"""Errors of the Gauss-Newton spectrum: those of deleting whole prompts."""

import numpy as np
import pytest
import torch
from scipy import stats

from rmcore.landscape.gram import gauss_newton_spectrum, jackknife

PROMPTS = list("aabbccdde")  # of the 9 pairs of `rows`
STATISTICS = ("lambda_max", "trace", "effective_rank")


def test_errors_are_those_of_deleting_prompts_one_by_one(tiny, rows, world):
    spectrum = gauss_newton_spectrum(tiny, [rows], prompts=PROMPTS)
    pairs = world.cut_rows(rows, [1] * 9)
    without = []
    for deleted in "abcde":
        kept = [pair for pair, prompt in zip(pairs, PROMPTS, strict=True) if prompt != deleted]
        without.append(gauss_newton_spectrum(tiny, kept, prompts=["any"] * len(kept)))
    assert (spectrum.num_prompts, spectrum.num_groups) == (5, 5)
    for name in STATISTICS:
        replicates = np.array([getattr(other, name) for other in without])
        error = np.sqrt(4 / 5 * ((replicates - replicates.mean()) ** 2).sum())
        half = stats.t.ppf(0.975, 4) * error
        value = getattr(spectrum, name)
        assert getattr(spectrum, f"{name}_standard_error") == pytest.approx(error, rel=1e-9)
        assert getattr(spectrum, f"{name}_ci_low") == pytest.approx(value - half, rel=1e-9)
        assert getattr(spectrum, f"{name}_ci_high") == pytest.approx(value + half, rel=1e-9)


def test_at_most_fifty_groups_are_deleted(tiny, world):
    rows = world.draw_rows(120)
    spectrum = gauss_newton_spectrum(tiny, [rows], prompts=[str(number) for number in range(120)])
    assert (spectrum.num_prompts, spectrum.num_groups) == (120, 50)
    assert spectrum == gauss_newton_spectrum(tiny, [rows], prompts=[str(number) for number in range(120)])


@pytest.mark.slow
def test_intervals_cover_where_whole_prompts_are_deleted_and_not_where_pairs_are():
    """Pairs of a prompt share the size of their gradients: the trace has the error of 20 draws, not of 60."""
    rng = np.random.default_rng(0)
    prompts = [list(range(3 * number, 3 * number + 3)) for number in range(20)]
    pairs = [[number] for number in range(60)]
    num_trials, covered = 100, {"prompts": 0, "pairs": 0}
    for _ in range(num_trials):
        sizes = rng.uniform(0.5, 1.5, 20).repeat(3)
        gradients = torch.as_tensor(rng.normal(size=(60, 40)) * np.sqrt(sizes)[:, None])
        matrix = gradients @ gradients.T / 60  # expected trace: 40
        for name, groups in (("prompts", prompts), ("pairs", pairs)):
            found, _ = jackknife(matrix, groups)
            covered[name] += found["trace_ci_low"] <= 40 <= found["trace_ci_high"]
    assert stats.binomtest(covered["prompts"], num_trials, 0.95).pvalue > 0.001
    assert stats.binomtest(covered["pairs"], num_trials, 0.95).pvalue < 0.001


def test_one_prompt_has_no_error(tiny, rows):
    spectrum = gauss_newton_spectrum(tiny, [rows], prompts=["same"] * 9)
    assert (spectrum.num_prompts, spectrum.num_groups) == (1, 1)
    for name in STATISTICS:
        assert getattr(spectrum, name) > 0
        for suffix in ("standard_error", "ci_low", "ci_high"):
            assert getattr(spectrum, f"{name}_{suffix}") is None
            assert "one prompt" in spectrum.reasons[f"{name}_{suffix}"]


def test_a_saturated_model_has_no_effective_rank(tiny, rows):
    with torch.no_grad():
        tiny.score.weight.mul_(1e6)
    spectrum = gauss_newton_spectrum(tiny, [rows], prompts=PROMPTS)
    assert spectrum.lambda_max == spectrum.trace == 0.0
    assert spectrum.effective_rank is None
    assert "saturated" in spectrum.reasons["effective_rank"]
    assert "saturated" in spectrum.reasons["effective_rank_ci_low"]
