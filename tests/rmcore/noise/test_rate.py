"""The model of labels: its rate and interval, the posterior, and what is called, against simulated truth."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import expit

from rmcore.core.errors import DataError
from rmcore.noise.rate import called, fit_labels, flipped


def drawn(seed, rate, num_prompts=150, pairs_of=4):
    """Margins in favour of labels, of which some are turned."""
    rng = np.random.default_rng(seed)
    prompts = np.repeat(np.arange(num_prompts), pairs_of)
    truth = rng.normal(0, 2.5, len(prompts))
    turned = rng.random(len(prompts)) < rate
    first = (rng.random(len(prompts)) < expit(truth)) != turned
    return np.where(first, truth, -truth), prompts.astype(str), turned


def test_the_posterior_is_calibrated_and_what_is_called_has_about_the_stated_share_of_right_labels():
    margins, prompts, turned = drawn(5, 0.2, num_prompts=2000)
    model = fit_labels(margins, prompts)
    posterior = model.posterior(margins)
    for low, high in ((0, 0.1), (0.1, 0.4), (0.4, 0.8), (0.8, 1.01)):
        inside = (posterior >= low) & (posterior < high)
        spread = np.sqrt(0.25 / inside.sum())
        assert inside.sum() > 50
        assert abs(posterior[inside].mean() - turned[inside].mean()) < 0.03 + 2 * spread
    wrong, careful = called(posterior, 0.2), called(model.cautious(margins), 0.2)
    assert wrong.sum() > careful.sum() > 200
    assert (~turned[wrong]).mean() == pytest.approx(0.2, abs=0.08)
    assert (~turned[careful]).mean() < 0.22


def test_a_model_that_knows_nothing_shows_no_rate():
    rng = np.random.default_rng(0)
    model = fit_labels(rng.normal(size=600), np.arange(600).astype(str))
    assert model.fitting[0] == model.rate.low == 0
    assert not model.is_shown


def test_the_unit_of_margins_changes_nothing():
    margins, prompts, _ = drawn(1, 0.1)
    model, other = fit_labels(margins, prompts), fit_labels(40 * margins, prompts)
    assert model.rate == other.rate
    np.testing.assert_allclose(
        flipped(margins, model.scale, 0.1), flipped(40 * margins, other.scale, 0.1), rtol=1e-6, atol=1e-12
    )


def test_pairs_that_are_copies_of_one_another_do_not_make_it_surer():
    margins, prompts, _ = drawn(2, 0.1, num_prompts=300, pairs_of=1)
    once, four = fit_labels(margins, prompts), fit_labels(np.repeat(margins, 4), np.repeat(prompts, 4))
    assert np.ptp(four.fitting) == pytest.approx(np.ptp(once.fitting), abs=0.02)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=60), st.floats(0, 1))
def test_the_called_are_the_most_doubtful_and_expected_to_keep_the_share(posterior, share):
    posterior = np.array(posterior)
    wrong = called(posterior, share)
    if wrong.any():
        assert (1 - posterior[wrong]).mean() <= share + 1e-9
        assert posterior[wrong].min() >= posterior[~wrong].max(initial=0)
    if not wrong.all():
        best = np.append(posterior[wrong], posterior[~wrong].max())
        assert (1 - best).mean() > share - 1e-9


@pytest.mark.parametrize(
    ("margins", "prompts"),
    [(np.ones(20), range(20)), (np.ones(80), [0] * 80), (np.append(np.ones(79), np.nan), range(80))],
    ids=["few", "one prompt", "not finite"],
)
def test_what_no_rate_can_be_told_from_is_refused(margins, prompts):
    with pytest.raises(DataError, match=r"needs at least 50 pairs of several prompts|1 of 80 margins are not finite"):
        fit_labels(margins, [str(one) for one in prompts])


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["hard", "easy", "clearest", "falling", "rising", "none", "alike"])
def test_the_interval_has_the_rate_however_mistakes_depend_on_the_margin_and_clean_labels_are_not_called(wrong):
    rng, draws = np.random.default_rng(0), 40
    covered = narrow = shown = 0
    for _ in range(draws):
        prompts = np.repeat(np.arange(150), 4)
        truth = rng.normal(0, 2.5, len(prompts))
        size = np.abs(truth)
        chance = {
            "hard": 0.5 * (size < 1.1),
            "easy": 0.3 * (size > 1.1),
            "clearest": 0.15 * (size > 1.7),
            "falling": 0.3 * np.exp(-size / 2),
            "rising": 0.3 * (1 - np.exp(-size / 3)),
            "none": 0.0 * size,
            "alike": 0.1 + 0.0 * size,
        }[wrong]
        turned = rng.random(len(prompts)) < chance
        first = (rng.random(len(prompts)) < expit(truth)) != turned
        model = fit_labels(np.where(first, truth, -truth), prompts.astype(str))
        covered += model.rate.low <= chance.mean() <= model.rate.high
        narrow += model.fitting[0] <= chance.mean() <= model.fitting[1]
        shown += model.is_shown
        assert model.rate.low <= model.fitting[0] <= model.rate.value <= model.fitting[1] <= model.rate.high
    assert covered >= 0.92 * draws
    # That of equally likely mistakes is the narrower one, and holds where they are.
    assert narrow >= draws - 5 if wrong in ("none", "alike") else narrow < 0.8 * draws
    assert wrong != "none" or shown <= draws // 8
