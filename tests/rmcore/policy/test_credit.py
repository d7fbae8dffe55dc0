"""Credit: the algebra of the modes, and what makes none: settings, rollouts and inner assigners, each named."""

import copy
import inspect
import math
from collections import defaultdict
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmcore.core.errors import ConfigError, DataError
from rmcore.data.pair import Message
from rmcore.policy.grpo.credit import LengthCredit, RewardModelCreditAssigner
from rmcore.policy.grpo.group_reward import GroupReward
from rmcore.serving.scorer import RewardModelScorer, Rollout, Step


@dataclass
class FromMeta:
    """A user's own assigner: the number that an environment wrote into `meta[key]`."""

    key: str
    normalized: bool = False

    def assign(self, asked):
        return [rollout.meta[self.key] for rollout in asked]


class Gives:
    """An assigner of someone else's that answers what it was told to."""

    normalized = False

    def __init__(self, answer):
        self.answer, self.asked = answer, 0

    def assign(self, asked):
        self.asked += 1
        return self.answer


B = FromMeta("b")
NO_NUMBERS = [math.nan, math.inf, -math.inf, None, True, "1.5", [1.0], 10**400, np.bool_(True), np.float32("nan")]
READERS = [
    ("rm_score", RewardModelCreditAssigner()),
    ("rm_score", RewardModelCreditAssigner(B, mode="add")),
    ("rm_score", RewardModelCreditAssigner(B, mode="weighted", weight=0.3)),
    ("num_tokens", RewardModelCreditAssigner(LengthCredit(0.01), mode="add")),
    ("num_tokens", LengthCredit(0.5)),
]
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


def test_numbers_of_numpy_and_fractions_become_floats_and_the_score_is_where_the_scorer_writes_it():
    kinds = [np.float32(1.5), np.float64(2.5), np.int64(3), 4, Fraction(1, 2)]
    key = inspect.signature(RewardModelScorer).parameters["score_key"].default
    credits = RewardModelCreditAssigner().assign(rollouts([{key: number} for number in kinds]))
    assert credits == [1.5, 2.5, 3.0, 4.0, 0.5]
    assert {type(credit) for credit in credits} == {float}


@pytest.mark.parametrize(
    ("inner", "settings", "match"),
    [
        (B, {}, "mode='replace', inner=.*FromMeta.* would ignore an inner"),
        *((None, {"mode": mode}, f"mode='{mode}', inner=None: .* a join needs one") for mode in ("add", "multiply")),
        *((None, {"mode": mode, "weight": 0.5}, f"mode='{mode}', inner=None") for mode in ("weighted", "bonus")),
        (None, {"weight": 0.5}, "mode='replace' would ignore weight=0.5"),
        (B, {"mode": "multiply", "weight": 0.0}, "mode='multiply' would ignore weight=0.0"),
        (B, {"mode": "weighted"}, r"weight=None: mode='weighted' needs the w .* in \[0, 1\]"),
        (B, {"mode": "bonus"}, "weight=None: mode='bonus' needs the c"),
        *((B, {"mode": "weighted", "weight": weight}, f"weight={weight}") for weight in (1.1, -0.1)),
        (B, {"mode": "mean"}, "mode='mean' is not known; name one of replace, add, multiply, weighted, bonus"),
        *((B, {"mode": mode, "weight": "1.5"}, f"weight=.*{mode}") for mode in ("weighted", "bonus")),
    ],
)
def test_settings_that_lack_or_ignore_something_are_refused(inner, settings, match):
    with pytest.raises(ConfigError, match=match):
        RewardModelCreditAssigner(inner, **settings)


@pytest.mark.parametrize("price", [*NO_NUMBERS, -0.01])
def test_a_price_is_a_finite_number_that_is_subtracted(price):
    with pytest.raises(ConfigError, match=r"per_token=.*: a price is subtracted"):
        LengthCredit(price)


def test_credits_that_are_normalised_already_are_refused_to_trl():
    group = FromMeta("b", normalized=True)
    for credit in (RewardModelCreditAssigner(), RewardModelCreditAssigner(B, mode="add")):
        assert not credit.normalized
        GroupReward(None, [], None, credit, wait_seconds=0)
    with pytest.raises(ConfigError, match="normalises within the group itself: RewardModelCreditAssigner"):
        GroupReward(None, [], None, RewardModelCreditAssigner(group, mode="bonus", weight=0.1), wait_seconds=0)


