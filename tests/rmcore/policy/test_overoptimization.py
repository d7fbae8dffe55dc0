"""Over-optimisation curves: right where the truth is known, turned where the proxy is flawed, and as a command."""

import json
import math

import numpy as np
import pytest

from rmcore.core.errors import ConfigError, DataError
from rmcore.data.gold.world import demonstrations
from rmcore.policy.overoptimization import overoptimization
from rmcore.policy.sampling.samples import read_samples
from rmcore.reporting.html.policy import curve_finding

METHODS = ["best_of_n", "kl_optimum"]


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
