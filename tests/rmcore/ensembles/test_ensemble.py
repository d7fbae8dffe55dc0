"""An ensemble: one pass where backbones are equal, comparable rewards, a threshold that keeps its promise, a folder."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rmcore.core.errors import ConfigError, DataError, ModelError
from rmcore.ensembles.ensemble import RewardModelEnsemble, calibration_of, conformal_rank, disagreement
from rmcore.ensembles.features import head_of
from rmcore.models.reward_model import BradleyTerryRM


def rows(pairs):
    return [p.prompt for p in pairs for _ in range(2)], [text for p in pairs for text in (p.chosen, p.rejected)]


def another(rm, seed, *, backbone=False):
    """A copy with another head, and where asked with another backbone."""
    twin = copy.deepcopy(rm)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in [head_of(twin).weight, *([next(twin.model.parameters())] if backbone else [])]:
            parameter.add_(torch.randn(parameter.shape, generator=generator))
    return twin


@pytest.fixture
def models(rm):
    """The first, third and fourth share a backbone."""
    return [another(rm, 1), another(rm, 2, backbone=True), another(rm, 3), another(rm, 4)]


def test_members_that_share_a_backbone_are_one_pass_and_score_as_each_alone(models, gold_pairs):
    prompts, responses = rows(gold_pairs[:6])
    ensemble = RewardModelEnsemble(models, uncertainty_threshold=None)
    assert len(ensemble) == 4
    assert len(ensemble.members.backbones) == 2
    done = []
    found = ensemble.predict(prompts, responses, report=lambda number, total, text: done.append(number))
    alone = np.stack([model.score(prompts, responses) for model in models])
    np.testing.assert_allclose(found.individual_rewards, alone, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.mean_reward, alone.mean(axis=0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.std_reward, alone.std(axis=0), rtol=1e-4, atol=1e-5)
    assert found.is_high_uncertainty is None
    assert ensemble.predict([], []).individual_rewards.shape == (4, 0)
    assert done == sorted(done)
    assert done[-1] == 2 * len(prompts)


def test_a_backbone_is_shared_only_where_text_is_read_alike(models, tiny_folder):
    shorter = BradleyTerryRM.from_pretrained(tiny_folder, device="cpu", max_seq_len=64)
    assert len(RewardModelEnsemble([models[0], models[2], shorter]).members.backbones) == 2


def raw_rewards(rng, num_prompts, *, members=4, size=4):
    """Members that agree up to noise, which is larger for some prompts; each with its own offset and scale."""
    prompt = np.repeat(np.arange(num_prompts), size)
    noise = rng.gamma(2.0, 0.3, num_prompts)[prompt] * rng.standard_normal((members, len(prompt)))
    common = rng.standard_normal(len(prompt)) + rng.standard_normal(num_prompts)[prompt]
    scale, offset = rng.uniform(0.2, 5, (members, 1)), rng.uniform(-9, 9, (members, 1))
    return offset + scale * (common + noise), [str(number) for number in prompt], (offset, scale)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.8, 0.95])
def test_of_new_responses_like_the_calibrated_ones_one_minus_share_is_flagged(share):
    rng = np.random.default_rng(0)
    rates = []
    for _ in range(100):
        raw, prompts, _ = raw_rewards(rng, 80)
        seen = 40 * 4
        found = calibration_of(raw[:, :seen], prompts[:seen], share, list("abcd"))
        rates.append(np.mean(disagreement(found.apply(raw[:, seen:])) > found.threshold))
    # A rate has a standard deviation of about 0.03 over calibrations at 0.95, so their mean one of 0.003.
    assert np.mean(rates) == pytest.approx(1 - share, abs=0.015)


@given(seed=st.integers(0, 500))
def test_offset_and_scale_of_a_member_do_not_change_disagreement(seed):
    rng = np.random.default_rng(seed)
    raw, prompts, _ = raw_rewards(rng, 20)
    other = raw * rng.uniform(0.01, 100, (4, 1)) + rng.uniform(-50, 50, (4, 1))
    names = list("abcd")
    one, two = (calibration_of(each, prompts, 0.9, names) for each in (raw, other))
    np.testing.assert_allclose(one.apply(raw), two.apply(other), rtol=1e-6, atol=1e-8)
    assert two.threshold == pytest.approx(one.threshold, rel=1e-6)
    applied = one.apply(raw).reshape(4, 20, 4)
    np.testing.assert_allclose(applied.mean(axis=(1, 2)), 0, atol=1e-9)
    np.testing.assert_allclose(applied.var(axis=2, ddof=1).mean(axis=1), 1)


@pytest.mark.parametrize(("num_prompts", "share", "num_above"), [(5, 0.95, 0), (10, 0.9, 3), (25, 0.5, 49)])
def test_as_many_of_the_calibrated_are_above_as_the_order_statistic_leaves(num_prompts, share, num_above):
    raw, prompts, _ = raw_rewards(np.random.default_rng(0), num_prompts)
    calibration = calibration_of(raw, prompts, share, list("abcd"))
    assert (disagreement(calibration.apply(raw)) > calibration.threshold).sum() == num_above


def test_the_order_statistic_is_the_conformal_one():
    assert (conformal_rank(19, 0.95), conformal_rank(100, 0.9)) == (19, 91)
    for num, share, words in ((18, 0.95, "at least 19"), (100, 1.0, "between 0 and 1")):
        with pytest.raises(ConfigError, match=words):
            conformal_rank(num, share)


@pytest.mark.slow
def test_a_calibrated_ensemble_knows_what_is_usual(models, gold_pairs):
    assert RewardModelEnsemble(models, uncertainty_threshold=0.0).detect_ood(*rows(gold_pairs[:2])).all()
    ensemble = RewardModelEnsemble(models, uncertainty_threshold=None)
    with pytest.raises(ConfigError, match="no threshold"):
        ensemble.detect_ood(*rows(gold_pairs[:2]))
    prompts, responses = rows(gold_pairs[:40])
    seen = ensemble.calibrate(prompts, responses, share=0.9)
    again = ensemble.predict(prompts, responses)
    np.testing.assert_array_equal(seen.std_reward, again.std_reward)
    np.testing.assert_array_equal(seen.is_high_uncertainty, again.std_reward > ensemble.uncertainty_threshold)
    assert seen.is_high_uncertainty.sum() <= len(prompts) - conformal_rank(len(prompts), 0.9)
    np.testing.assert_array_equal(ensemble.detect_ood(prompts, responses), seen.is_high_uncertainty)


def test_one_member_cannot_disagree(rm, gold_pairs):
    single = RewardModelEnsemble([rm], uncertainty_threshold=1.0)
    prompts, responses = rows(gold_pairs[:2])
    np.testing.assert_allclose(single.score(prompts, responses), rm.score(prompts, responses), atol=1e-5)
    asked = (single.predict, single.detect_ood, single.calibrate)
    for ask in asked:
        with pytest.raises(ConfigError, match="at least two"):
            ask(prompts, responses)
    with pytest.raises(ConfigError, match="no models"):
        RewardModelEnsemble([])


@pytest.mark.slow
def test_what_cannot_be_calibrated_is_refused(rm, models, gold_pairs):
    prompts, responses = rows(gold_pairs[:20])
    with pytest.raises(DataError, match="no prompt has two"):
        RewardModelEnsemble(models).calibrate([f"{n} {p}" for n, p in enumerate(prompts)], responses, share=0.9)
    dead = copy.deepcopy(rm)
    torch.nn.init.zeros_(head_of(dead).weight)
    with pytest.raises(ModelError, match="1 gives all responses"):
        RewardModelEnsemble([rm, dead]).calibrate(prompts, responses, share=0.9)
