"""Credit: the algebra of the modes, and refusals that name the rollout."""

import copy
import inspect
import math
from collections import defaultdict
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rmcore.data.pair import Message
from rmcore.errors import ConfigError, DataError
from rmcore.rl.credit import (
    GroupNormalizedCredit,
    LengthCredit,
    MetaCredit,
    RewardModelCreditAssigner,
    require_raw,
)
from rmcore.serving.scorer import RewardModelScorer, Rollout, Step

MODERATE = st.floats(-1e6, 1e6)
WEIGHTS = st.floats(0, 1)
METAS = st.lists(
    st.fixed_dictionaries(
        {"b": MODERATE, "rm_score": MODERATE, "num_tokens": st.integers(0, 4096), "prompt_id": st.sampled_from("xyz")}
    ),
    max_size=8,
)
B = MetaCredit("b")
NO_NUMBERS = [
    math.nan,
    math.inf,
    -math.inf,
    None,
    True,
    False,
    "1.5",
    [1.0],
    10**400,
    np.bool_(True),
    np.float32("nan"),
]

ASSIGNERS = [
    RewardModelCreditAssigner(),
    RewardModelCreditAssigner(B, mode="add"),
    RewardModelCreditAssigner(B, mode="multiply"),
    RewardModelCreditAssigner(B, mode="weighted", weight=0.3),
    RewardModelCreditAssigner(B, mode="bonus", weight=-2.0),
    RewardModelCreditAssigner(LengthCredit(0.01), mode="add"),
    B,
    LengthCredit(0.5),
    GroupNormalizedCredit(B, "prompt_id"),
    GroupNormalizedCredit(RewardModelCreditAssigner(B, mode="add"), "prompt_id"),
    RewardModelCreditAssigner(GroupNormalizedCredit(B, "prompt_id"), mode="bonus", weight=0.1),
]
PER_ROLLOUT = ASSIGNERS[:8]


def rollouts(metas):
    return [Rollout([Step(prompt=f"question {index}", completion="c")], meta) for index, meta in enumerate(metas)]


def joined(metas, mode, weight=None, inner=B):
    return RewardModelCreditAssigner(inner, mode=mode, weight=weight).assign(rollouts(metas))


class Gives:
    """An assigner of somebody else's that answers what it was told to."""

    normalized = False

    def __init__(self, answer):
        self.answer = answer
        self.asked = 0

    def assign(self, asked):
        self.asked += 1
        return self.answer


@pytest.mark.parametrize(
    ("mode", "weight", "credit"),
    [("add", None, 8.0), ("multiply", None, 15.0), ("weighted", 0.25, 3.5), ("bonus", 0.25, 4.25)],
)
def test_the_modes_are_those_of_the_specification(mode, weight, credit):
    assert joined([{"b": 3.0, "rm_score": 5.0}], mode, weight) == [credit]


@given(METAS)
def test_without_an_inner_the_score_is_the_credit(metas):
    assert RewardModelCreditAssigner().assign(rollouts(metas)) == [meta["rm_score"] for meta in metas]
    assert RewardModelCreditAssigner(score_key="b").assign(rollouts(metas)) == B.assign(rollouts(metas))


@given(METAS)
def test_the_ends_of_a_weight_are_its_two_sides(metas):
    assert joined(metas, "weighted", 1) == RewardModelCreditAssigner().assign(rollouts(metas))
    assert joined(metas, "weighted", 0) == B.assign(rollouts(metas))
    assert joined(metas, "bonus", 0) == B.assign(rollouts(metas))
    assert joined(metas, "bonus", 1) == joined(metas, "add")


@given(METAS, WEIGHTS)
def test_a_weighted_credit_lies_between_value_and_score_and_swaps_with_them(metas, weight):
    credits = joined(metas, "weighted", weight)
    for meta, credit in zip(metas, credits, strict=True):
        slack = 1e-9 * (1 + abs(meta["b"]) + abs(meta["rm_score"]))
        low, high = sorted([meta["b"], meta["rm_score"]])
        assert low - slack <= credit <= high + slack
    swapped = RewardModelCreditAssigner(MetaCredit("rm_score"), mode="weighted", weight=1 - weight, score_key="b")
    assert swapped.assign(rollouts(metas)) == pytest.approx(credits, rel=1e-9, abs=1e-6)


@given(METAS, st.floats(-10, 10), st.floats(-10, 10))
def test_bonuses_add_up(metas, first, second):
    inner = RewardModelCreditAssigner(B, mode="bonus", weight=first)
    assert joined(metas, "bonus", second, inner) == pytest.approx(
        joined(metas, "bonus", first + second), rel=1e-9, abs=1e-6
    )


@given(METAS)
def test_value_and_score_are_alike_to_a_sum_and_a_product(metas):
    for mode in ("add", "multiply"):
        swapped = RewardModelCreditAssigner(MetaCredit("rm_score"), mode=mode, score_key="b")
        assert swapped.assign(rollouts(metas)) == joined(metas, mode)


