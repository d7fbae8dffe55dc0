"""The watch: what ends a training, what does not, what is kept; and its curve of gains against dense float64 truth."""

import numpy as np
import pytest

from rmcore.policy.stopping.bets import Bet
from rmcore.policy.stopping.watch import BEND, OWN, ROUGHNESS, SLOPE, GainCurve, Staked, Watch

LOOKS, LIMIT = 12, 3.0
KLS = (0.2, 0.5, 1.1, 0.8, 2.5)  # a way back is a way on
SEEN = ((1, 0, 0.3, 0.04), (2, 0, 0.2, 0.03), (3, 1, -0.1, 0.05), (4, 2, 0.1, 0.02), (5, 2, -0.4, 0.02))


def judge_all(watch, judged):
    """Judge the pairs of a look until nothing can change any more, and close it."""
    for difference in judged:
        if not watch.see(float(difference)):
            break
    return watch.end()


def trained(gain, pairs=400, seed=0, **options):
    """A training whose gold gain is a function of the nats; the watch and its looks."""
    watch = Watch(pairs, num_looks=LOOKS, limit=LIMIT, **options)
    rng, looks = np.random.default_rng(seed), []
    kls = np.linspace(0, 4, LOOKS + 1)
    for number in range(1, LOOKS + 1):
        reference, num_pairs = watch.begin(10 * number, kls[number])
        rise = float(gain(kls[number]) - gain(kls[reference]))
        looks.append(judge_all(watch, rise + 1.2 * rng.normal(size=num_pairs)))
        if looks[-1].action == "stop":
            break
    return watch, looks


def test_where_gold_crashes_it_goes_back_to_the_peak():
    watch, looks = trained(lambda kl: 0.6 * min(kl, 1.0) - 0.5 * max(kl - 1.0, 0.0))
    assert looks[-1].action == "stop"
    assert looks[-1].turned >= looks[-1].needed or looks[-1].stopped >= looks[-1].needed
    assert 0.6 <= watch.kls[looks[-1].best] <= 1.4
    assert watch.steps[looks[-1].best] < looks[-1].step
    assert watch.pairs_judged < 400


def test_where_it_falls_from_the_start_the_start_is_kept():
    _, looks = trained(lambda kl: -0.4 * kl)
    assert looks[-1].action == "stop"
    assert looks[-1].best == 0
    assert "the start" in looks[-1].reason


def test_where_it_gains_it_goes_on_and_keeps_the_last():
    watch, looks = trained(lambda kl: 0.5 * kl)
    assert [look.action for look in looks] == ["go_on"] * LOOKS
    assert any("still gaining" in look.reason for look in looks)
    assert watch.kls[looks[-1].best] >= 3.0
    mean, spread = looks[-1].gains[-1]
    assert mean == pytest.approx(2.0, abs=4 * spread)
    assert watch.pairs_judged <= 400


@pytest.mark.slow
def test_alarms_on_a_plateau_are_as_rare_as_promised():
    """The hardest case of "gold never falls"; all that is learned on the way may be used to bet."""
    runs = 120
    false = sum(
        look.turned >= look.needed for seed in range(runs) for look in [trained(lambda kl: 0.0, 200, seed)[1][-1]]
    )
    assert false / runs <= 0.05 + 2 * (0.05 * 0.95 / runs) ** 0.5


def test_a_plateau_ends_it():
    _, looks = trained(lambda kl: 0.4 * min(kl, 0.7), 1500, useful_gain=0.3)
    assert looks[-1].action == "stop"
    assert "stopped gaining: it gains less than 0.3 sd" in looks[-1].reason
    assert looks[-1].stopped >= looks[-1].needed


def test_what_is_forgotten_is_neither_compared_with_nor_kept():
    watch, looks = trained(lambda kl: 0.5 * kl)
    best = looks[-1].best
    watch.forget(4)
    assert len(watch.kept) == 4
    assert {0, best, LOOKS} <= set(watch.kept)
    assert watch.begin(999, 4.2)[0] in watch.kept


def test_pairs_are_shared_and_never_exceeded():
    watch, looks = trained(lambda kl: 0.5 * kl, pairs=50)
    counts = [look.num_pairs for look in looks]
    assert watch.pairs_judged == sum(counts) <= 50
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize(("side", "sign"), [("below", 1), ("above", -1)])
def test_a_bet_that_few_differences_win_is_doubted_and_so_is_one_where_a_tail_was_clipped(side, sign):
    bet = Bet(0.0, side, 0.05)
    plain = Staked(LIMIT, 50, [-sign * 0.5] * 50)
    assert plain.agrees(bet)
    plain.values.pop()
    assert not plain.agrees(bet)
    assert "leave room for 5.9 % of all prompts" in plain.doubt("turned")
    # Three of a hundred prompts are far out on the other side: the mean is 0, and that of clipped ones is not.
    tail = Staked(LIMIT, 0, [sign * (19.4 if number % 33 == 0 else -0.6) for number in range(200)], 7)
    assert not tail.agrees(bet)
    assert "7 of the 200 differences that say so are clipped" in tail.doubt("turned")


