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
METAS = st.lists(
    st.fixed_dictionaries({"b": MODERATE, "rm_score": MODERATE, "num_tokens": st.integers(0, 4096)}), max_size=8
)
MODES = {
    "replace": lambda b, s, w: s,
    "add": lambda b, s, w: b + s,
    "multiply": lambda b, s, w: b * s,
    "weighted": lambda b, s, w: w * s + (1 - w) * b,
    "bonus": lambda b, s, w: b + w * s,
}


@given(METAS, st.floats(0, 1))
@pytest.mark.parametrize("mode", MODES)
def test_the_modes_are_those_of_the_specification(mode, metas, weight):
    asked = rollouts(metas)
    before = copy.deepcopy(asked)
    given_weight = {"weight": weight} if mode in ("weighted", "bonus") else {}
    found = RewardModelCreditAssigner(None if mode == "replace" else B, mode=mode, **given_weight).assign(asked)
    assert found == [MODES[mode](meta["b"], meta["rm_score"], weight) for meta in metas]
    assert LengthCredit(weight).assign(asked) == [-weight * meta["num_tokens"] for meta in metas]
    assert asked == before


@pytest.mark.parametrize("assigner", ASSIGNERS, ids=lambda assigner: repr(assigner)[:60])
def test_a_meta_that_invents_what_it_lacks_is_not_made_to(assigner):
    """Reading meta[key] of a defaultdict would write 0.0, which then passes for a score."""
    meta = defaultdict(float)
    with pytest.raises(DataError, match="rollout 0"):
        assigner.assign(rollouts([meta]))
    assert dict(meta) == {}


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
