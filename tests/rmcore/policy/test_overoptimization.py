"""Over-optimisation curves: right where the truth is known, turned where the proxy is flawed, and as a command."""

import json
import math
import random

import numpy as np
import pandas as pd
import pytest

from rmcore.cli import app
from rmcore.cli.guard import guard
from rmcore.core.errors import ConfigError, DataError
from rmcore.data.gold.tasks import draw_prompt
from rmcore.data.gold.world import TAIL_SHARE, demonstrations, gold_reward, sample_response
from rmcore.policy.overoptimization import overoptimization
from rmcore.policy.sampling.samples import read_samples
from rmcore.reporting.html.policy import curve_finding, overoptimization_figure

METHODS = ["best_of_n", "kl_optimum"]


def world(seed: int, flaw: float, num_prompts: int = 120, size: int = 64):
    """Samples of quality q, a proxy that also likes a habit h, and a gold reward that punishes much of it."""
    rng = np.random.default_rng(seed)
    quality, habit = rng.normal(size=(2, num_prompts, size))
    difficulty = rng.normal(size=(num_prompts, 1)) * 3  # of the prompt; must not matter
    proxy = quality + flaw * np.exp(habit) + difficulty
    gold = quality - flaw * np.exp(habit) * (habit > 0.7) + 5 * difficulty
    return list(proxy), list(gold)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_flawed_proxy_turns_and_a_good_one_does_not(method):
    good = overoptimization(*world(0, 0.0), method=method)
    assert not good.turned
    assert good.best == len(good.points) - 1
    assert good.points[-1].gold.ends[0] > 1
    flawed = overoptimization(*world(0, 0.8), method=method)
    assert flawed.points[-1].proxy.value > flawed.points[-2].proxy.value  # the proxy rises by construction
    assert flawed.fall.value <= 0
    for curve in (good, flawed):
        kl = [point.kl for point in curve.points]
        assert kl == sorted(kl)
        assert kl[0] == pytest.approx(0, abs=1e-12)
        assert curve.points[0].gold.value == pytest.approx(0, abs=1e-12)
        assert json.loads(json.dumps(curve.to_dict(), allow_nan=False)) == curve.to_dict() | {
            "points": [*map(dict, curve.to_dict()["points"])]
        }


def test_a_gold_reward_that_falls_is_called_turned():
    rng = np.random.default_rng(3)
    proxy = list(rng.normal(size=(100, 64)))
    gold = [pool - 0.8 * np.maximum(pool - 0.5, 0) ** 2 for pool in proxy]
    curve = overoptimization(proxy, gold)
    assert curve.turned
    assert 0 < curve.best < len(curve.points) - 1
    assert curve.fall.ci_high < 0
    assert "turns: highest at n = " in curve_finding(curve.to_dict())


def test_the_synthetic_benchmark_with_its_shortcut_turns_after_a_while():
    """Of 64 answers of a perfect imitator of the demonstrations to each of 60 prompts."""
    rng, gold, flawed = random.Random(0), [], []  # noqa: S311 - data
    for _ in range(60):
        prompt = draw_prompt(rng, ood=False)
        answers = [sample_response(prompt, rng, shortcut="length", ood=rng.random() < TAIL_SHARE) for _ in range(64)]
        gold.append(np.array([gold_reward(prompt, answer) for answer in answers]))
        flawed.append(gold[-1] + np.array([len(answer.split()) / 3 for answer in answers]))
    curve = overoptimization(flawed, gold, num_resamples=300)
    assert curve.turned
    assert 0 < curve.best < len(curve.points) - 1  # it was worth following


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
        point = overoptimization(list(proxy), list(gold), max_n=16, num_resamples=400, seed=trial).points[-1]
        covered += point.gold.ends[0] <= expected <= point.gold.ends[1]
    assert covered >= 50  # of 60, 57 expected; fewer than 50 has a chance of 1 in 1,000


