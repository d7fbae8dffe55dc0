"""Looks spend what they may and no more, and p over looks is valid wherever one stops."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats

from rmcore.core.errors import ConfigError
from rmcore.evaluation.verdicts.estimate import SeedSample, estimate_over_seeds
from rmcore.evaluation.verdicts.intervals import Component, TInterval
from rmcore.evaluation.verdicts.judgement import Claim, Looks, chance_to_decide
from rmcore.evaluation.verdicts.sequential import information, look_levels, sequential_p

SHARES = [0.25, 0.4, 0.6, 1.0]
KNOWN = {"seeds alone": SHARES, "mostly prompts": [0.8, 0.9, 0.95, 1.0], "prompts alone": [1.0, 1.0, 1.0, 1.0]}


def p_values(known, num, seed=0):
    """(num, looks) two-sided p of a true claim: the score has independent increments in the information."""
    news = np.sqrt(np.diff([0.0, *known]))
    score = np.cumsum(np.random.default_rng(seed).normal(size=(num, len(known))) * news, axis=1)
    return 2 * special.ndtr(-np.abs(score / np.sqrt(known)))


@pytest.mark.parametrize("known", KNOWN.values(), ids=KNOWN.keys())
@pytest.mark.parametrize("alpha", [0.05, 0.01])
def test_up_to_each_look_a_true_claim_is_rejected_as_often_as_was_registered(known, alpha):
    num = 200_000
    crossed = (p_values(known, num) <= look_levels(alpha, SHARES, known)).cumsum(axis=1) > 0
    for look, share in enumerate(SHARES):
        spent = alpha * share
        # With prompts alone a look knows nothing new; the least news that is assumed makes it err on the safe side.
        assert crossed[:, look].mean() <= spent + 4 * np.sqrt(spent / num)
        if known is not KNOWN["prompts alone"]:
            assert crossed[:, look].mean() == pytest.approx(spent, abs=4 * np.sqrt(spent / num))


@pytest.mark.parametrize(
    ("looks", "prompts", "percent"),
    [
        ((5, 8, 12, 20), 0, 11.5),
        ((5, 8, 12, 20), 1, 8),
        ((5, 8, 12, 20), 5, 4),
        ((5, 8, 12, 20), 50, 0),
        ((5, 20), 0, 5),
    ],
)
def test_an_interval_after_looks_is_as_much_wider_as_the_page_says(looks, prompts, percent):
    """docs/experiments.md; `prompts` is their part of the last variance, in units of the seeds'."""
    last = looks[-1]
    level = look_levels(0.05, [now / last for now in looks], [1 / (last / now + prompts) for now in looks])[-1]
    wider = 100 * (special.ndtri(level / 2) / special.ndtri(0.025) - 1)
    assert wider == pytest.approx(percent, abs=0.5)


@given(
    st.lists(st.floats(1e-6, 1), min_size=1, max_size=4),
    st.sampled_from([KNOWN["seeds alone"], KNOWN["mostly prompts"]]),
    st.floats(0.001, 0.2),
)
@settings(max_examples=15)
def test_p_over_looks_is_below_alpha_exactly_where_a_look_rejects(p_of_looks, known, alpha):
    taken = len(p_of_looks)
    levels = look_levels(alpha, SHARES[:taken], known[:taken])
    p = sequential_p(p_of_looks, SHARES[:taken], known[:taken])
    if any(one < 0.98 * level for one, level in zip(p_of_looks, levels, strict=True)):
        assert p < alpha
    if all(one > 1.02 * level for one, level in zip(p_of_looks, levels, strict=True)):
        assert p > alpha


def test_information_falls_by_what_the_prompts_cannot_lose():
    spread = TInterval(0.1, (Component(0.04 / 5, 4), Component(0.002, 99)))
    estimate = estimate_over_seeds(
        [SeedSample(x, None) for x in (0.1, 0.2, 0.0, 0.1, 0.1)], num_prompts=None, prompts_shared=False
    )
    assert information(estimate, [5, 10, 20]) == pytest.approx([0.25, 0.5, 1.0])
    object.__setattr__(estimate, "spread", spread)
    assert information(estimate, [5, 20]) == pytest.approx([(0.002 + 0.002) / (0.008 + 0.002), 1.0])


@pytest.mark.parametrize("shares", [[0.5, 0.5], [0.5, 1.2], [0.5]])
def test_looks_out_of_order_are_refused(shares):
    with pytest.raises(ConfigError, match="each look spends more"):
        look_levels(0.05, shares, [0.5, 1.0])


@pytest.mark.parametrize("direction", ["above", "within"])
def test_the_chance_of_a_decision_is_the_share_of_experiments_that_end_in_one(direction):
    """Over experiments whose first look came out alike, by simulation: fifteen seeds more, with known variance."""
    values = stats.norm.ppf((np.arange(5) + 0.5) / 5)
    values = 0.3 + 0.5 * (values - values.mean()) / values.std(ddof=1)
    first = estimate_over_seeds([SeedSample(x, None) for x in values], num_prompts=None, prompts_shared=False)
    looks, claim = Looks((5, 20)), Claim("H", direction, 0.0 if direction == "above" else 0.6)
    foreseen = chance_to_decide(claim, [first], looks, alpha=0.05)
    rng, last_sd = np.random.default_rng(1), 0.5 / np.sqrt(20)
    # A flat prior after five seeds: the truth scatters around their mean as their mean scatters around it.
    truth = 0.3 + 0.5 / np.sqrt(5) * rng.normal(size=100_000)
    last = (5 * 0.3 + 15 * (truth + 0.5 / np.sqrt(15) * rng.normal(size=100_000))) / 20
    reach = -special.ndtri(look_levels(0.05, looks.shares, [0.25, 1.0])[-1] / 2) * last_sd
    decided = np.abs(last) > reach
    if direction == "within":
        decided = (np.abs(last) < 0.6 - reach) | (np.abs(last) > 0.6 + reach)
    assert foreseen == pytest.approx(decided.mean(), abs=0.006)
