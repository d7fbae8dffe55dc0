"""The reward model that a policy is trained on, in this process."""

from collections.abc import Sequence

import numpy as np

from rmcore.core.arrays import FloatArray
from rmcore.data.pair import Prompt
from rmcore.models.checks import refuse_not_finite
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.policy.sampling.rollouts import rollout_texts
from rmcore.serving.scorer import Rollout


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
        found, cut = self._scored(*rollout_texts(rollouts))
        rewards: list[float] = found.tolist()
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
