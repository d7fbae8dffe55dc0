"""Margins with the other labels of a prompt, against simulated truth."""

import numpy as np
import pytest
from scipy.special import expit
from sklearn.metrics import roc_auc_score

from rmcore.noise.rate import fit_labels
from rmcore.noise.recurring import with_other_labels


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


def test_pairs_whose_answers_do_not_recur_keep_their_margins():
    margins, texts, _ = drawn(0, num_prompts=40)
    apart = [(f"{prompt} {place}", one, other) for place, (prompt, one, other) in enumerate(texts)]
    np.testing.assert_array_equal(with_other_labels(margins, apart), margins)
    found = with_other_labels(np.append(margins, margins), [*texts, *apart])
    np.testing.assert_array_equal(found[len(margins) :], margins)
    assert (found[: len(margins)] != margins).mean() > 0.99


def test_a_label_is_no_evidence_for_itself_and_the_others_are():
    margins, texts, _ = drawn(1, num_prompts=60)
    found = with_other_labels(margins, texts)
    (prompt, better, worse), *others = texts
    turned = with_other_labels(np.append(-margins[:1], margins[1:]), [(prompt, worse, better), *others])
    assert turned[0] == pytest.approx(-found[0], rel=0.2)  # the fit of all labels hardly moves
    assert np.abs(turned[1:10] - found[1:10]).max() > 10 * np.abs(turned[10:] - found[10:]).max()
    again = with_other_labels(np.append(margins, margins[0]), [*texts, texts[0]])
    assert again[0] > found[0]  # a second label of the couple agrees


def test_flips_are_found_better():
    margins, texts, turned = drawn(2, num_prompts=300)
    found = with_other_labels(margins, texts)
    assert roc_auc_score(turned, -found) > roc_auc_score(turned, -margins) + 0.05


@pytest.mark.slow
def test_intervals_have_the_true_rate():
    draws, covered, called_clean = 12, 0, 0
    for seed in range(draws):
        margins, texts, turned = drawn(10 + seed, num_prompts=100, rate=0.1 * (seed % 2))
        model = fit_labels(with_other_labels(margins, texts), [text[0] for text in texts])
        covered += model.rate.low <= turned.mean() <= model.rate.high
        called_clean += not seed % 2 and model.is_shown
    assert covered >= draws - 2
    assert called_clean <= 1


def test_the_unit_of_margins_changes_nothing_but_theirs():
    margins, texts, _ = drawn(6, num_prompts=50)
    np.testing.assert_allclose(
        with_other_labels(40 * margins, texts), 40 * with_other_labels(margins, texts), rtol=1e-6
    )


def test_equal_texts_say_nothing():
    found = with_other_labels(np.array([0.5, 1.0, -1.0]), [("p", "a", "a"), ("p", "a", "b"), ("p", "b", "a")])
    assert found[0] == 0.5
    assert np.isfinite(found).all()
