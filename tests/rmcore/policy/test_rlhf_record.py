"""The record of a training against a reward model: what its intervals over seeds and prompts cover."""

import numpy as np
import pandas as pd
import pytest

from rmcore.evaluation.uncertainty import t_interval
from rmcore.policy.confirmation import ServedGain
from rmcore.policy.grpo.policy_meter import QUANTITIES
from rmcore.policy.grpo.rlhf_record import curve_of, final_of, verdict_of_watch

NUM_PROMPTS, TRUTH, EXPERIMENTS = 48, 0.3, 200


def experiments(num_seeds, prompt_sd, seed_sd, noise_sd=0.3):
    """Independent experiments, one a step: gold of each seed on the prompts that all of them answer."""
    rng = np.random.default_rng([num_seeds, int(100 * prompt_sd)])
    shape = (EXPERIMENTS, num_seeds, NUM_PROMPTS)
    gold = TRUTH + prompt_sd * rng.normal(size=(EXPERIMENTS, 1, NUM_PROMPTS))
    gold = gold + seed_sd * rng.normal(size=(EXPERIMENTS, num_seeds, 1)) + noise_sd * rng.normal(size=shape)
    step, seed, prompt = (axis.ravel() for axis in np.indices(shape))
    missing = dict.fromkeys(QUANTITIES, np.nan)
    return pd.DataFrame({"step": step, "seed": seed, "prompt": prompt, **missing, "gold": gold.ravel()})


def covered(intervals):
    return np.mean([one["ci_low"] <= TRUTH <= one["ci_high"] for one in intervals])


@pytest.mark.slow
def test_an_interval_over_seeds_knows_that_they_answer_the_same_prompts():
    progress = experiments(3, 0.8, 0.05)
    points = curve_of(progress, num_resamples=300, seed=0)
    share = covered([point["gold"] for point in points])
    # 93 % is promised (test_verdict_coverage); 200 experiments may fall short of that by three standard errors
    assert share >= 0.93 - 3 * np.sqrt(0.93 * 0.07 / EXPERIMENTS)
    # Over seeds alone, "95 %" covers a half or less.
    means = progress.groupby(["step", "seed"])["gold"].mean().to_numpy().reshape(EXPERIMENTS, 3)
    assert covered([t_interval(row).to_dict() for row in means]) < 0.8 < share


def test_one_seed_has_its_prompts_alone_and_what_nobody_judged_is_not_known():
    progress = experiments(3, 0.8, 0.05)
    [point] = curve_of(progress[(progress["seed"] == 1) & (progress["step"] == 0)], num_resamples=100, seed=0)
    assert (point["gold"]["num"], point["kl"]) == (NUM_PROMPTS, None)
    assert point["gold"]["ci_low"] < point["gold"]["value"] < point["gold"]["ci_high"]


@pytest.mark.parametrize("num_seeds", [1, 3])
def test_what_does_not_vary_at_all_is_certain(num_seeds):
    progress = experiments(num_seeds, 0.0, 0.0, 0.0)
    point = curve_of(progress[progress["step"] == 0], num_resamples=100, seed=0)[0]["gold"]
    assert point["ci_low"] == point["value"] == point["ci_high"] == TRUTH


def watched(*actions, kept=0):
    looks = [{"action": action, "reason": f"look {number}"} for number, action in enumerate(actions)]
    return {"looks": looks, "unit": "sd", "kept_step": kept, "kept_kl": 1.0, "final": None, "labels": 648}


def test_a_start_that_is_kept_for_want_of_evidence_is_no_refusal_and_a_refused_training_says_why():
    found = verdict_of_watch([watched("go_on", "go_on"), watched("go_on")], None)
    assert found["status"] == "unclear"
    assert "1,296 labels showed neither a gain nor that the true reward turned" in found["headline"]
    never = verdict_of_watch([watched("go_on", "stop")], None)
    assert never["headline"].startswith("Not against this reward model: ")
    assert never["reasons"] == ["look 1"]


@pytest.mark.parametrize("num_seeds", [1, 3])
def test_a_gain_of_clipped_differences_alone_is_not_claimed(num_seeds):
    """Three in a hundred prompts lose 20 standard deviations, and the others gain half of one."""
    rng = np.random.default_rng(0)
    differences = np.where(np.arange(200) % 33 == 0, -20.0, 0.5 + 0.3 * rng.normal(size=200))
    for doubtful, values in ((True, differences), (False, np.maximum(differences, 0.0))):
        known = ServedGain(3.0, 0.1)
        for value in values:
            known.see(float(value))
        final = {"value": known.mean, "interval": known.interval, "path": known.path, "limit": 3.0}
        watches = [
            watched("go_on", kept=40) | {"final": final | {"differences": values.tolist()}} for _ in range(num_seeds)
        ]
        found = final_of(watches, num_resamples=200, seed=0)
        assert found["ci_low"] > 0
        verdict = verdict_of_watch(watches, found)
        assert verdict["status"] == ("unclear" if doubtful else "rose")
        assert ("are clipped at 3" in verdict["reasons"][0]) if doubtful else not verdict["reasons"]
