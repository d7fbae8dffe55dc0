"""Rollouts of one step, and who gives them their rewards: a served reward model, or one in this process."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from rmcore.core.arrays import FloatArray
from rmcore.core.errors import DataError
from rmcore.data.pair import Prompt
from rmcore.models.checks import refuse_not_finite
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.serving.scorer import Rollout, Step


class RolloutScorer(Protocol):
    """Gives rollouts their rewards, as a served `RewardModelScorer` and a `LocalReward` in this process do."""

    def score(self, rollouts: Sequence[Rollout]) -> list[float]:
        """Write `rm_score` and `rm_score_version` into each rollout's `meta`, all of one version, or raise."""

    def wait_ready(self, timeout_s: float) -> object:
        """Wait until it can score again.

        Raises:
            ServingError: it could not in time.
        """


def one_step(prompt: Prompt, response: str) -> Rollout:
    """A rollout of one answer."""
    return Rollout([Step.model_validate({"prompt": prompt, "completion": response})])


def rollout_texts(rollouts: Sequence[Rollout]) -> tuple[list[Prompt], list[str]]:
    """Prompts and responses of rollouts of one step, in their order.

    Raises:
        DataError: a rollout has another number of steps; the message names it.
    """
    prompts: list[Prompt] = []
    for index, rollout in enumerate(rollouts):
        if len(rollout.steps) != 1:
            raise DataError(
                f"rollout {index} has {len(rollout.steps)} steps, and this reward model scores single answers; "
                "score dialogues through a reward server (RewardModelScorer)."
            )
        prompt = rollout.steps[0].prompt
        prompts.append(prompt if isinstance(prompt, str) else tuple(turn.message() for turn in prompt))
    return prompts, [rollout.steps[0].completion for rollout in rollouts]


class LocalReward:
    """A reward model in this process; `rm` is on one device."""

    def __init__(self, rm: BradleyTerryRM) -> None:
        self.rm = rm

    def __call__(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> FloatArray:
        """Return the rewards of N responses, whose texts may be empty, in logits: (N,); too long ones are cut.

        Raises:
            DataError: one cannot be read; a policy cannot be trained on a reward that is not there.
            ModelError: a reward is not finite.
        """
        return self._scored(prompts, responses)[0]

    def score(self, rollouts: Sequence[Rollout]) -> list[float]:
        """Rewards of rollouts of one step, also written to `meta` as `RewardModelScorer.score` does."""
        scores, cut = self._scored(*rollout_texts(rollouts))
        rewards: list[float] = scores.tolist()
        for rollout, reward, num_cut in zip(rollouts, rewards, cut, strict=True):
            rollout.meta.update(rm_score=reward, rm_score_version=1, rm_score_num_cut=num_cut)
        return rewards

    def wait_ready(self, timeout_s: float) -> None:
        """Return at once: a model in this process is never away."""

    def _scored(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> tuple[FloatArray, list[int]]:
        """Rewards (N,), and of each response the tokens that were longer than the model reads."""
        sides = self.rm.renderer.tokenize_sides(list(zip(prompts, responses, strict=True)))
        rewards = self.rm.score_sides(sides).astype(np.float64)
        refuse_not_finite(rewards, lambda place: f"response {place}")
        return rewards, [side.num_cut for side in sides]