@given(METAS)
def test_zero_and_one_are_neutral_where_they_should_be(metas):
    scores = RewardModelCreditAssigner().assign(rollouts(metas))
    assert joined([meta | {"b": 0.0} for meta in metas], "add") == scores
    assert joined([meta | {"b": 1.0} for meta in metas], "multiply") == scores


@given(METAS, st.floats(0, 100))
def test_length_costs_in_proportion_and_never_pays(metas, per_token):
    prices = LengthCredit(per_token).assign(rollouts(metas))
    assert all(price <= 0 for price in prices)
    doubled = [meta | {"num_tokens": 2 * meta["num_tokens"]} for meta in metas]
    assert LengthCredit(per_token).assign(rollouts(doubled)) == [2 * price for price in prices]
    assert LengthCredit(per_token, key="n").assign(rollouts([{"n": 1}, {"n": 0}])) == [-per_token, 0.0]


@given(METAS, st.randoms(use_true_random=False))
@pytest.mark.parametrize("assigner", ASSIGNERS, ids=lambda assigner: repr(assigner)[:60])
def test_credit_follows_its_rollout_wherever_it_stands(assigner, metas, random):
    order = list(range(len(metas)))
    random.shuffle(order)
    credits = assigner.assign(rollouts(metas))
    assert assigner.assign([rollouts(metas)[index] for index in order]) == [credits[index] for index in order]


@given(METAS, st.integers(0, 8))
@pytest.mark.parametrize("assigner", PER_ROLLOUT, ids=lambda assigner: repr(assigner)[:60])
def test_a_raw_credit_does_not_depend_on_the_other_rollouts(assigner, metas, cut):
    assert assigner.assign(rollouts(metas[:cut])) + assigner.assign(rollouts(metas[cut:])) == assigner.assign(
        rollouts(metas)
    )


@given(METAS)
@pytest.mark.parametrize("assigner", ASSIGNERS, ids=lambda assigner: repr(assigner)[:60])
def test_rollouts_stay_as_they_are(assigner, metas):
    asked = rollouts(metas)
    before = copy.deepcopy(asked)
    assigner.assign(asked)
    assert asked == before


@pytest.mark.parametrize("assigner", ASSIGNERS, ids=lambda assigner: repr(assigner)[:60])
def test_a_meta_that_invents_what_it_lacks_is_not_made_to(assigner):
    """Reading meta[key] of a defaultdict would write 0.0, which then passes for a score."""
    meta = defaultdict(float)
    with pytest.raises(DataError, match="rollout 0"):
        assigner.assign(rollouts([meta]))
    assert dict(meta) == {}


@pytest.mark.parametrize("assigner", ASSIGNERS, ids=lambda assigner: repr(assigner)[:60])
def test_no_rollouts_have_no_credits(assigner):
    assert assigner.assign([]) == []


def test_no_rollouts_ask_no_inner():
    inner = Gives(None)
    assert RewardModelCreditAssigner(inner, mode="add").assign([]) == []
    assert GroupNormalizedCredit(inner, "prompt_id").assign([]) == []
    assert inner.asked == 0


def test_numbers_of_numpy_and_fractions_become_floats():
    kinds = [np.float32(1.5), np.float64(2.5), np.int64(3), 4, Fraction(1, 2)]
    credits = B.assign(rollouts([{"b": number} for number in kinds]))
    assert credits == [1.5, 2.5, 3.0, 4.0, 0.5]
    assert {type(credit) for credit in credits} == {float}


def test_the_scorer_and_the_credit_agree_where_the_score_is():
    scorer = inspect.signature(RewardModelScorer).parameters["score_key"].default
    assert RewardModelCreditAssigner().assign(rollouts([{scorer: 2.0}])) == [2.0]


@pytest.mark.parametrize(
    ("inner", "settings", "match"),
    [
        (B, {}, "mode='replace', inner=MetaCredit.* would ignore an inner"),
        (None, {"mode": "add"}, "mode='add', inner=None: .* a join needs one"),
        (None, {"mode": "multiply"}, "mode='multiply', inner=None"),
        (None, {"mode": "weighted", "weight": 0.5}, "mode='weighted', inner=None"),
        (None, {"mode": "bonus", "weight": 0.5}, "mode='bonus', inner=None"),
        (None, {"weight": 0.5}, "mode='replace' would ignore weight=0.5"),
        (B, {"mode": "add", "weight": 1.0}, "mode='add' would ignore weight=1.0"),
        (B, {"mode": "multiply", "weight": 0.0}, "mode='multiply' would ignore weight=0.0"),
        (B, {"mode": "weighted"}, r"weight=None: mode='weighted' needs the w .* in \[0, 1\]"),
        (B, {"mode": "bonus"}, "weight=None: mode='bonus' needs the c"),
        (B, {"mode": "weighted", "weight": 1.1}, "weight=1.1"),
        (B, {"mode": "weighted", "weight": -0.1}, "weight=-0.1"),
        (B, {"mode": "mean"}, "mode='mean' is not known; name one of replace, add, multiply, weighted, bonus"),
    ],
)
def test_settings_that_lack_or_ignore_something_are_refused(inner, settings, match):
    with pytest.raises(ConfigError, match=match):
        RewardModelCreditAssigner(inner, **settings)


