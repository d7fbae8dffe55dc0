"""Choosing among logged answers: exact, blind to what must not matter, and no claim without reason."""

from itertools import combinations

import numpy as np
import pandas as pd
import pytest

from logged_sample import pairs_of, record, table
from rmcore.data.pair import PreferencePair
from rmcore.evaluation.uncertainty import ends
from rmcore.readiness.logged_answers import MIN_PROMPTS, LoggedPool, best_of_logged, logged_answers, logged_table


def pools(rng, num_prompts, quality, sizes=(5, 10)):
    """Prompts of a population; rewards are quality x strength + noise."""
    drawn = []
    for index in range(num_prompts):
        size = int(rng.integers(sizes[0], sizes[1] + 1))
        strength = rng.normal(size=size)
        rewards = quality * strength + rng.normal(size=size)
        drawn.append(LoggedPool(str(index), rewards, strength, rng.integers(20, 900, size).astype(float), True))
    return drawn


def by_enumeration(chosen_by, strength, k):
    """Win rate and expected strength of the best of k over all draws of k and one opponent; ties share."""
    wins, picked = [], []
    for opponent in range(len(strength)):
        for draw in combinations([place for place in range(len(strength)) if place != opponent], k):
            best = [place for place in draw if chosen_by[place] == max(chosen_by[list(draw)])]
            picked.append(np.mean(strength[best]))
            wins.append(np.mean([(1 + np.sign(strength[place] - strength[opponent])) / 2 for place in best]))
    return np.mean(wins), np.mean(picked)


@pytest.mark.parametrize("margins", [True, False])
def test_the_numbers_are_those_of_enumerating_every_draw(margins):
    rng = np.random.default_rng(3)
    parts, expected = [], []
    for index, size in enumerate((4, 5, 6)):
        strength = np.sort(rng.normal(size=size)) if margins else np.arange(size) * 1.0
        rewards = np.round(strength + rng.normal(size=size))  # with ties
        lengths = rng.integers(20, 24, size) * 1.0
        # A chain of neighbours: outcomes give back the ranks.
        pairs = [(place, place + 1) for place in range(size - 1)]
        parts.append(pairs_of(strength, rewards, lengths, pairs, prompt=str(index), margins=margins))
        expected.append((strength - strength.mean(), rewards, lengths))
    found = logged_answers(pd.concat(parts), num_resamples=10)
    deviation = np.sqrt(sum(s @ s for s, _, _ in expected) / sum(len(s) - 1 for s, _, _ in expected))
    (choice,) = found["choices"]
    model = [by_enumeration(rewards, strength, 2) for strength, rewards, _ in expected]
    longest = [by_enumeration(lengths, strength, 2) for strength, _, lengths in expected]
    perfect = [by_enumeration(strength, strength, 2) for strength, _, _ in expected]
    assert choice["win_rate"]["value"] == pytest.approx(np.mean([win for win, _ in model]))
    assert choice["gain"]["value"] == pytest.approx(np.mean([gain for _, gain in model]) / deviation)
    assert choice["longest_win_rate"]["value"] == pytest.approx(np.mean([win for win, _ in longest]))
    assert choice["over_longest"]["value"] == pytest.approx(
        choice["win_rate"]["value"] - choice["longest_win_rate"]["value"]
    )
    assert choice["perfect_win_rate"] == pytest.approx(np.mean([win for win, _ in perfect]))
    assert choice["perfect_gain"] == pytest.approx(np.mean([gain for _, gain in perfect]) / deviation)
    assert found["strength"] == ("annotated margins" if margins else "outcomes")


def test_an_answer_is_one_answer_however_often_it_was_compared():
    """And scored: in another batch its reward differs by rounding."""
    data = table(0.7)
    again = data.assign(reward_chosen=data["reward_chosen"] + 1e-9, reward_rejected=data["reward_rejected"] - 1e-9)
    found, doubled = logged_answers(data, num_resamples=50), logged_answers(pd.concat([data, again]), num_resamples=50)
    assert doubled["num_answers"] == found["num_answers"]
    assert doubled["num_pairs"] == 2 * found["num_pairs"]
    assert [row["win_rate"] for row in doubled["choices"]] == [row["win_rate"] for row in found["choices"]]


def test_prompts_with_too_few_connected_answers_are_counted():
    three = pairs_of(np.arange(3.0), np.arange(3.0), [9] * 3, [(0, 1), (1, 2), (0, 2)], prompt="three")
    apart = pairs_of(np.arange(6.0), np.arange(6.0), [9] * 6, [(0, 1), (2, 3), (4, 5)], prompt="apart")
    four = pairs_of(np.arange(4.0), np.arange(4.0), [9] * 4, [(0, 1), (1, 2), (2, 3)], prompt="four")
    assert logged_answers(pd.concat([three, apart])) is None
    found = logged_answers(pd.concat([three, apart, four]))
    assert (found["num_prompts"], found["num_left_out"], found["num_answers"]) == (1, 2, 4)
    again = four.assign(prompt="again", prompt_id="again")  # the same texts are other answers there
    assert logged_answers(pd.concat([four, again]))["num_answers"] == 8


def test_labels_that_go_round_in_a_circle_are_left_out_and_counted():
    circle = pairs_of(np.arange(4.0), np.arange(4.0), [9] * 4, [(1, 0), (2, 1), (3, 2)], prompt="circle", margins=False)
    closing = circle.iloc[[0]].assign(chosen=circle["rejected"].iloc[0], rejected=circle["chosen"].iloc[2])
    circle = pd.concat([circle, closing])
    assert logged_answers(circle) is None
    found = logged_answers(pd.concat([circle, table()]), num_resamples=10)
    assert (found["num_undecided"], found["num_left_out"], found["num_prompts"]) == (1, 0, 40)