@pytest.mark.slow
@pytest.mark.parametrize(("sign", "claim"), [(1, "turned"), (-1, "still gaining")])
def test_what_few_prompts_undo_is_neither_a_turn_nor_a_gain(sign, claim):
    """Three of a hundred prompts gain 9.7 and the others lose 0.3, so that nothing changes; or the other way round."""
    runs, claimed = 80, 0
    for seed in range(runs):
        watch, rng = Watch(300, num_looks=20, limit=LIMIT), np.random.default_rng(seed)
        for number in range(1, 21):
            _, num_pairs = watch.begin(10 * number, 0.2 * number)
            rises = sign * np.where(rng.random(num_pairs) < 0.03, 9.7, -0.3)
            look = judge_all(watch, rises + 1.2 * rng.normal(size=num_pairs))
            if claim in look.reason and "unclear" not in look.reason:
                claimed += 1
                break
            if look.action == "stop":
                break
    assert claimed / runs <= 0.05 + 2 * (0.05 * 0.95 / runs) ** 0.5, claimed / runs


def curve():
    found = GainCurve()
    for kl, (later, earlier, difference, variance) in zip(KLS, SEEN, strict=True):
        assert found.add_checkpoint(kl) == later
        found.compare(later, earlier, difference, variance)
    return found


def dense():
    """By the information form, from the definition of each kernel."""
    roots = np.sqrt(np.array([0.0, *KLS]))
    along = np.cumsum(np.abs(np.diff(roots)))
    prior = np.zeros((5, 5))
    for i, s in enumerate(along):
        for j, t in enumerate(along):
            grid = np.linspace(0, min(s, t), 4001)
            walk = np.trapezoid((s - grid) * (t - grid), grid)  # of an integrated random walk
            prior[i, j] = SLOPE**2 * s * t + BEND**2 * s**2 * t**2 + ROUGHNESS**2 * walk + OWN**2 * (i == j)
    precision = np.linalg.inv(prior)
    right = np.zeros(5)
    for later, earlier, difference, variance in SEEN:
        contrast = np.zeros(6)
        contrast[later], contrast[earlier] = 1, -1
        precision = precision + np.outer(contrast[1:], contrast[1:]) / variance
        right += contrast[1:] * difference / variance
    covariance = np.linalg.inv(precision)
    return covariance @ right, covariance


def test_the_posterior_is_the_dense_one():
    mean, covariance = curve().posterior()
    expected, spread = dense()
    assert mean[0] == 0
    assert (covariance[0] == 0).all()
    np.testing.assert_allclose(mean[1:], expected, atol=1e-7)
    np.testing.assert_allclose(covariance[1:, 1:], spread, atol=1e-7)
    alone = GainCurve()  # before anything is judged it is the prior
    alone.add_checkpoint(1.0)
    mean, covariance = alone.posterior()
    assert mean.tolist() == [0, 0]
    assert covariance[1, 1] == pytest.approx(SLOPE**2 + BEND**2 + ROUGHNESS**2 / 3 + OWN**2)
    assert alone.informative_reference([0]) == 0


def test_the_telling_reference_has_the_largest_square_fall():
    found = curve()
    found.add_checkpoint(3.0)
    mean, covariance = found.posterior()
    drawn = np.random.default_rng(0).multivariate_normal(mean, covariance, size=200_000)
    falls = (np.minimum(drawn[:, -1:] - drawn[:, :-1], 0) ** 2).mean(axis=0)
    assert found.informative_reference([0, 1, 2, 3, 4, 5]) == falls.argmax()
    among = [0, 3, 5]
    assert found.informative_reference(among) == among[int(falls[among].argmax())]


def test_the_best_is_cautious():
    found = GainCurve()
    for kl in (0.5, 1.0):
        found.add_checkpoint(kl)
    found.compare(1, 0, 0.30, 0.001)
    found.compare(2, 1, 0.02, 0.5)  # a little better, if it is: nearly nothing is known
    assert found.best([0, 1, 2], 0.0) == 2
    assert found.best([0, 1, 2], 1.0) == 1
    assert found.best([0, 2], 3.0) == 0
