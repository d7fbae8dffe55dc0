"""The watch: what ends a training, what does not, what is kept, and that it goes on as if never stopped."""

import json

import numpy as np
import pytest

from rmcore.policy.stopping.bets import Bet
from rmcore.policy.stopping.watch import CANDIDATES, Staked, Watch

LOOKS, LIMIT = 12, 3.0


def look_at(watch, number, kl, rise, rng, follows=0.7):
    """One look at a checkpoint that is better than number k by rise(k)."""
    shape = (watch.num_pairs(), CANDIDATES)
    reference = watch.begin(10 * number, kl)
    noise = rng.normal(size=shape) * 2**0.5
    judged = np.clip(
        rise(reference) + follows * noise + (1 - follows**2) ** 0.5 * rng.normal(size=shape), -LIMIT, LIMIT
    )
    chosen = watch.chooser.choose(noise, rng)
    for group, place in enumerate(chosen.places):
        if not watch.see(chosen, group, float(judged[group, int(place)])):
            break
    return watch.end()


def trained(gain, labels=800, seed=0, **options):
    """A training whose gold gain is a function of the nats; the watch and its looks."""
    watch = Watch(labels, num_looks=LOOKS, limit=LIMIT, **options)
    rng, looks = np.random.default_rng(seed), []
    kls = np.linspace(0, 4, LOOKS + 1)
    for number in range(1, LOOKS + 1):
        looks.append(
            look_at(watch, number, kls[number], lambda k, n=number: float(gain(kls[n]) - gain(kls[k])), rng)
        )  # fmt: skip
        if looks[-1].action == "stop":
            break
    return watch, looks


def test_where_gold_crashes_it_goes_back_to_the_peak():
    watch, looks = trained(lambda kl: 0.6 * min(kl, 1.0) - 0.5 * max(kl - 1.0, 0.0))
    assert looks[-1].action == "stop"
    assert looks[-1].turned >= looks[-1].needed or looks[-1].stopped >= looks[-1].needed
    assert 0.6 <= watch.kls[looks[-1].best] <= 1.4
    assert watch.steps[looks[-1].best] < looks[-1].step
    assert watch.labels_used < 800


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
    assert watch.labels_used <= 800


@pytest.mark.slow
def test_alarms_on_a_plateau_are_as_rare_as_promised():
    """The hardest case of "gold never falls"; all that is learned on the way may be used to bet."""
    runs = 120
    false = sum(
        look.turned >= look.needed for seed in range(runs) for look in [trained(lambda kl: 0.0, 400, seed)[1][-1]]
    )
    assert false / runs <= 0.05 + 2 * (0.05 * 0.95 / runs) ** 0.5


@pytest.mark.slow
def test_prompts_that_are_few_end_the_evidence_and_are_not_asked_again():
    """Fifty groups of prompts for 2,400 labels: what the first labels of a prompt show, its later ones are bet on, and
    one watch in seven called a plateau a fall. Each prompt counts once.
    """
    false, runs, labels = 0, 100, 2400
    for seed in range(runs):
        watch = Watch(labels, num_looks=LOOKS, limit=LIMIT, num_prompts=50 * CANDIDATES)
        rng = np.random.default_rng(seed)
        own = rng.normal(
            size=50 * CANDIDATES
        )  # what each prompt has lost or gained; nothing on average over all prompts
        for number in range(1, LOOKS + 1):
            count = watch.num_pairs()
            first, watch.prompts_used = watch.prompts_used, watch.prompts_used + count * CANDIDATES
            assert watch.prompts_used <= len(own)
            watch.begin(10 * number, 0.3 * number)
            chosen = watch.chooser.choose(np.zeros((count, CANDIDATES)), rng)
            judged = own[first + CANDIDATES * np.arange(count) + chosen.places] + rng.normal(size=count)
            for pair in range(count):
                watch.see(chosen, pair, float(judged[pair]))
            look = watch.end()
        false += look.turned >= look.needed
        assert watch.labels_used <= 2 * 50
    assert false / runs <= 0.05 + 2 * (0.05 * 0.95 / runs) ** 0.5


def test_before_it_stops_it_lowers_the_distance_once():
    _, looks = trained(lambda kl: 0.4 * min(kl, 0.7), 3000, 3, can_lower_kl=True, useful_gain=0.3)
    actions = [look.action for look in looks if look.action != "go_on"]
    assert actions[0] == "lower_kl"
    assert actions.count("lower_kl") == 1
    assert "held at the distance" in next(look.reason for look in looks if look.action == "lower_kl")


