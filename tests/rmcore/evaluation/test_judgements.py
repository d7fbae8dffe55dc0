"""Measurements of judgements against scikit-learn and numpy, and the coverage of their intervals."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn.metrics import cohen_kappa_score, ndcg_score, roc_auc_score

from rmcore.evaluation.judgements import (
    Choices,
    GradesOf,
    discounted_gain,
    measure_choices,
    measure_grades,
    top_is_best,
)

HOW = {"num_resamples": 200, "seed": 0}


def graded(rng: np.random.Generator, num_prompts: int, num_levels: int, effect: float = 0.0) -> GradesOf:
    """Three grades a prompt, which share an offset: `said` goes with the level, and both with the prompt."""
    prompts = np.repeat(np.arange(num_prompts), 3)
    quality = rng.normal(size=len(prompts)) + effect * rng.normal(size=num_prompts)[prompts]
    said = quality + rng.normal(size=len(prompts))
    if num_levels:
        edges = stats.norm.ppf(np.arange(1, num_levels) / num_levels)
        codes = np.searchsorted(edges, quality).astype(float)
        predicted = np.searchsorted(edges, said).astype(float)
    else:
        codes, predicted = quality, np.full(len(prompts), np.nan)
    ones = np.ones(len(prompts))
    return GradesOf(prompts, ones, 2 * ones, said, codes, predicted, num_levels)


def measured(levels: int, **changes):
    grades = graded(np.random.default_rng(levels), 60, levels)
    grades = GradesOf(**{**vars(grades), **{name: change(getattr(grades, name)) for name, change in changes.items()}})
    return grades, measure_grades(grades, num_prompts=60, **HOW)


@pytest.mark.parametrize("change", [np.array, np.round])  # with equal values, too
def test_measures_are_those_of_scikit_learn_and_numpy(change) -> None:
    grades, found = measured(2, said=change)
    assert found["auc"].value == pytest.approx(roc_auc_score(grades.codes, grades.said))
    assert found["nats_gained"].value == pytest.approx(1)
    grades, found = measured(4, said=change)
    expected = cohen_kappa_score(grades.codes, grades.predicted, weights="quadratic")
    assert found["kappa"].value == pytest.approx(expected)
    grades, found = measured(0, said=change)
    assert found["correlation"].value == pytest.approx(np.corrcoef(grades.said, grades.codes)[0, 1])
    _, moved = measured(0, said=lambda said: change(said) + 1e5, codes=lambda codes: codes - 1e5)
    before, after = ((one.value, one.ci_low, one.ci_high) for one in (found["correlation"], moved["correlation"]))
    assert after == pytest.approx(before)


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), min_size=2, max_size=8))
def test_ndcg_is_that_of_scikit_learn_with_equal_ranks_and_rewards(answers: list[tuple[int, int]]) -> None:
    ranks, rewards = zip(*answers, strict=True)
    found = discounted_gain(ranks, rewards)
    if min(ranks) == max(ranks):
        assert np.isnan(found)
    else:
        gains = [[max(ranks) - rank for rank in ranks]]
        assert found == pytest.approx(ndcg_score(gains, [rewards]))


def test_grades_of_one_level_have_no_auc() -> None:
    _, found = measured(2, codes=np.ones_like)
    assert (found["auc"].value, found["auc"].ci_low) == (None, None)
    assert "undefined" in found["auc"].reason


@pytest.mark.slow
@given(st.floats(-1e6, 1e6), st.integers(2, 40), st.sampled_from([0.0, 1e-16, 1e-9]))
@settings(max_examples=40)
def test_a_constant_prediction_has_no_correlation_whatever_its_rounding(said: float, number: int, error: float) -> None:
    rng = np.random.default_rng(number)
    grades = rng.normal(size=2 * number)
    ones, nan = np.ones(2 * number), np.full(2 * number, np.nan)
    same = said * (1 + error * rng.choice([-1, 1], size=2 * number))
    for x, y in ((same, grades), (grades, same)):
        of = GradesOf(np.arange(2 * number) // 2, ones, ones, x, y, nan, 0)
        found = measure_grades(of, num_prompts=number, num_resamples=20, seed=0)["correlation"]
        assert (found.value, found.ci_low) == (None, None)
        assert "undefined" in found.reason


@pytest.mark.slow
@pytest.mark.parametrize(("levels", "name"), [(2, "auc"), (4, "kappa"), (0, "correlation")])
def test_intervals_cover_the_truth_in_spite_of_prompts_that_share_an_offset(levels: int, name: str) -> None:
    rng = np.random.default_rng(4)
    truth = measure_grades(graded(rng, 30_000, levels, 1.0), num_prompts=30_000, num_resamples=1, seed=0)[name].value
    hits = 0
    for trial in range(300):
        found = measure_grades(graded(rng, 40, levels, 1.0), num_prompts=40, num_resamples=200, seed=trial)[name]
        hits += found.ci_low <= truth <= found.ci_high
    # 95 % of 300 within four standard errors below; too wide is no error of a kind that misleads.
    assert hits >= 300 * 0.95 - 4 * np.sqrt(300 * 0.95 * 0.05)


def test_of_equal_rewards_each_counts() -> None:
    assert top_is_best((1, 1, 2), (5.0, 4.0, 3.0)) == 1
    assert top_is_best((2, 1, 3), (5.0, 5.0, 3.0)) == 0.5


def test_choices_are_measured_by_kind_and_ties_by_their_probability() -> None:
    rng = np.random.default_rng(5)
    number = 4000
    chance = rng.uniform(0.1, 0.6, number)
    is_tie = rng.random(number) < chance
    nan = np.full(number, np.nan)
    kinds = ["tie" if tie else "pair" for tie in is_tie]
    nats = np.where(is_tie, -np.log(chance), -np.log((1 - chance) / 2))
    choices = Choices(
        np.arange(number) // 2, kinds, nats, np.full(number, np.log(3)), np.ones(number), nan, chance, is_tie
    )
    found = measure_choices(choices, num_prompts=number // 2, **HOW)
    assert found["nats[tie]"].value == pytest.approx(nats[is_tie].mean())
    assert found["nats_gained"].value == pytest.approx(np.log(3) - nats.mean())
    assert found["tie_share"].ci_low <= found["tie_probability"].value <= found["tie_share"].ci_high
    assert found["tie_ece"].value < 0.02
    assert found["tie_ece"].ci_low == 0
    assert "ndcg" not in found
    wrong = Choices(**{**vars(choices), "tie_probability": 0.5 * chance})
    assert measure_choices(wrong, num_prompts=number // 2, **HOW)["tie_ece"].ci_low > 0.1


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "num_prompts"), [(1.0, 100), (1.0, 20), (0.6, 20)])
def test_the_calibration_error_of_ties_covers_the_truth_where_it_is_0_too(factor: float, num_prompts: int) -> None:
    """Two choices a prompt, which tie together half of the time; a resampled plug-in has 0 outside in every case."""
    rng = np.random.default_rng(7)
    covered, of_zero, repeats = 0, 0, 200
    for _ in range(repeats):
        chance = np.repeat(rng.uniform(0.05, 0.4, num_prompts), 2)
        luck = rng.random((num_prompts, 2))
        luck[:, 1] = np.where(rng.random(num_prompts) < 0.5, luck[:, 0], luck[:, 1])
        nan, size = np.full(2 * num_prompts, np.nan), 2 * num_prompts
        choices = Choices(
            np.arange(size) // 2, ["pair"] * size, nan, nan, nan, nan, factor * chance, luck.ravel() < chance
        )
        found = measure_choices(choices, num_prompts=num_prompts, num_resamples=1, seed=0)["tie_ece"]
        # Ties are likelier than said in every bin, so the error is the mean gap, whatever the bins.
        covered += found.ci_low <= (1 - factor) * chance.mean() <= found.ci_high
        of_zero += found.ci_low == 0
    assert covered / repeats >= 0.95 - 3 * np.sqrt(0.95 * 0.05 / repeats)
    assert factor < 1 or of_zero / repeats >= 0.95
