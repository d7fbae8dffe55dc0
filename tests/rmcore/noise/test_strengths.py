"""Margins with the other labels of a prompt: against sums over a grid of strengths, and against simulated truth."""

import numpy as np
import pytest
from scipy.special import expit
from sklearn.metrics import roc_auc_score

from rmcore.noise.rate import called, fit_labels, flipped
from rmcore.noise.strengths import Strengths, _blocks, _left_out, _propagate, _shrunk, with_other_labels

CONSISTENT = [(0, 1), (1, 2), (0, 2)]
CIRCLE = [(0, 1), (1, 2), (2, 0)]
BOTH_WAYS = [(0, 1), (1, 0), (0, 1)]
TREE = [(0, 1), (0, 2), (3, 0), (0, 1)]


def by_summation(rewards, labels, slope, spread, rate):
    """Chance of each label given all others, and the logarithm of that of all together, over a grid in float64."""
    offsets = np.linspace(-6, 6, 25) * spread
    strengths = np.meshgrid(*[slope * reward + offsets for reward in rewards], indexing="ij")
    log_prior = sum(
        -0.5 * ((one - slope * reward) / spread) ** 2 for one, reward in zip(strengths, rewards, strict=True)
    )
    prior = np.exp(log_prior)
    prior /= prior.sum()
    chances = [rate + (1 - 2 * rate) * expit(strengths[i] - strengths[j]) for i, j in labels]
    every = np.prod(chances, axis=0) * prior
    without = [np.prod([*chances[:k], *chances[k + 1 :]], axis=0) * prior for k in range(len(labels))]
    return np.array([every.sum() / one.sum() for one in without]), np.log(every.sum())


@pytest.mark.parametrize("labels", [CONSISTENT, CIRCLE, BOTH_WAYS, TREE], ids=["order", "circle", "both ways", "tree"])
@pytest.mark.parametrize(("spread", "rate"), [(0.3, 0.0), (1.0, 0.05), (1.0, 0.3), (3.0, 0.1)])
def test_the_chance_of_a_label_given_the_others_is_that_of_a_sum_over_strengths(labels, spread, rate):
    rewards = np.array([0.8, -0.3, 0.1, 1.5])[: max(map(max, labels)) + 1]
    margins = np.array([rewards[i] - rewards[j] for i, j in labels])
    slope = 1.4
    (block,) = _blocks(margins, [("p", str(i), str(j)) for i, j in labels])
    model = Strengths(slope * float(_shrunk(2 * spread**2)), spread, rate)
    chance = rate + (1 - 2 * rate) * expit(_left_out(block, model))
    expected, evidence = by_summation(rewards, labels, slope, spread, rate)
    np.testing.assert_allclose(chance, expected, atol=0.01 if spread <= 1 else 0.05)
    assert _propagate(block, model).evidence == pytest.approx(evidence, abs=0.1)


def drawn(seed, *, num_prompts=150, answers=6, labels=10, spread=3.0, rate=0.1):
    """Margins of labels among a few answers of each prompt, of which a model knows a part, and which are turned."""
    rng = np.random.default_rng(seed)
    margins, texts, turned = [], [], []
    for prompt in range(num_prompts):
        rewards = 2 * rng.normal(size=answers)
        strengths = rewards + spread * rng.normal(size=answers)
        for _ in range(labels):
            i, j = rng.choice(answers, 2, replace=False)
            is_turned = rng.random() < rate
            if (rng.random() < expit(strengths[i] - strengths[j])) == is_turned:
                i, j = j, i
            margins.append(rewards[i] - rewards[j])
            texts.append((str(prompt), str(i), str(j)))
            turned.append(is_turned)
    return np.array(margins), texts, np.array(turned)


@pytest.mark.slow
def test_pairs_whose_answers_do_not_recur_keep_their_margins():
    margins, texts, _ = drawn(0, num_prompts=40)
    apart = [(f"{prompt} {place}", one, other) for place, (prompt, one, other) in enumerate(texts)]
    found, model = with_other_labels(margins, apart)
    assert model is None
    np.testing.assert_array_equal(found, margins)
    found, model = with_other_labels(np.append(margins, margins), [*texts, *apart])
    assert model is not None
    np.testing.assert_array_equal(found[len(margins) :], margins)
    assert (found[: len(margins)] != margins).all()


