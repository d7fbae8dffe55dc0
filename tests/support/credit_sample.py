"""Credit assigners of every kind, and rollouts to ask them about."""

import math
from dataclasses import dataclass

import numpy as np

from rmcore.policy.grpo.credit import LengthCredit, RewardModelCreditAssigner
from rmcore.serving.scorer import Rollout, Step


@dataclass
class FromMeta:
    """A user's own assigner: the number that an environment wrote into `meta[key]`."""

    key: str
    normalized: bool = False

    def assign(self, asked):
        return [rollout.meta[self.key] for rollout in asked]


B = FromMeta("b")
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
    LengthCredit(0.5),
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
