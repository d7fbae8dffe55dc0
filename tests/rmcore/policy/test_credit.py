"""Credit: the algebra of the modes, and settings that make no credit."""

import copy
import inspect
from collections import defaultdict
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import credit_sample as world
from rmcore.core.errors import ConfigError, DataError
from rmcore.policy.grpo.credit import LengthCredit, RewardModelCreditAssigner, require_raw
from rmcore.serving.scorer import RewardModelScorer

B, ASSIGNERS, NO_NUMBERS, rollouts = world.B, world.ASSIGNERS, world.NO_NUMBERS, world.rollouts
MODERATE = st.floats(-1e6, 1e6)
WEIGHTS = st.floats(0, 1)
METAS = st.lists(
    st.fixed_dictionaries({"b": MODERATE, "rm_score": MODERATE, "num_tokens": st.integers(0, 4096)}),
    max_size=8,
)


def joined(metas, mode, weight=None, inner=B):
    return RewardModelCreditAssigner(inner, mode=mode, weight=weight).assign(rollouts(metas))


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
    swapped = RewardModelCreditAssigner(world.FromMeta("rm_score"), mode="weighted", weight=1 - weight, score_key="b")
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
        swapped = RewardModelCreditAssigner(world.FromMeta("rm_score"), mode=mode, score_key="b")
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


@pytest.mark.slow
@given(METAS, st.randoms(use_true_random=False))
@pytest.mark.parametrize("assigner", ASSIGNERS, ids=lambda assigner: repr(assigner)[:60])
def test_credit_follows_its_rollout_wherever_it_stands(assigner, metas, random):
    order = list(range(len(metas)))
    random.shuffle(order)
    credits = assigner.assign(rollouts(metas))
    assert assigner.assign([rollouts(metas)[index] for index in order]) == [credits[index] for index in order]


@pytest.mark.slow
@given(METAS, st.integers(0, 8))
@pytest.mark.parametrize("assigner", ASSIGNERS, ids=lambda assigner: repr(assigner)[:60])
def test_a_raw_credit_does_not_depend_on_the_other_rollouts(assigner, metas, cut):
    assert assigner.assign(rollouts(metas[:cut])) + assigner.assign(rollouts(metas[cut:])) == assigner.assign(
        rollouts(metas)
    )


@pytest.mark.slow
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
    inner = world.Gives(None)
    assert RewardModelCreditAssigner(inner, mode="add").assign([]) == []
    assert inner.asked == 0


def test_numbers_of_numpy_and_fractions_become_floats():
    kinds = [np.float32(1.5), np.float64(2.5), np.int64(3), 4, Fraction(1, 2)]
    credits = RewardModelCreditAssigner(score_key="b").assign(rollouts([{"b": number} for number in kinds]))
    assert credits == [1.5, 2.5, 3.0, 4.0, 0.5]
    assert {type(credit) for credit in credits} == {float}


def test_the_scorer_and_the_credit_agree_where_the_score_is():
    scorer = inspect.signature(RewardModelScorer).parameters["score_key"].default
    assert RewardModelCreditAssigner().assign(rollouts([{scorer: 2.0}])) == [2.0]


@pytest.mark.parametrize(
    ("inner", "settings", "match"),
    [
        (B, {}, "mode='replace', inner=.*FromMeta.* would ignore an inner"),
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


def test_credits_are_normalised_where_their_inner_says_so():
    group = world.FromMeta("b", normalized=True)
    raw = [RewardModelCreditAssigner(), B, LengthCredit(0.1), RewardModelCreditAssigner(B, mode="add")]
    for assigner in raw:
        assert not assigner.normalized
        require_raw(assigner)
    for assigner in (group, RewardModelCreditAssigner(group, mode="bonus", weight=0.1)):
        assert assigner.normalized
        with pytest.raises(ConfigError, match="TRL's GRPO normalises within the group itself") as caught:
            require_raw(assigner)
        assert type(assigner).__name__ in str(caught.value)