@pytest.mark.slow
def test_a_label_is_no_evidence_for_itself_and_the_others_are():
    margins, texts, _ = drawn(1, num_prompts=60)
    found, _ = with_other_labels(margins, texts)
    prompt, better, worse = texts[0]
    (block,) = _blocks(margins[:10], texts[:10])
    model = Strengths(1.0, 3.0, 0.1)
    before = _left_out(block, model)
    turned = [(prompt, worse, better), *texts[1:10]]
    (other,) = _blocks(np.append(-margins[0], margins[1:10]), turned)
    after = _left_out(other, model)
    assert after[0] == pytest.approx(-before[0], abs=0.01)
    assert np.abs(after[1:] - before[1:]).max() > 0.5
    again, _ = with_other_labels(np.append(margins, margins[0]), [*texts, texts[0]])
    assert again[0] > found[0]  # a second label of the couple agrees


@pytest.mark.slow
def test_what_the_model_does_not_know_is_estimated_and_flips_are_found_better():
    margins, texts, turned = drawn(2, num_prompts=300)
    found, model = with_other_labels(margins, texts)
    assert 1.5 < model.spread < 6  # close calls, turned labels and the spread are hard to tell apart
    assert model.rate == pytest.approx(turned.mean(), abs=0.06)
    assert roc_auc_score(turned, -found) > roc_auc_score(turned, -margins) + 0.05


@pytest.mark.slow
def test_intervals_have_the_true_rate():
    draws, covered, called_clean = 6, 0, 0
    for seed in range(draws):
        margins, texts, turned = drawn(10 + seed, num_prompts=50, rate=0.1 * (seed % 2))
        found, _ = with_other_labels(margins, texts)
        model = fit_labels(found, [text[0] for text in texts])
        covered += model.rate.low <= turned.mean() <= model.rate.high
        called_clean += not seed % 2 and model.is_shown
    assert covered >= draws - 2  # three or more of six that hold with 0.95 fail with probability 0.002
    assert called_clean <= 1


@pytest.mark.slow
def test_the_posterior_and_the_called_are_calibrated_under_the_true_model():
    margins, texts, turned = drawn(5, num_prompts=400, rate=0.15)
    model = Strengths(float(_shrunk(2 * 3.0**2)), 3.0, 0.15)
    logits = np.zeros(len(margins))
    for block in _blocks(margins, texts):
        logits[block.places] = _left_out(block, model)
    posterior = flipped(logits, 1.0, model.rate)
    for low, high in ((0, 0.05), (0.05, 0.1), (0.1, 0.4), (0.4, 0.7), (0.7, 1.01)):
        inside = (posterior >= low) & (posterior < high)
        assert inside.sum() > 30
        expected = posterior[inside].mean()
        spread = np.sqrt(expected * (1 - expected) / inside.sum())
        assert abs(expected - turned[inside].mean()) < 0.02 + 3 * spread
    wrong = called(posterior, 0.2)
    assert wrong.sum() > 30
    assert (~turned[wrong]).mean() < 0.2 + 3 * np.sqrt(0.2 * 0.8 / wrong.sum())


@pytest.mark.slow
def test_the_unit_of_margins_changes_nothing_but_theirs():
    margins, texts, _ = drawn(6, num_prompts=50)
    found, model = with_other_labels(margins, texts)
    other, of_other = with_other_labels(40 * margins, texts)
    np.testing.assert_allclose(other, 40 * found, rtol=1e-6)
    assert of_other.spread == pytest.approx(model.spread)


def test_equal_texts_say_nothing_and_many_contradictions_settle():
    rng = np.random.default_rng(0)
    found, _ = with_other_labels(np.array([0.5, 1.0, -1.0]), [("p", "a", "a"), ("p", "a", "b"), ("p", "b", "a")])
    assert found[0] == 0.5
    labels = [tuple(rng.choice(6, 2, replace=False)) for _ in range(80)]
    margins = rng.normal(size=6)
    both = np.array([margins[i] - margins[j] for i, j in labels])
    (block,) = _blocks(both, [("p", str(i), str(j)) for i, j in labels])
    for spread, rate in ((1.0, 0.0), (5.0, 0.002), (20.0, 0.1)):
        assert np.isfinite(_left_out(block, Strengths(1.0, spread, rate))).all()
