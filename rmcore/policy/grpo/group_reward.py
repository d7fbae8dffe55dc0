"""The reward function that GRPO calls: it scores the rollouts of a step by one version of a served or local model."""

import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from rmcore.core.arrays import FloatArray
from rmcore.core.errors import DataError, ServingError, TrainingError
from rmcore.data.pair import Prompt
from rmcore.judging.judge import Judge
from rmcore.models.checks import refuse_not_finite
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.policy.grpo.credit import RewardModelCreditAssigner
from rmcore.policy.policy import Policy, quoted
from rmcore.serving.scorer import Rollout, Step

SCORE_KEY = "rm_score"
REWARDS_KEY = "rewards"
"""All K rewards of a rollout, the own one with its price of length first."""
WAIT_SECONDS = 300.0
"""How long a step waits for a reward server that is away or fails: a restart that loads a large model takes minutes."""
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 10.0
"""Pauses between tries to score a step double up to this."""
Record = Callable[[int, Sequence[Rollout], Sequence[float]], None]
"""Called with the step, its rollouts (scored, with `meta`) and their credits."""


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


class GroupReward:
    """A reward function for TRL: `completion_ids` in, one finite number each out.

    All samples of a step are scored in one call, so by one version of the weights: a group whose halves were judged by
    different models would be compared with itself wrongly.

    Args:
        policy: whose token ids come in.
        prompts: by the dataset's column `place`.
        scorer: of the rollouts.
        credit: from rewards to what TRL compares within each group; nothing normalised, TRL does that.
        wait_seconds: how long a scorer that is away or fails is waited for.
        further: rewards next to that credit, which TRL gets from `functions`.
        record: sees every step's rollouts.
    """

    __name__ = "reward"

    def __init__(
        self,
        policy: Policy,
        prompts: Sequence[Prompt],
        scorer: RolloutScorer,
        credit: RewardModelCreditAssigner,
        *,
        wait_seconds: float,
        further: Sequence[Judge] = (),
        record: Record | None = None,
    ) -> None:
        self.policy, self.prompts, self.scorer, self.credit = policy, prompts, scorer, credit
        self.wait_seconds, self.further, self.record = wait_seconds, further, record
        self._of_further: list[list[float]] = []

    def __call__(
        self,
        *,
        completion_ids: Sequence[Sequence[int]],
        place: Sequence[int],
        trainer_state: Any,
        log_metric: Callable[[str, float], None],
        **_: Any,
    ) -> list[float]:
        """Credits of N completions.

        Raises:
            TrainingError: the scorer stayed away or went on failing, a reward is not finite, or two versions scored one
                step.
            RequestError: the scorer refuses an input; nothing is gained by asking again.
        """
        stops = self.policy.stop_ids
        rollouts = []
        for index, ids in zip(place, completion_ids, strict=True):
            ends = next((at for at, token in enumerate(ids) if token in stops), None)
            rollout = one_step(self.prompts[index], self.policy.decode(ids[:ends]))
            rollout.meta.update(place=index, num_tokens=len(ids), finished=ends is not None)
            rollouts.append(rollout)
        self._score(rollouts)
        version = _one_version(rollouts)
        credits = self.credit.assign(rollouts)
        self._of_further = [self._rewards(rollouts, judge) for judge in self.further]
        for rollout, *given in zip(rollouts, credits, *self._of_further, strict=True):
            rollout.meta[REWARDS_KEY] = given
        log_metric("weight_version", version)
        if self.record is not None:
            self.record(trainer_state.global_step, rollouts, credits)
        return credits

    @property
    def functions(self) -> list[Callable[..., list[float]]]:
        """All K reward functions for TRL, which calls them in this order: the first computes what the others give."""

        def function(index: int, name: str) -> Callable[..., list[float]]:
            def reward(**_: Any) -> list[float]:
                return self._of_further[index]

            reward.__name__ = name
            return reward

        return [self, *(function(index, judge.name) for index, judge in enumerate(self.further))]

    def _rewards(self, rollouts: Sequence[Rollout], judge: Judge) -> list[float]:
        rewards = judge.rewards(*rollout_texts(rollouts)).tolist()
        _require_finite(rollouts, rewards, f"{judge.name}'s")
        return rewards

    def _score(self, rollouts: Sequence[Rollout]) -> None:
        """Score; while the scorer is away or fails, wait and ask again."""
        end = time.monotonic() + self.wait_seconds
        for attempt in itertools.count(1):
            try:
                rewards = self.scorer.score(rollouts)
            except ServingError as error:
                self._wait(end, attempt, error)
            else:
                break
        _require_finite(rollouts, rewards, "the")

    def _wait(self, end: float, attempt: int, error: ServingError) -> None:
        """Return when the scorer is ready and a pause is over, which grows: who is ready may fail all the same."""
        goes_on = "The policy is as it was before that step"
        left = end - time.monotonic()
        if left <= 0:
            between = ", though in between it was ready" if attempt > 1 else ""
            raise TrainingError(
                f"the scoring of a step failed {attempt} times within {self.wait_seconds:g} s{between}: {error} "
                f"{goes_on}; see the log of what scores, then the same command continues."
            ) from error
        try:
            self.scorer.wait_ready(left)
        except ServingError as last:
            raise TrainingError(
                f"the reward server was away for {self.wait_seconds:g} s in the middle of a step: {last} {goes_on}; "
                "start the server again, then the same command continues."
            ) from last
        pause = min(FIRST_PAUSE_S * 2 ** min(attempt - 1, 30), LONGEST_PAUSE_S)
        time.sleep(max(0.0, min(pause, end - time.monotonic())))


def _require_finite(rollouts: Sequence[Rollout], rewards: Sequence[float], whose: str) -> None:
    for rollout, reward in zip(rollouts, rewards, strict=True):
        if not math.isfinite(reward):
            step = rollout.steps[0]
            raise TrainingError(
                f"{whose} reward of {quoted(step.completion)} as an answer to {quoted(str(step.prompt))} is {reward}: "
                "the reward model overflows or its weights are broken, and no step was taken on it. Evaluate the "
                "reward model before a policy is trained on it."
            )


def _one_version(rollouts: Sequence[Rollout]) -> int:
    versions = {int(rollout.meta[f"{SCORE_KEY}_version"]) for rollout in rollouts}
    if len(versions) != 1:
        raise TrainingError(
            f"the samples of one step were scored by the weight versions {sorted(versions)}, so their groups cannot be "
            "compared; let the scorer answer a call by one version."
        )
    return versions.pop()
