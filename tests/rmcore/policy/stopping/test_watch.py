"""The watch: what ends a training, what does not, what is kept, and that it goes on as if never stopped."""

import json

import numpy as np
import pytest

from rmcore.config.rlhf import WatchConfig
from rmcore.policy.stopping.watch import FEWEST_TO_LEARN, Watch

LOOKS, LIMIT = 12, 3.0


def look_at(watch, number, kl, rise, rng, follows=0.7):
    """One look at a checkpoint that is better than number k by rise(k)."""
    shape = (watch.num_pairs(), watch.settings.candidates)
    reference = watch.begin(10 * number, kl)
    noise = rng.normal(size=shape) * 2**0.5
    judged = np.clip(
        rise(reference) + follows * noise + (1 - follows**2) ** 0.5 * rng.normal(size=shape), -LIMIT, LIMIT
    )
    chosen = watch.chooser.choose(noise, np.abs(noise), rng)
    for group, place in enumerate(chosen.places):
        if not watch.see(chosen, group, float(judged[group, int(place)])):
            break
    return watch.end()


def trained(gain, labels=800, seed=0, can_lower_kl=False, **settings):
    """A training whose gold gain is a function of the nats; the watch and its looks."""
    watch = Watch(
        WatchConfig(labels=labels, **settings), num_looks=LOOKS, limit=LIMIT, can_lower_kl=can_lower_kl,
        can_refresh=True,
    )  # fmt: skip
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


def test_alarms_on_a_plateau_are_as_rare_as_promised():
    """The hardest case of "gold never falls"; all that is learned on the way may be used to bet."""
    runs = 120
    false = sum(
        look.turned >= look.needed for seed in range(runs) for look in [trained(lambda kl: 0.0, 400, seed)[1][-1]]
    )
    assert false / runs <= 0.05 + 2 * (0.05 * 0.95 / runs) ** 0.5


def refreshed(second, labels=1200, seed=0, refreshes=1):
    """A training that falls from the start; once the reward model is refreshed, gold goes by a function of the nats
    since the checkpoint that it goes on from.
    """
    settings = WatchConfig(labels=labels, refreshes=refreshes)
    watch = Watch(settings, num_looks=LOOKS, limit=LIMIT, can_refresh=True)
    rng, looks, true, kl = np.random.default_rng(seed), [], [0.0], 0.0
    origin = None
    for number in range(1, LOOKS + 1):
        kl += 0.5
        true.append(-0.5 * kl if origin is None else true[origin] + second(kl - watch.kls[origin]))
        looks.append(look_at(watch, number, kl, lambda k: true[-1] - true[k], rng))
        if looks[-1].action == "refresh":
            origin = looks[-1].best
            kl = watch.kls[origin]
        if looks[-1].action == "stop":
            break
    return watch, looks, true


def test_where_gold_turns_it_may_go_back_to_the_best_and_on_from_there():
    _, looks, true = refreshed(lambda nats: 0.5 * nats)
    (turn,) = [look for look in looks if look.action == "refresh"]
    assert "gold has turned" in turn.reason
    assert "learns from" in turn.reason
    assert turn.best == 0
    assert len(looks) == LOOKS
    after = [look for look in looks if look.number > turn.number]
    on_the_way = {turn.best, *range(turn.number + 1, LOOKS + 1)}
    assert {look.reference for look in after} <= on_the_way
    assert {look.best for look in after} <= on_the_way
    assert true[looks[-1].best] > 0.8
    mean, spread = np.array(looks[-1].gains[-1])
    assert mean == pytest.approx(true[-1], abs=4 * spread)


def test_what_turns_again_ends_when_no_refresh_is_left():
    watch, looks, _ = refreshed(lambda nats: -0.5 * nats)
    assert [look.action for look in looks if look.action != "go_on"] == ["refresh", "stop"]
    assert watch.refreshes_left == 0
    share = np.log(2 / WatchConfig().level)  # each reward model has half of the level, whatever there was before
    assert [look.needed for look in looks] == [pytest.approx(share)] * len(looks)


def test_too_few_judged_pairs_refresh_nothing():
    _, looks, _ = refreshed(lambda nats: 0.5 * nats, labels=48)
    assert all(look.action == "go_on" or "too few" in look.reason for look in looks)


def test_a_turn_that_is_seen_at_once_is_judged_on_until_a_reward_model_can_learn_from_it():
    """A crash convinces after a dozen pairs; the look has more, and the reward model is to learn."""
    settings = WatchConfig(labels=1200, refreshes=1)
    watch = Watch(settings, num_looks=LOOKS, limit=LIMIT, can_refresh=True)
    look = look_at(watch, 1, 3.0, lambda k: -2.5, np.random.default_rng(0))
    assert look.action == "refresh"
    assert look.num_pairs == FEWEST_TO_LEARN < 1200 // 2 // LOOKS
    ended = Watch(settings.model_copy(update={"refreshes": 0}), num_looks=LOOKS, limit=LIMIT)
    assert look_at(ended, 1, 3.0, lambda k: -2.5, np.random.default_rng(0)).num_pairs < FEWEST_TO_LEARN


