"""Rollouts of one step: a prompt and what the policy answered."""

from collections.abc import Sequence
from typing import Protocol

from rmcore.core.errors import DataError
from rmcore.data.pair import Prompt
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
        turns = prompt if isinstance(prompt, str) else tuple(turn.message() for turn in prompt)
        prompts.append(turns)
    return prompts, [rollout.steps[0].completion for rollout in rollouts]
