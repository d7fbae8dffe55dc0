"""The reward model that a policy is trained on, with heads next to its own that say how sure it is."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rmcore.core.arrays import FloatArray
from rmcore.data.pair import PreferencePair, Prompt
from rmcore.ensembles.agreement import calibration_of, disagreement
from rmcore.ensembles.features import features, head_of, pair_features
from rmcore.ensembles.linear_probes import bootstrap_heads
from rmcore.ensembles.score import readable_pairs
from rmcore.models.reward_model import BradleyTerryRM, refuse_not_finite
from rmcore.policy.sampling.rollouts import rollout_texts
from rmcore.serving.scorer import Rollout

USUAL_SHARE = 0.95
"""Share of held-out responses that stay within the calibrated range of disagreement."""


@dataclass(frozen=True, slots=True)
class ScoredResponses:
    """Rewards of N responses by a reward model and by its members.

    rewards: (N,) what a policy is trained on: the model's own, in logits.
    members: (M, N) by heads on its backbone, in standard deviations within prompts.
    num_cut: (N,) tokens that were longer than the model reads.
    """

    rewards: FloatArray
    members: FloatArray
    num_cut: Sequence[int]


class LocalReward:
    """A reward model in this process.

    Args:
        rm: on one device, with a linear head.
        training: pairs that the members are fitted on.
        held_out: pairs that say which disagreement is usual.
        num_members: M.
        seed: of the members' draws.

    Raises:
        ModelError: rewards are not linear in anything (see `rmcore.ensembles.features.head_of`).
        ConfigError, DataError: too few pairs for members or for the range of their disagreement.
    """

    def __init__(
        self,
        rm: BradleyTerryRM,
        training: Sequence[PreferencePair],
        held_out: Sequence[PreferencePair],
        *,
        num_members: int,
        seed: int,
    ) -> None:
        self.rm = rm
        # Pairs that the model cannot read are left out, counted and said on stderr.
        training, held_out = readable_pairs(rm, training), readable_pairs(rm, held_out)
        chosen, rejected = pair_features(rm, training)
        self._heads = bootstrap_heads(chosen - rejected, [pair.prompt_id for pair in training], num_members, seed)
        usual = pair_features(rm, held_out)
        raw = np.concatenate([self._heads @ side.T for side in usual], axis=1)
        prompts = [pair.prompt for pair in held_out] * 2
        names = [f"head {number}" for number in range(num_members)]
        self.calibration = calibration_of(raw, prompts, USUAL_SHARE, names)

    def look(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> ScoredResponses:
        """Score N responses, whose texts may be empty, in one pass of the backbone; too long ones are cut.

        Raises:
            DataError: one cannot be read; a policy cannot be trained on a reward that is not there.
        """
        sides = self.rm.renderer.tokenize_sides(list(zip(prompts, responses, strict=True)))
        found = features(self.rm, sides).astype(np.float64)
        head = head_of(self.rm)
        weight = head.weight.detach().double().cpu().numpy()[0]
        bias = 0.0 if head.bias is None else float(head.bias.detach())
        members = self.calibration.apply(self._heads @ found.T)
        rewards = found @ weight + bias
        refuse_not_finite(rewards, lambda place: f"response {place}")
        return ScoredResponses(rewards, members, [side.num_cut for side in sides])

    def differences(
        self, prompts: Sequence[Prompt], later: Sequence[str], earlier: Sequence[str]
    ) -> tuple[FloatArray, FloatArray]:
        """By how much N later responses are rewarded higher, and the members' disagreement about it: (N,) each."""
        seen = self.look([*prompts, *prompts], [*later, *earlier])
        rewards, members = seen.rewards.reshape(2, -1), seen.members.reshape(len(seen.members), 2, -1)
        return rewards[0] - rewards[1], disagreement(members[:, 0] - members[:, 1])

    def score(self, rollouts: Sequence[Rollout]) -> list[float]:
        """Rewards of rollouts of one step, also written to `meta` as `RewardModelScorer.score` does."""
        seen = self.look(*rollout_texts(rollouts))
        rewards: list[float] = seen.rewards.tolist()
        for rollout, reward, num_cut in zip(rollouts, rewards, seen.num_cut, strict=True):
            rollout.meta.update(rm_score=reward, rm_score_version=1, rm_score_num_cut=num_cut)
        return rewards

    def wait_ready(self, timeout_s: float) -> None:
        """Return at once: a model in this process is never away."""
