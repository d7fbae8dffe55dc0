"""Credit assigners of every kind, and rollouts to ask them about."""

import math

import numpy as np

from rmcore.policy.grpo.credit import GroupNormalizedCredit, LengthCredit, MetaCredit, RewardModelCreditAssigner
from rmcore.serving.scorer import Rollout, Step

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


def rollouts(metas):
    return [Rollout([Step(prompt=f"question {index}", completion="c")], meta) for index, meta in enumerate(metas)]


class Gives:
    """An assigner of someone else's that answers what it was told to."""

    normalized = False

    def __init__(self, answer):
        self.answer = answer
        self.asked = 0

    def assign(self, asked):
        self.asked += 1
        return self.answer