def test_a_watch_that_was_written_down_goes_on_to_the_bit():
    def gain(kl):
        return 0.5 * kl - 0.12 * kl * kl

    whole, looks = trained(gain, seed=5)
    rng, kls = np.random.default_rng(5), np.linspace(0, 4, LOOKS + 1)
    watch = Watch(800, num_looks=LOOKS, limit=LIMIT)
    for number in range(1, len(looks) + 1):
        state = json.loads(json.dumps(watch.to_dict()))
        watch = Watch(800, num_looks=LOOKS, limit=LIMIT)
        watch.restore(state)
        look = look_at(watch, number, kls[number], lambda k, n=number: gain(kls[n]) - gain(kls[k]), rng)
        assert look == looks[number - 1]
    assert watch.to_dict() == whole.to_dict()


def test_what_is_forgotten_is_neither_compared_with_nor_kept():
    watch, looks = trained(lambda kl: 0.5 * kl)
    best = looks[-1].best
    watch.forget(4)
    assert len(watch.kept) == 4
    assert {0, best, LOOKS} <= set(watch.kept)
    assert watch.begin(999, 4.2) in watch.kept


def test_labels_are_shared_and_never_exceeded():
    watch, looks = trained(lambda kl: 0.5 * kl, labels=100)
    counts = [look.num_pairs for look in looks]
    assert watch.labels_used <= 100
    assert max(counts) - min(counts) <= 1


@pytest.mark.slow
@pytest.mark.parametrize(("side", "sign"), [("below", 1), ("above", -1)])
def test_a_bet_that_clipped_differences_win_is_doubted_where_the_tail_was_seen(side, sign):
    """Three of a hundred prompts gain 20 and the others lose 0.6, so the mean is 0 and the clipped one far below."""
    rng, won, doubted = np.random.default_rng(0), 0, 0
    for _ in range(40):
        bet, staked, seen = Bet(0.0, side, 0.05), Staked(LIMIT, 0), False
        for number in range(200):
            is_far = rng.random() < 0.03
            judged = sign * (20 * is_far - 0.6 + 1.2 * rng.normal())
            clipped = float(np.clip(judged, -LIMIT, LIMIT))
            bet.settle(clipped, expected=-0.4 * sign, spread=2.0, low=-LIMIT, high=LIMIT)
            staked.values.append(judged)
            staked.num_clipped += clipped != judged
            seen |= is_far
            if number % 50 == 49 and bet.won and seen:
                won, doubted = won + 1, doubted + (not staked.agrees(bet))
    assert won >= 40
    assert doubted >= 0.95 * won
    plain = Staked(LIMIT, 50, [-sign * 0.5] * 50)
    assert plain.agrees(Bet(0.0, side, 0.05))
    plain.values.pop()
    assert not plain.agrees(Bet(0.0, side, 0.05))
    assert "leave room for 5.9 % of all prompts" in plain.doubt("turned")


@pytest.mark.slow
@pytest.mark.parametrize(("sign", "claim"), [(1, "turned"), (-1, "still gaining")])
def test_what_few_prompts_undo_is_neither_a_turn_nor_a_gain(sign, claim):
    """Three of a hundred prompts gain 9.7 and the others lose 0.3, so that nothing changes; or the other way round."""
    runs, claimed = 150, 0
    for seed in range(runs):
        watch, rng = Watch(600, num_looks=20, limit=LIMIT), np.random.default_rng(seed)
        for number in range(1, 21):
            shape = (watch.num_pairs(), CANDIDATES)
            watch.begin(10 * number, 0.2 * number)
            noise = rng.normal(size=shape) * 2**0.5
            judged = sign * np.where(rng.random(shape) < 0.03, 9.7, -0.3) + 0.7 * noise + 0.7 * rng.normal(size=shape)
            chosen = watch.chooser.choose(noise, rng)
            for group, place in enumerate(chosen.places):
                if not watch.see(chosen, group, float(judged[group, int(place)])):
                    break
            look = watch.end()
            if claim in look.reason and "unclear" not in look.reason:
                claimed += 1
                break
            if look.action == "stop":
                break
    assert claimed / runs <= 0.05 + 2 * (0.05 * 0.95 / runs) ** 0.5, claimed / runs
