"""Credit: the algebra of the modes, and what makes none: settings, rollouts and inner assigners, each named."""

import copy
import inspect
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmcore.core.errors import ConfigError, DataError
from rmcore.data.pair import Message
from rmcore.policy.grpo.credit import LengthCredit, RewardModelCreditAssigner
from rmcore.serving.scorer import RewardModelScorer, Rollout, Step


class Gives:
    """A user's own assigner: what it was told to, or the number that an environment wrote into `meta["b"]`."""

    def __init__(self, answer=None):
        self.answer, self.asked = answer, 0

    def assign(self, asked):
        self.asked += 1
        return [rollout.meta["b"] for rollout in asked] if self.answer is None else self.answer


B = Gives()
NO_NUMBERS = [math.nan, -math.inf, None, True, "1.5", 10**400, np.float32("nan")]
MODES = {
    "replace": lambda b, s, w: s,
    "add": lambda b, s, w: b + s,
    "multiply": lambda b, s, w: b * s,
    "weighted": lambda b, s, w: w * s + (1 - w) * b,
    "bonus": lambda b, s, w: b + w * s,
}
MODERATE = st.floats(-1e6, 1e6)
METAS = st.lists(
    st.fixed_dictionaries({"b": MODERATE, "rm_score": MODERATE, "num_tokens": st.integers(0, 4096)}), max_size=8
)


def rollouts(metas):
    return [Rollout([Step(prompt=f"question {index}", completion="c")], meta) for index, meta in enumerate(metas)]


@given(METAS, st.floats(0, 1))
@pytest.mark.parametrize("mode", MODES)
def test_the_modes_are_those_of_the_specification(mode, metas, weight):
    asked = rollouts(metas)
    before = copy.deepcopy(asked)
    given_weight = {"weight": weight} if mode in ("weighted", "bonus") else {}
    credits = RewardModelCreditAssigner(None if mode == "replace" else B, mode=mode, **given_weight).assign(asked)
    assert credits == [MODES[mode](meta["b"], meta["rm_score"], weight) for meta in metas]
    assert LengthCredit(weight).assign(asked) == [-weight * meta["num_tokens"] for meta in metas]
    assert asked == before


def test_the_score_is_where_the_scorer_writes_it_and_numbers_of_numpy_become_floats():
    key = inspect.signature(RewardModelScorer).parameters["score_key"].default
    credits = RewardModelCreditAssigner().assign(rollouts([{key: np.float32(1.5)}, {key: np.int64(3)}]))
    assert (credits, {type(credit) for credit in credits}) == ([1.5, 3.0], {float})


@pytest.mark.parametrize(
    ("inner", "settings", "match"),
    [
        (B, {}, "mode='replace', inner=.*Gives.* would ignore an inner"),
        (None, {"mode": "weighted", "weight": 0.5}, "mode='weighted', inner=None: .* a join needs one"),
        (None, {"weight": 0.5}, "mode='replace' would ignore weight=0.5"),
        (B, {"mode": "weighted"}, r"weight=None: mode='weighted' needs the w .* in \[0, 1\]"),
        (B, {"mode": "weighted", "weight": 1.1}, "weight=1.1"),
        (B, {"mode": "bonus", "weight": "1.5"}, "weight='1.5': mode='bonus' needs the c"),
        (B, {"mode": "mean"}, "mode='mean' is not known; name one of replace, add, multiply, weighted, bonus"),
    ],
)
def test_settings_that_lack_or_ignore_something_are_refused(inner, settings, match):
    with pytest.raises(ConfigError, match=match):
        RewardModelCreditAssigner(inner, **settings)
    with pytest.raises(ConfigError, match=r"per_token=.*: a price is subtracted"):
        LengthCredit(-0.01)


@pytest.mark.parametrize("value", ["nothing", *NO_NUMBERS], ids=lambda value: repr(value)[:20])
@pytest.mark.parametrize(
    ("key", "assigner"),
    [
        ("rm_score", RewardModelCreditAssigner(B, mode="add")),
        ("num_tokens", RewardModelCreditAssigner(LengthCredit(0.01), mode="add")),
    ],
)
def test_a_rollout_without_its_number_is_named_with_what_it_has(key, assigner, value):
    turns = [Message("system", "be brief"), Message("user", "why? " * 50)]
    metas = [{"b": 1.0, "rm_score": 2.0, "num_tokens": 3} for _ in range(3)]
    metas[2] = {name: kept for name, kept in metas[2].items() if name != key}
    metas[2] |= {} if value == "nothing" else {key: value}
    with pytest.raises(DataError) as caught:
        assigner.assign([*rollouts(metas[:2]), Rollout([Step(prompt=turns, completion="c")], metas[2])])
    assert "rollout 2 of the list (prompt 'be brief why? why?" in (message := str(caught.value))
    said = f"has no '{key}'" if value == "nothing" else f"has {value!r:.60} from meta['{key}'], no finite number. "
    assert said in message
    assert len(message) < 400


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        ([1.0], "Gives gave 1 values for 2 rollouts"),
        (np.array([1.0, -np.inf]), "rollout 1 of the list .*question 1.* has .*-inf.* from Gives, no finite number"),
        ([0.0, 1e308], "rollout 1 .* has inf from mode='multiply'"),
    ],
)
def test_an_inner_that_answers_wrongly_is_named_and_not_asked_where_a_score_lacks(answer, match):
    inner = Gives(answer)
    assigner = RewardModelCreditAssigner(inner, mode="multiply")
    with pytest.raises(DataError, match="rollout 1 "):
        assigner.assign(rollouts([{"rm_score": 0.0}, {}]))
    assert inner.asked == 0
    with pytest.raises(DataError, match=match):
        assigner.assign(rollouts([{"rm_score": 0.0}, {"rm_score": 1e308}]))