@pytest.mark.parametrize("value", [value for value in NO_NUMBERS if value is not None])
def test_settings_that_are_no_finite_numbers_are_refused(value):
    for mode in ("weighted", "bonus"):
        with pytest.raises(ConfigError, match=f"weight=.*{mode}"):
            RewardModelCreditAssigner(B, mode=mode, weight=value)
    with pytest.raises(ConfigError, match="per_token="):
        LengthCredit(value)


def test_length_is_not_paid_for():
    with pytest.raises(ConfigError, match=r"per_token=-0\.01: a price is subtracted"):
        LengthCredit(-0.01)


READERS = {
    "rm_score": [assigner for assigner in ASSIGNERS if "RewardModel" in repr(assigner)],
    "b": [assigner for assigner in ASSIGNERS if "key='b'" in repr(assigner)],
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
        B.assign(asked)
    assert len(str(caught.value)) < 400
    with pytest.raises(DataError, match=r"rollout 0 of the list \(prompt '', meta of \['b'\]\) has no 'rm_score'"):
        RewardModelCreditAssigner().assign(asked[1:])


def test_a_score_still_on_a_device_is_refused_by_its_kind():
    with pytest.raises(DataError, match=r"has tensor\(1\.\) from meta\['rm_score'\]"):
        RewardModelCreditAssigner().assign(rollouts([{"rm_score": torch.tensor(1.0)}]))


@pytest.mark.parametrize("tokens", [-1, -0.5])
def test_a_negative_number_of_tokens_is_no_count(tokens):
    with pytest.raises(DataError, match=rf"rollout 1 .*question 1.* has {tokens} from meta\['num_tokens'\].* no count"):
        LengthCredit(0.1).assign(rollouts([{"num_tokens": 1}, {"num_tokens": tokens}]))


@pytest.mark.parametrize(
    "wrap",
    [lambda inner: RewardModelCreditAssigner(inner, mode="add"), lambda inner: GroupNormalizedCredit(inner, "g")],
    ids=["add", "group"],
)
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
def test_an_inner_that_answers_wrongly_is_named(wrap, answer, match):
    with pytest.raises(DataError, match=match):
        wrap(Gives(answer)).assign(rollouts([{"rm_score": 0.0, "g": 1}, {"rm_score": 0.0, "g": 1}]))


def test_an_inner_may_answer_with_an_array():
    asked = rollouts([{"rm_score": 1.0}, {"rm_score": 2.0}])
    assert RewardModelCreditAssigner(Gives(np.array([10.0, 20.0])), mode="add").assign(asked) == [11.0, 22.0]


def test_an_inner_is_not_asked_where_a_score_or_a_group_lacks():
    inner = Gives([0.0, 0.0])
    for assigner in (RewardModelCreditAssigner(inner, mode="add"), GroupNormalizedCredit(inner, "g")):
        with pytest.raises(DataError, match="rollout 1 "):
            assigner.assign(rollouts([{"rm_score": 0.0, "g": 1}, {}]))
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


@pytest.mark.parametrize("group", [None, math.nan, 1.0, ["x"], ("x",)])
def test_a_rollout_without_a_group_is_named(group):
    asked = rollouts([{"b": 1.0, "g": "x"}, {"b": 1.0, "g": group}])
    with pytest.raises(DataError) as caught:
        GroupNormalizedCredit(B, "g").assign(asked)
    message = str(caught.value)
    assert "rollout 1 of the list (prompt 'question 1', meta of ['b', 'g'])" in message
    assert f"has the group {group!r}" in message
    assert "a text or an integer as 'g'" in message


def test_credits_are_normalised_where_they_came_out_of_a_group():
    group = GroupNormalizedCredit(B, "prompt_id")
    raw = [RewardModelCreditAssigner(), B, LengthCredit(0.1), RewardModelCreditAssigner(B, mode="add")]
    for assigner in raw:
        assert not assigner.normalized
        require_raw(assigner)
    for assigner in (group, RewardModelCreditAssigner(group, mode="bonus", weight=0.1)):
        assert assigner.normalized
        with pytest.raises(ConfigError, match="TRL's GRPO normalises within the group itself") as caught:
            require_raw(assigner)
        assert type(assigner).__name__ in str(caught.value)
