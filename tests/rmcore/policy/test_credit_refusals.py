"""Rollouts and inner assigners that give no credit: refused, and named."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import credit_sample as world
from rmcore.core.errors import DataError
from rmcore.data.pair import Message
from rmcore.policy.grpo.credit import LengthCredit, RewardModelCreditAssigner
from rmcore.serving.scorer import Rollout, Step

B, ASSIGNERS, NO_NUMBERS, Gives, rollouts = world.B, world.ASSIGNERS, world.NO_NUMBERS, world.Gives, world.rollouts
READERS = {
    "rm_score": [assigner for assigner in ASSIGNERS if "RewardModel" in repr(assigner)],
    "num_tokens": [assigner for assigner in ASSIGNERS if "num_tokens" in repr(assigner)],
}
READS = [(key, assigner) for key, assigners in READERS.items() for assigner in assigners]


def some(place, change):
    metas = [{"b": 1.0, "rm_score": 2.0, "num_tokens": 3, "prompt_id": "x"} for _ in range(4)]
    metas[place] = change(metas[place])
    return rollouts(metas)


@given(place=st.integers(0, 3))
@pytest.mark.parametrize(("key", "assigner"), READS, ids=str)
def test_a_rollout_without_its_number_is_named(key, assigner, place):
    asked = some(place, lambda meta: {name: value for name, value in meta.items() if name != key})
    with pytest.raises(DataError) as caught:
        assigner.assign(asked)
    message = str(caught.value)
    assert f"rollout {place} of the list (prompt 'question {place}', meta of {list(asked[place].meta)})" in message
    assert f"has no '{key}'" in message
    assert ("RewardModelScorer(..., score_key='rm_score')" in message) == (key == "rm_score")
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("value", NO_NUMBERS, ids=lambda value: repr(value)[:20])
@pytest.mark.parametrize(("key", "assigner"), READS, ids=str)
def test_a_value_that_is_no_finite_number_is_named_and_shown(key, assigner, value):
    with pytest.raises(DataError) as caught:
        assigner.assign(some(2, lambda meta: meta | {key: value}))
    message = str(caught.value)
    assert "rollout 2 of the list (prompt 'question 2'" in message
    assert f"has {repr(value)[:60]} from meta['{key}'], no finite number. " in message


def test_a_message_stays_short_and_names_any_prompt():
    turns = [Message("system", "be brief"), Message("user", "why? " * 50)]
    asked = [Rollout([Step(prompt=turns, completion="c")], {"b": "much " * 1000}), Rollout([], {"b": 1.0})]
    with pytest.raises(DataError, match=r"rollout 0 of the list \(prompt 'be brief why\? why\?") as caught:
        RewardModelCreditAssigner(score_key="b").assign(asked)
    assert len(str(caught.value)) < 400
    with pytest.raises(DataError, match=r"rollout 0 of the list \(prompt '', meta of \['b'\]\) has no 'rm_score'"):
        RewardModelCreditAssigner().assign(asked[1:])


@pytest.mark.parametrize("tokens", [-1, -0.5])
def test_a_negative_number_of_tokens_is_no_count(tokens):
    with pytest.raises(DataError, match=rf"rollout 1 .*question 1.* has {tokens} from meta\['num_tokens'\].* no count"):
        LengthCredit(0.1).assign(rollouts([{"num_tokens": 1}, {"num_tokens": tokens}]))


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        ([], "Gives gave 0 values for 2 rollouts"),
        ([1.0], "Gives gave 1 values for 2 rollouts"),
        ([1.0, 2.0, 3.0], "Gives gave 3 values for 2 rollouts"),
        ([1.0, math.nan], "rollout 1 of the list .*question 1.* has nan from Gives, no finite number"),
        ([None, 1.0], "rollout 0 of the list .*question 0.* has None from Gives"),
        (np.array([1.0, -np.inf]), "rollout 1 of the list .* has .*-inf.* from Gives"),
    ],
)
def test_an_inner_that_answers_wrongly_is_named(answer, match):
    with pytest.raises(DataError, match=match):
        RewardModelCreditAssigner(Gives(answer), mode="add").assign(rollouts([{"rm_score": 0.0}, {"rm_score": 0.0}]))


def test_an_inner_is_not_asked_where_a_score_lacks():
    inner = Gives([0.0, 0.0])
    with pytest.raises(DataError, match="rollout 1 "):
        RewardModelCreditAssigner(inner, mode="add").assign(rollouts([{"rm_score": 0.0}, {}]))
    assert inner.asked == 0


@pytest.mark.parametrize(
    ("assigner", "source"),
    [
        (RewardModelCreditAssigner(B, mode="add"), "inf from mode='add'"),
        (RewardModelCreditAssigner(B, mode="multiply"), "inf from mode='multiply'"),
        (RewardModelCreditAssigner(B, mode="bonus", weight=-10.0), "-inf from mode='bonus'"),
        (LengthCredit(1e300, key="b"), "-inf from LengthCredit"),
    ],
)
def test_a_credit_beyond_any_float_is_refused(assigner, source):
    with pytest.raises(DataError, match=f"rollout 1 .*question 1.* has {source}"):
        assigner.assign(rollouts([{"b": 0.0, "rm_score": 0.0}, {"b": 1e308, "rm_score": 1e308}]))
