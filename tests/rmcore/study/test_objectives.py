"""Objectives: the definitions of the evaluation by prompt, and the choice among several answers."""

import numpy as np
import pytest

from rmcore.core.errors import DataError
from rmcore.data.pair import PreferencePair
from rmcore.data.table import rewards_table
from rmcore.evaluation.ranking import mean_statistic, pair_means
from rmcore.evaluation.rewards import RewardTable
from rmcore.study.objectives import METRICS, Scores, require_objective, score
from rmcore.study.rungs import worse_p


def rewards_of(pairs, seed=0):
    return rewards_table(pairs, np.random.default_rng(seed).normal(size=(len(pairs), 2)).round(1))


@pytest.mark.parametrize("objective", METRICS)
def test_a_mean_over_pairs_is_that_of_the_evaluation_also_under_weights(gold_pairs, objective):
    frame = rewards_of(gold_pairs)
    found = score(objective, frame, beta=0.5)
    table = RewardTable.from_frame(frame, beta=0.5)
    [mean] = [one for one in pair_means(table) if one.name == METRICS[objective]]
    weights = np.random.default_rng(1).integers(0, 3, (7, table.num_prompts)).astype(float)
    weights[0] = 1
    np.testing.assert_allclose(found.weighted(weights), mean_statistic(mean, table.prompt, weights))
    assert found.value == pytest.approx(found.weighted(weights)[0])
    assert list(found.prompts) == sorted({pair.prompt_id for pair in gold_pairs})
    assert Scores.from_dict(found.to_dict()).value == found.value


def pairs_of(prompt, *sides):
    return [PreferencePair(prompt, better, worse) for better, worse in sides]


def test_the_best_of_several_answers_is_right_where_it_was_never_rejected():
    pairs = [
        *pairs_of("ranked", ("a", "b"), ("b", "c"), ("a", "c")),
        *pairs_of("two best", ("d", "f"), ("e", "f")),
        *pairs_of("one pair", ("g", "h")),
        *pairs_of("a circle", ("i", "j"), ("j", "i")),
    ]
    reward = {"a": 1.0, "b": 2.0, "c": 0.0, "d": 0.5, "e": 1.0, "f": 0.9, "g": 0.0, "h": 1.0, "i": 1.0, "j": 0.0}

    def found(**changes):
        given = reward | changes
        table = rewards_table(pairs, np.array([[given[pair.chosen], given[pair.rejected]] for pair in pairs]))
        return score("best-of-k", table, pairs)

    assert found().value == 0.5  # b, which a beat, is the best scored of its prompt; e was never rejected
    assert found(a=3.0).value == 1.0
    assert found(a=2.0).value == 0.75  # a and b share the point
    assert found(e=0.0, d=0.0).value == 0.0
    assert found().counts.sum() == 2
    assert len(found().prompts) == 4


def test_an_objective_that_no_trial_can_report_is_refused(gold_pairs):
    single = list({pair.prompt_id: pair for pair in gold_pairs}.values())
    for objective in ("accuracy", "loss", "length-matched", "best-of-k"):
        require_objective(objective, gold_pairs)
        with pytest.raises(DataError, match=r"raise data.validation_fraction"):
            require_objective(objective, [])
    with pytest.raises(DataError, match=r"objective best-of-k.*no prompt has more than one pair.*another --objective"):
        require_objective("best-of-k", single)
    unequal = [PreferencePair(f"p{number}", "x" * 100, "y") for number in range(12)]
    with pytest.raises(DataError, match=r"objective length-matched.*about the same length"):
        require_objective("length-matched", unequal)
    require_objective("accuracy", unequal)
    by_prompt = {pair.prompt_id: pair for pair in gold_pairs}
    with pytest.raises(DataError, match="pairs of 9 of the validation prompts, and fewer than 10"):
        require_objective("accuracy", list(by_prompt.values())[:9])
    require_objective("accuracy", list(by_prompt.values())[:10])


@pytest.mark.parametrize("objective", ["accuracy", "length-matched"])
def test_a_trial_whose_rewards_tie_is_worth_a_guess_on_those_pairs(objective):
    """Were ties left out, a model that tells one pair from 200 would beat one that ranks 170 of them right."""
    pairs = [pair for number in range(200) for pair in pairs_of(f"prompt {number}", ("a", "b"))]
    tied, told = np.ones((200, 2)), np.ones((200, 2))
    tied[0, 0] = 2.0
    told[:170, 0], told[170:, 1] = 2.0, 2.0
    collapsed, useful = (score(objective, rewards_table(pairs, rewards)) for rewards in (tied, told))
    assert collapsed.value == pytest.approx((1 + 199 / 2) / 200)
    assert useful.value == pytest.approx(0.85)
    assert worse_p(collapsed, useful, higher=True) < 0.001