@pytest.mark.slow
def test_margins_count_only_where_all_pairs_of_a_prompt_have_one_that_agrees_with_its_label():
    kinds = {"annotated margins": lambda margin: margin, "outcomes": lambda margin: margin * np.nan}
    for kind, change in kinds.items():
        data = table()
        changed = data.assign(target_margin=change(data["target_margin"]))
        assert logged_answers(changed, num_resamples=10)["strength"] == kind
    for odd in (np.nan, -1.0):
        data = table()
        data.loc[0, "target_margin"] = odd
        mixed = logged_answers(data, num_resamples=10)
        assert mixed["strength"] == "mixed"
        # The unit of margins is no matter of outcomes'.
        scaled = logged_answers(data.assign(target_margin=1000 * data["target_margin"]), num_resamples=10)
        assert scaled["choices"][0]["gain"] == pytest.approx(mixed["choices"][0]["gain"])


def test_what_nothing_claimed_means_is_told():
    one = record(5.0, num_prompts=1, sizes=(9, 9))
    assert one["choices"][0]["win_rate"]["ci_low"] is None
    assert (one["best_k"], one["outcome"]) == (None, "too_few")
    assert record(5.0, num_prompts=MIN_PROMPTS - 1, sizes=(9, 9))["outcome"] == "too_few"
    for quality, outcome in ((5.0, "claimed"), (0.0, "open"), (-5.0, "refuted")):
        assert record(quality, num_prompts=MIN_PROMPTS, sizes=(9, 9))["outcome"] == outcome


def test_prompts_of_one_conversation_are_one_piece_of_evidence():
    data = table(5.0, num_prompts=MIN_PROMPTS)
    assert logged_answers(data, num_resamples=100)["best_k"] is not None
    one_talk = data.assign(prompt_id=data["prompt_id"].replace("prompt 1", "prompt 0"))
    found = logged_answers(one_talk, num_resamples=100)
    assert found["best_k"] is None
    assert found["choices"][0]["num_prompts"] == MIN_PROMPTS


def test_pairs_meet_their_rewards_and_those_without_are_left_out():
    pairs = [
        PreferencePair("p", "a", "b", target_margin=1.0),
        PreferencePair("p", "c", "d"),
        PreferencePair("q", "e", "f"),
    ]
    rewards = pd.DataFrame(
        {"pair_id": [pairs[2].pair_id, pairs[0].pair_id], "reward_chosen": [5.0, 1.0], "reward_rejected": [6.0, 2.0]}
    )
    found = logged_table(pairs, rewards)
    assert found["chosen"].tolist() == ["a", "e"]
    assert found["reward_chosen"].tolist() == [1.0, 5.0]
    assert found["target_margin"].isna().tolist() == [False, True]
    assert found["prompt_id"].tolist() == [pairs[0].prompt_id, pairs[2].prompt_id]


@pytest.mark.slow
def test_intervals_hold_the_truth_as_often_as_they_say():
    """150 samples of 25 prompts; the truth is that of the population, from 3,000 of its prompts."""
    rng = np.random.default_rng(0)
    settings = {"num_resamples": 200, "seed": 0}
    truth = best_of_logged(pools(rng, 3000, 0.7, (6, 8)), num_resamples=1, seed=0)["choices"]
    held = {(row["k"], name): 0 for row in truth for name in ("win_rate", "over_longest")}
    num = 150
    for _ in range(num):
        for row, true in zip(best_of_logged(pools(rng, 25, 0.7, (6, 8)), **settings)["choices"], truth, strict=True):
            for name in ("win_rate", "over_longest"):
                held[row["k"], name] += ends(row[name])[0] <= true[name]["value"] <= ends(row[name])[1]
    # Four standard errors of the binomial, and a point for the percentile interval at 25 prompts.
    for key, count in held.items():
        assert abs(count / num - 0.95) < 4 * np.sqrt(0.95 * 0.05 / num) + 0.01, (key, count / num)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["normal", "one winner"])
def test_a_model_that_knows_nothing_is_seldom_believed(kind):
    """The chance of any claim over all k, at the fewest prompts that allow one; 2.5 % is what a single test has."""
    rng = np.random.default_rng(7)
    num, claims = 250, 0
    for seed in range(num):
        drawn = pools(rng, MIN_PROMPTS, 0.0, sizes=(5, 9))
        if kind == "one winner":  # as where a chosen answer was compared with each of the others
            drawn = [
                LoggedPool(p.prompt_id, p.rewards, (np.arange(len(p.rewards)) == 0) * 1.0, p.lengths, False)
                for p in drawn
            ]
        claims += best_of_logged(drawn, num_resamples=200, seed=seed)["best_k"] is not None
    assert claims / num < 0.025 + 3 * np.sqrt(0.025 * 0.975 / num)


def test_a_later_k_is_not_claimed_past_one_that_failed():
    """Good in the prompts with many answers, blind in the others: k = 2 fails, so k = 8 says nothing."""
    rng = np.random.default_rng(0)
    many, few = pools(rng, 15, 3.0, sizes=(9, 9)), pools(rng, 400, -0.4, sizes=(4, 4))
    few = [LoggedPool(f"few {p.prompt_id}", p.rewards, p.strength, p.lengths, True) for p in few]
    found = best_of_logged([*many, *few], num_resamples=200, seed=0)
    assert ends(found["choices"][2]["win_rate"])[0] > 0.5
    assert found["best_k"] is None
    assert "best of 2" in found["stopped"]