def test_pairs_that_teach_nothing_are_not_counted():
    watch = Watch(WatchConfig(labels=1200, refreshes=1), num_looks=LOOKS, limit=LIMIT, can_refresh=True)
    watch.begin(10, 1.0)
    rng, count = np.random.default_rng(0), watch.num_pairs()
    doubt = np.ones((count, watch.settings.candidates))
    chosen = watch.chooser.choose(0 * doubt, doubt, rng)
    for pair in range(count):
        watch.see(chosen, pair, -3.0, teaches=pair % 2 == 0)
    look = watch.end()
    assert (look.action, look.num_pairs) == ("stop", count)
    assert f"{count // 2} judged pairs are too few" in look.reason


def test_what_an_earlier_reward_model_has_spoilt_is_no_evidence_against_the_next_one():
    """Back at a checkpoint that is not the best in truth: what follows stands still, and neither ends."""
    settings = WatchConfig(labels=6000, refreshes=1)
    watch = Watch(settings, num_looks=2 * LOOKS, limit=LIMIT, can_refresh=True)
    rng, true, kl = np.random.default_rng(1), [0.0], 0.0
    looks, origin = [], None
    for number in range(1, 2 * LOOKS + 1):
        kl += 0.4
        true.append(0.5 * min(kl, 0.8) - 0.6 * max(kl - 0.8, 0.0) if origin is None else true[origin])
        looks.append(look_at(watch, number, kl, lambda k: true[-1] - true[k], rng))
        if looks[-1].action == "refresh":
            origin = looks[-1].best
            kl = watch.kls[origin]
        assert looks[-1].action != "stop" or origin is not None
        if looks[-1].action == "stop":
            break
    (turn,) = [look for look in looks if look.action == "refresh"]
    after = [look for look in looks if look.number > turn.number]
    assert {look.reference for look in after} <= {turn.best, *range(turn.number + 1, 2 * LOOKS + 1)}
    assert all(look.turned < look.needed for look in after)
    assert all(look.stopped == 0.0 for look in after[:2])  # too early to say that it has stopped


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
    watch = Watch(WatchConfig(labels=800), num_looks=LOOKS, limit=LIMIT, can_refresh=True)
    for number in range(1, len(looks) + 1):
        state = json.loads(json.dumps(watch.to_dict()))
        watch = Watch(WatchConfig(labels=800), num_looks=LOOKS, limit=LIMIT)
        watch.restore(state)
        look = look_at(watch, number, kls[number], lambda k, n=number: gain(kls[n]) - gain(kls[k]), rng)
        assert look == looks[number - 1]
    assert watch.to_dict() == whole.to_dict()


def test_a_watch_on_its_second_way_goes_on_to_the_bit():
    """Written down and restored after every look, over a refresh."""
    settings = WatchConfig(labels=1200, refreshes=1)

    def walk(again):
        watch = Watch(settings, num_looks=LOOKS, limit=LIMIT, can_refresh=True)
        rng, looks, true, kl, origin = np.random.default_rng(2), [], [0.0], 0.0, None
        for number in range(1, LOOKS + 1):
            kl += 0.5
            true.append(-0.5 * kl if origin is None else true[origin] + 0.4 * (kl - watch.kls[origin]))
            looks.append(look_at(watch, number, kl, lambda k: true[-1] - true[k], rng))
            if looks[-1].action == "refresh":
                origin, kl = looks[-1].best, watch.kls[looks[-1].best]
            if again:
                state = json.loads(json.dumps(watch.to_dict()))
                watch = Watch(settings, num_looks=LOOKS, limit=LIMIT, can_refresh=True)
                watch.restore(state)
        return watch, looks

    (whole, looks), (again, others) = walk(again=False), walk(again=True)
    assert "refresh" in {look.action for look in looks}
    assert looks == others
    assert whole.to_dict() == again.to_dict()


def test_the_checkpoint_that_a_way_begins_at_is_never_forgotten():
    watch, looks, _ = refreshed(lambda nats: 0.5 * nats)
    (turn,) = [look for look in looks if look.action == "refresh"]
    watch.forget(2)
    assert {0, turn.best} <= set(watch.kept)


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


def test_a_refreshed_reward_model_is_compared_from_where_its_way_begins():
    """Even where the curve holds an earlier checkpoint for far better, which would show a fall at once."""
    watch = Watch(WatchConfig(labels=1200, refreshes=1), num_looks=LOOKS, limit=LIMIT, can_refresh=True)
    rng, true = np.random.default_rng(0), [0.0, 0.6, 1.4, -2.0]
    looks = [look_at(watch, n, 0.5 * n, lambda k, n=n: true[n] - true[k], rng) for n in (1, 2, 3)]
    assert [look.action for look in looks] == ["go_on", "go_on", "refresh"]
    assert looks[-1].best == 2
    watch.curve.compare(1, 0, 4.0, 1e-4)
    watch.curve.compare(1, 2, 2.5, 1e-4)
    assert watch.curve.best(watch.kept, 0.0) == 1
    for number in (4, 5, 6):
        assert watch.begin(10 * number, 0.5 * number) in {2, *range(4, number)}
        watch.end()