# --- rollouts and inner assigners that give no credit ----------------------------------------------------------------


@pytest.mark.parametrize("value", ["nothing", *NO_NUMBERS], ids=lambda value: repr(value)[:20])
@pytest.mark.parametrize(("key", "assigner"), READERS, ids=str)
def test_a_rollout_without_its_number_is_named_with_what_it_has(key, assigner, value):
    metas = [{"b": 1.0, "rm_score": 2.0, "num_tokens": 3, "prompt_id": "x"} for _ in range(4)]
    metas[2] = {name: kept for name, kept in metas[2].items() if name != key} | (
        {} if value == "nothing" else {key: value}
    )
    with pytest.raises(DataError) as caught:
        assigner.assign(rollouts(metas))
    message = str(caught.value)
    assert f"rollout 2 of the list (prompt 'question 2', meta of {list(metas[2])})" in message
    said = f"has no '{key}'" if value == "nothing" else f"has {repr(value)[:60]} from meta['{key}'], no finite number. "
    assert said in message
    assert ("RewardModelScorer(..., score_key='rm_score')" in message) == (key == "rm_score")


@pytest.mark.parametrize(("key", "assigner"), READERS, ids=str)
def test_a_meta_that_invents_what_it_lacks_is_not_made_to(key, assigner):
    """Reading meta[key] of a defaultdict would write 0.0, which then passes for a score."""
    meta = defaultdict(float)
    with pytest.raises(DataError, match="rollout 0"):
        assigner.assign(rollouts([meta]))
    assert dict(meta) == {}


def test_a_message_stays_short_and_names_any_prompt():
    turns = [Message("system", "be brief"), Message("user", "why? " * 50)]
    asked = [Rollout([Step(prompt=turns, completion="c")], {"b": "much " * 1000}), Rollout([], {"b": 1.0})]
    with pytest.raises(DataError, match=r"rollout 0 of the list \(prompt 'be brief why\? why\?") as caught:
        RewardModelCreditAssigner(score_key="b").assign(asked)
    assert len(str(caught.value)) < 400
    with pytest.raises(DataError, match=r"rollout 0 of the list \(prompt '', meta of \['b'\]\) has no 'rm_score'"):
        RewardModelCreditAssigner().assign(asked[1:])


def test_a_negative_number_of_tokens_is_no_count():
    with pytest.raises(DataError, match=r"rollout 1 .*question 1.* has -1 from meta\['num_tokens'\].* no count"):
        LengthCredit(0.1).assign(rollouts([{"num_tokens": 1}, {"num_tokens": -1}]))


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        ([], "Gives gave 0 values for 2 rollouts"),
        ([1.0, 2.0, 3.0], "Gives gave 3 values for 2 rollouts"),
        ([1.0, math.nan], "rollout 1 of the list .*question 1.* has nan from Gives, no finite number"),
        (np.array([1.0, -np.inf]), "rollout 1 of the list .* has .*-inf.* from Gives"),
    ],
)
def test_an_inner_that_answers_wrongly_is_named(answer, match):
    with pytest.raises(DataError, match=match):
        RewardModelCreditAssigner(Gives(answer), mode="add").assign(rollouts([{"rm_score": 0.0}, {"rm_score": 0.0}]))


@pytest.mark.parametrize("metas", [[], [{"rm_score": 0.0}, {}]])
def test_an_inner_is_not_asked_of_no_rollouts_nor_where_a_score_lacks(metas):
    inner = Gives([0.0] * len(metas))
    assigner = RewardModelCreditAssigner(inner, mode="add")
    if metas:
        with pytest.raises(DataError, match="rollout 1 "):
            assigner.assign(rollouts(metas))
    else:
        assert assigner.assign([]) == []
    assert inner.asked == 0


@pytest.mark.parametrize(
    ("assigner", "source"),
    [
        (RewardModelCreditAssigner(B, mode="multiply"), "inf from mode='multiply'"),
        (RewardModelCreditAssigner(B, mode="bonus", weight=-10.0), "-inf from mode='bonus'"),
        (LengthCredit(1e300, key="b"), "-inf from LengthCredit"),
    ],
)
def test_a_credit_beyond_any_float_is_refused(assigner, source):
    with pytest.raises(DataError, match=f"rollout 1 .*question 1.* has {source}"):
        assigner.assign(rollouts([{"b": 0.0, "rm_score": 0.0}, {"b": 1e308, "rm_score": 1e308}]))
