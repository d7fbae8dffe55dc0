"""Over-optimisation curves: whether they turn, and their plans of a KL: the gain there, and whether it fell before."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from rmcore.core.errors import ConfigError, DataError
from rmcore.data.gold.world import demonstrations
from rmcore.policy.overoptimization import METHODS, overoptimization
from rmcore.policy.sampling.best_of_n import nominal_kl, pool_kl
from rmcore.policy.sampling.samples import read_samples
from rmcore.reporting.html.policy import curve_finding

BEST_OF_64 = nominal_kl(64)


def world(seed: int, *, is_flawed: bool = False, num_prompts: int = 120, size: int = 64):
    """Rewards of samples, and a gold reward that is the same, or falls where they are high."""
    rng = np.random.default_rng(seed)
    proxy = rng.normal(size=(num_prompts, size))
    difficulty = rng.normal(size=(num_prompts, 1)) * 3  # of the prompt; must not matter
    gold = proxy - 0.8 * np.maximum(proxy - 0.5, 0) ** 2 if is_flawed else proxy
    return list(proxy + difficulty), list(gold + 5 * difficulty)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_flawed_proxy_turns_and_a_good_one_does_not(method):
    good, flawed = (
        overoptimization(*world(0, is_flawed=is_flawed), planned_kl=3.0, method=method) for is_flawed in (False, True)
    )
    assert not good.turned
    assert good.best == len(good.points) - 1
    assert good.points[-1].gold.ends[0] > 1
    assert flawed.turned
    assert 0 < flawed.best < len(flawed.points) - 1
    assert flawed.fall.ci_high < 0
    assert "turns: highest at " in curve_finding(flawed.to_dict())
    for curve in (good, flawed):
        kl = [point.kl for point in curve.points]
        assert kl == sorted(kl)
        assert kl[0] == pytest.approx(0, abs=1e-12)
        assert curve.points[0].gold.value == pytest.approx(0, abs=1e-12)
        assert curve.points[-1].proxy.value > curve.points[-2].proxy.value
        json.dumps(curve.to_dict(), allow_nan=False)


def test_demonstrations_keep_away_from_held_out_prompts_and_repeat_by_seed():
    rows = demonstrations("length", 60, seed=3, without=frozenset())
    assert rows == demonstrations("length", 60, seed=3, without=frozenset())
    assert rows != demonstrations("length", 60, seed=4, without=frozenset())
    held_out = {prompt for prompt, _ in rows[::2]}
    kept = demonstrations("length", 60, seed=3, without=held_out)
    assert len(kept) == 60
    assert not held_out & {prompt for prompt, _ in kept}


@pytest.mark.slow
def test_intervals_cover_the_gain_that_theory_gives():
    """Proxy and gold correlate by rho: the gold gain of best-of-n is rho times that of the proxy."""
    rho, covered, num_trials = 0.6, 0, 60
    rng = np.random.default_rng(5)
    expected = rho * 1.7660  # E[max of 16 normal draws], Harter 1961
    for trial in range(num_trials):
        proxy, noise = rng.normal(size=(2, 80, 16))
        gold = rho * proxy + math.sqrt(1 - rho**2) * noise
        point = overoptimization(list(proxy), list(gold), planned_kl=1.0, num_resamples=400, seed=trial).points[-1]
        covered += point.gold.ends[0] <= expected <= point.gold.ends[1]
    assert covered >= 50  # of 60, 57 expected; fewer than 50 has a chance of 1 in 1,000


def test_a_reward_that_tells_nothing_apart_is_refused():
    proxy, gold = world(1, num_prompts=5, size=8)
    with pytest.raises(ConfigError, match=r"the proxy rewards: .*one and the same reward"):
        overoptimization([np.ones_like(pool) for pool in proxy], gold, planned_kl=1.0)


def test_rows_of_samples_that_cannot_be_read_are_counted_with_their_reasons(tmp_path, capsys):
    path = tmp_path / "samples.jsonl"
    path.write_text('{"prompt": "a", "r": 1}\n{"prompt": "a", "r": 2, "r": 3}\n[1]\n{"prompt": "b", "r": 4}\n')
    assert read_samples(path)["r"].tolist() == [1, 4]
    said = capsys.readouterr().err
    assert f"2 of 4 rows of {path} are left out" in said
    assert "a key is repeated: 1" in said
    assert "the first is row 2" in said
    path.write_text('{"r": 2, "r": 3}\n')
    with pytest.raises(DataError, match=r"no row that can be read \(a key is repeated: 1\)"):
        read_samples(path)


def pools(seed=0, num_prompts=60, size=64):
    return list(np.random.default_rng(seed).normal(size=(num_prompts, size)))


def planned(proxy, gold, kl, method="best_of_n", num_resamples=100):
    return overoptimization(proxy, gold, method=method, planned_kl=kl, num_resamples=num_resamples)


def turning(proxy, at):
    """A gold reward that falls with the proxy beyond `at` deviations."""
    return [pool - 3 * np.maximum(pool - at, 0) for pool in proxy]


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=20)
@given(share=st.floats(0.001, 0.999))
def test_the_gain_lies_on_the_line_between_the_points_around_it(method, share):
    proxy = pools(1, num_prompts=5, size=16)
    gold = turning(proxy, 0.5)
    curve = planned(proxy, gold, 1.0, method)
    distance = np.sqrt([point.kl for point in curve.points])
    gains = [point.gold.value for point in curve.points]
    kl = share * curve.points[-1].kl
    found = planned(proxy, gold, kl, method).plan
    assert found.kl == kl
    assert found.gain.value == pytest.approx(np.interp(math.sqrt(kl), distance, gains), abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_beyond_the_samples_no_gain_is_made_up(method):
    proxy = pools(3)
    reached = planned(proxy, proxy, 1.0, method).points[-1].kl
    plan = planned(proxy, proxy, 1.1 * reached, method).plan
    assert plan.gain.value is None
    assert plan.gain.ends[0] is None
    assert f"the samples reach {reached:.3g} nats, {1.1 * reached:g} are planned; draw more" in plan.gain.reason
    assert planned(proxy, proxy, 1.001 * reached, method).plan.gain.value is not None  # rounding of the plan
    json.dumps(planned(proxy, proxy, 1.1 * reached, method).to_dict(), allow_nan=False)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_fall_before_the_plan_is_shown_and_one_behind_it_is_none(method):
    proxy = pools(9)
    gold = turning(proxy, 1.2)
    near, far = (planned(proxy, gold, kl, method).plan for kl in (0.3, BEST_OF_64 - 0.05))
    assert (near.fall.value, near.fall.ends[1]) == (0, 0)
    assert far.fall.value < far.fall.ends[1] < 0
    assert far.gain.value - far.fall.value == pytest.approx(
        max(point.gold.value for point in planned(proxy, gold, 1.0, method).points)
    )


@pytest.mark.slow
def test_a_gold_that_levels_off_is_seldom_shown_to_fall():
    shown, draws = 0, 60
    for seed in range(draws):
        rng = np.random.default_rng(seed)
        proxy = list(rng.normal(size=(60, 64)))
        gold = [np.minimum(pool, 0.3) + 0.5 * rng.normal(size=64) for pool in proxy]
        shown += planned(proxy, gold, 3.0, num_resamples=200).plan.fall.ends[1] < 0
    assert stats.binomtest(shown, draws, 0.05, alternative="greater").pvalue > 0.001


@pytest.mark.parametrize("size", [48, 49, 98, 103])
def test_pools_of_any_size_have_a_curve_that_begins_at_no_distance(size):
    """49 times 1 / 49 is less than 1 in floating point; the root of the KL was not a number."""
    assert pool_kl(np.full(size, 1 / size)) == pytest.approx(0, abs=1e-12)
    assert pool_kl(np.full(size, 1 / size)) >= 0
    proxy = pools(8, num_prompts=10, size=size)
    curve = planned(proxy, proxy, 1.0, "kl_optimum")
    assert math.isfinite(curve.plan.gain.value)


def test_ties_take_kl_away_and_the_plan_says_so():
    """Half of the samples are one and the same: they cannot be told apart, so best of 64 moves by less."""
    rng = np.random.default_rng(9)
    proxy = [np.concatenate([np.full(32, 2.0), rng.normal(size=32)]) for _ in range(20)]
    plan = planned(proxy, proxy, 3.0).plan
    assert plan.reached < 3.0
    assert plan.gain == planned(proxy, proxy, plan.reached).plan.gain
    short = [pool[:53] for pool in proxy]
    assert "draw more" in planned(short, short, 3.0).plan.gain.reason


def test_a_prompt_that_lacks_samples_shortens_no_plan_and_copies_of_prompts_are_no_further_evidence():
    proxy = pools(12, num_prompts=60)
    gold = turning(proxy, 1.5)
    expected = planned(proxy, gold, 3.0).plan
    more = planned([*proxy, pools(13)[0][:40]], [*gold, pools(14)[0][:40]], 3.0).plan
    assert (more.num_short, more.by_prompt[-1]) == (1, None)
    assert replace(more, num_short=0, by_prompt=more.by_prompt[:-1]) == expected
    five = [[pool for pool in some for _ in range(5)] for some in (proxy, gold)]
    units = [place // 5 for place in range(300)]
    copied = overoptimization(*five, planned_kl=3.0, units=units, num_resamples=100).plan
    assert copied.num_telling == expected.num_telling == 60
    assert (copied.gain.ends[0], copied.gain.ends[1]) == pytest.approx((expected.gain.ends[0], expected.gain.ends[1]))