def test_neither_scale_nor_offset_of_the_rewards_matters():
    proxy, gold = world(7, 0.4, num_prompts=30)
    plain = overoptimization(proxy, gold, num_resamples=100)
    scaled = overoptimization([100 * pool + 7 for pool in proxy], [0.01 * pool for pool in gold], num_resamples=100)
    for one, other in zip(plain.points, scaled.points, strict=True):
        assert other.gold.value == pytest.approx(one.gold.value, abs=1e-9)
        assert other.proxy.value == pytest.approx(one.proxy.value, abs=1e-9)


def test_pools_may_differ_in_size():
    proxy, gold = world(9, 0.2, num_prompts=20)
    proxy[3], gold[3] = proxy[3][:20], gold[3][:20]
    curve = overoptimization(proxy, gold, num_resamples=100)
    assert curve.points[-1].setting == 20
    assert curve.num_samples == 19 * 64 + 20


def with_first(pools, change):
    return [change(pools[0]), *pools[1:]]


@pytest.mark.parametrize(
    ("spoiled", "error", "words"),
    [
        (lambda p, g: (p, with_first(g, lambda pool: pool * [math.nan, *[1] * 7])), DataError, "1 of the gold rewards"),
        (lambda p, g: (p, with_first(g, lambda pool: pool[:-1])), DataError, "every sample needs"),
        (
            lambda p, g: (with_first(p, lambda pool: pool[:3]), with_first(g, lambda pool: pool[:3])),
            DataError,
            "at least 4",
        ),
        (lambda p, g: ([np.ones_like(pool) for pool in p], g), ConfigError, "one and the same reward"),
        (lambda p, g: ([], []), DataError, "there must be some"),
    ],
)
def test_what_cannot_be_judged_is_refused(spoiled, error, words):
    with pytest.raises(error, match=words):
        overoptimization(*spoiled(*world(1, 0.2, num_prompts=5, size=8)))


@pytest.fixture
def samples(tmp_path):
    proxy, gold = world(2, 0.5, num_prompts=12, size=16)
    rows = [
        {"prompt": f"p{number}", "reward": reward, "other model": -reward, "judge": judged}
        for number, pools in enumerate(zip(proxy, gold, strict=True))
        for reward, judged in zip(*pools, strict=True)
    ]
    path = tmp_path / "samples.parquet"
    pd.DataFrame(rows).to_parquet(path)
    return path


def run(*arguments) -> int:
    return guard(lambda: app([*map(str, arguments)], standalone_mode=False))


@pytest.mark.slow
def test_the_command_writes_a_figure_a_proxy_and_the_record(samples, tmp_path, capsys):
    out = tmp_path / "curves"
    proxies = ["--proxy", "reward", "--proxy", "other model"]
    assert run("readiness", "overoptimize", "--samples", samples, *proxies, "--gold", "judge", "--out", out) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "reward, best-of-n:" in said
    assert "other model, KL-regularised optimum:" in said
    assert {path.name for path in out.iterdir()} == {
        "overoptimization.json", "overoptimization_reward.png", "overoptimization_other_model.png",
    }  # fmt: skip
    record = json.loads((out / "overoptimization.json").read_text())
    figure = overoptimization_figure("rm", record["proxies"]["reward"])
    assert curve_finding(record["proxies"]["reward"][0]) in " ".join(figure.get_suptitle().split())
    assert "proxy reward" in figure.axes[0].get_legend_handles_labels()[1]
    assert "nats" in figure.axes[1].get_xlabel()
    assert [curve["method"] for curve in record["proxies"]["reward"]] == METHODS
    assert record["proxies"]["other model"][0]["points"][-1]["setting"] == 16


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--gold", "none"], "no column 'none'"),
        (["--proxy", "prompt"], "holds no numbers"),
        (["--samples", "rows.docx"], "name local data"),
    ],
)
def test_a_wrong_call_is_one_message(samples, tmp_path, capsys, change, words):
    call = ["--samples", samples, "--proxy", "reward", "--gold", "judge", "--out", tmp_path, *change]
    assert run("readiness", "overoptimize", *call) == 2
    assert words in capsys.readouterr().err


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
