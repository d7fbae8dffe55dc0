"""Rollouts of GRPO from a vLLM that has the policy's weights, and how far its probabilities are from the trainer's.

TRL is told that vLLM draws, so all that it does for its own vLLM happens here too: before a step it has the weights
synchronised, and afterwards it weighs each token's loss by min(p_trainer / p_vLLM, 3), which corrects what vLLM rounds
otherwise (truncated importance sampling: Yao et al.
2025, Your efficient RL framework secretly brings you off-policy RL training; Ionides 2008).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rmcore.core.errors import TrainingError
from rmcore.policy.sampling.sampler import SamplingSettings
from rmcore.policy.sampling.served_policy import ServedPolicy

HIGHEST_WEIGHT = 3.0
"""Where the weights of tokens are cut; TRL's default."""


@dataclass(frozen=True, slots=True)
class Parity:
    """Log-probabilities of one step's sampled tokens: the trainer's, before its update, against vLLM's.

    step: counts from 1.
    weight_version: how many publications vLLM had taken; it counts from 0 in each process.
    num_tokens: that were drawn.
    mean_difference, max_difference: absolute, in nats a token.
    truncated_share: of the tokens, those whose weight was cut to its bound.
    """

    step: int
    weight_version: int
    num_tokens: int
    mean_difference: float
    max_difference: float
    truncated_share: float


class VllmRollouts:
    """Draws the samples of each step for one trainer of TRL.

    Args:
        served: the vLLM; its weights are replaced by the trainer's.
        prompt_ids: token ids of every prompt, by what TRL hands over of it (`prompt_key`).
        seed: of the sampling; the same seed and step ask for the same samples.
        temperature, max_new_tokens: of the sampling.
        record: called with each step's parity.
    """

    def __init__(
        self,
        served: ServedPolicy,
        prompt_ids: Mapping[Any, Sequence[int]],
        *,
        seed: int,
        temperature: float,
        max_new_tokens: int,
        record: Callable[[Parity], None] | None = None,
    ) -> None:
        self.served, self.prompt_ids, self.seed = served, prompt_ids, seed
        self.temperature, self.max_new_tokens, self.record = temperature, max_new_tokens, record
        self._trainer: Any = None
        self._published: int | None = None
        """Step of the weights that are served; None: those of another training, or none of ours."""

    def attach(self, trainer: Any) -> None:
        """Have a `trl.GRPOTrainer` that was made with `rollout_func=self` treat the samples as vLLM's.

        These are the attributes that `use_vllm` sets in TRL 1.16, whose own vLLM would have to be importable here.
        """
        self._trainer = trainer
        trainer.use_vllm = True
        trainer.vllm_generation = self
        trainer._last_loaded_step = -1  # of the first step too, where a training resumes
        generate = trainer._generate_and_score_completions

        def measured(inputs: Any) -> Any:
            output = generate(inputs)
            if self.record is not None:
                self.record(self._parity(output))
            return output

        trainer._generate_and_score_completions = measured

    def sync_weights(self) -> None:
        """Publish the trainer's weights, unless those of this step are served already. TRL calls it once a step.

        Raises:
            ServingError: vLLM did not take them.
        """
        step = self._trainer.state.global_step
        if self._published != step:
            self.served.publish(self._trainer.accelerator.unwrap_model(self._trainer.model))
            self._published = step

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        """Draw for N prompts, each as often in a row as a group has samples: TRL's `rollout_func`.

        Returns:
            Each a list of N: prompt_ids, completion_ids with the token that ended it, logprobs of those in nats.

        Raises:
            ServingError: vLLM died too often.
        """
        size = trainer.num_generations
        groups = [prompt_key(prompt) for prompt in prompts[::size]]
        if [prompt_key(prompt) for prompt in prompts] != [key for key in groups for _ in range(size)]:
            raise TrainingError("TRL asks for samples of a prompt apart from one another; this needs TRL 1.16's order.")
        ids = [list(self.prompt_ids[key]) for key in groups]
        seed = self.seed * 2**32 + trainer.state.global_step
        settings = SamplingSettings(size, self.temperature, self.max_new_tokens, seed)
        drawn = self.served.draw(ids, settings)
        return {
            "prompt_ids": [row for row in ids for _ in range(size)],
            "completion_ids": [one.ids for group in drawn for one in group],
            "logprobs": [one.log_probs for group in drawn for one in group],
        }

    def _parity(self, output: Mapping[str, Any]) -> Parity:
        """Compare what TRL has computed of one step's tokens: tensors (N, T) and their mask."""
        drawn = output["completion_mask"].bool()
        log_ratio = (output["old_per_token_logps"] - output["sampling_per_token_logps"])[drawn].double()
        return Parity(
            self._trainer.state.global_step + 1,
            self.served.version,
            log_ratio.numel(),
            float(log_ratio.abs().mean()),
            float(log_ratio.abs().max()),
            float((torch.exp(log_ratio) > HIGHEST_WEIGHT).double().mean()),
        )


def prompt_key(prompt: Any) -> Any:
    """Give what tells prompts apart in the form that TRL hands them over: text, or turns as dicts."""
    return prompt if isinstance(prompt, str) else tuple((turn["role"], turn["content"]) for turn in prompt)
