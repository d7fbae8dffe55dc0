"""Best-of-n as a policy of its own: draw n responses, answer with the one of the highest reward."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from rmcore.core.arrays import FloatArray
from rmcore.core.errors import ModelError
from rmcore.data.pair import Prompt, as_prompts, prompt_text
from rmcore.models.device import pick_device
from rmcore.policy.policy import Policy, quoted
from rmcore.policy.sampling.best_of_n import best_of_n_kl
from rmcore.policy.sampling.sampler import Sample, SamplingSettings
from rmcore.policy.sampling.sampling import EngineName, choose_sampler


class Scorer(Protocol):
    """Whatever gives rewards: `BradleyTerryRM`, or an ensemble of such."""

    def score(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> Any:
        """Rewards of N responses to their prompts: (N,)."""


@dataclass(frozen=True)
class BestOfN:
    """The best of n responses to one prompt."""

    prompt: Prompt
    response: str
    reward: float
    """Reward of `response`, in the reward model's unit."""
    rewards: FloatArray
    """(n,) of all responses, in the order in which they were drawn."""
    responses: tuple[str, ...]
    """All n."""
    kl: float
    """KL in nats of best-of-n from the policy at its temperature; an upper figure, less where rewards tie."""
    all_equal: bool
    """Whether all rewards are the same, so that nothing was chosen: the response is the first."""


class BestOfNSampler:
    """Draws n responses of a policy and keeps the one that a reward model likes best.

    Example:
        >>> policy, rm = Policy.load("sft"), BradleyTerryRM.from_pretrained("checkpoints/best")    # doctest: +SKIP
        >>> BestOfNSampler(policy, rm, n_samples=16).sample(["What is 2 + 2?"])[0].response        # doctest: +SKIP
        '4'

    Args:
        policy: what answers.
        reward_model: anything with `score(prompts, responses)`; its tokenizer may be another than the policy's.
        n_samples: n.
        temperature: of the samples.
        max_new_tokens: longest response in tokens.
        seed: of the samples.
        engine: vllm, generate, or auto: vllm where it is found and the device is a GPU.
        device: of the policy: auto, cpu or cuda.

    Raises:
        ConfigError: a number is out of its range, or vLLM is requested and not there.
    """

    def __init__(
        self,
        policy: Policy,
        reward_model: Scorer,
        n_samples: int = 16,
        temperature: float = 0.8,
        max_new_tokens: int = 256,
        seed: int = 0,
        engine: EngineName = "auto",
        *,
        device: str = "auto",
    ) -> None:
        self.policy = policy
        self.reward_model = reward_model
        self.settings = SamplingSettings(n_samples, temperature, max_new_tokens, seed)
        self._sampler = choose_sampler(engine, pick_device(device))

    def sample(self, prompts: Sequence[Prompt]) -> list[BestOfN]:
        """The best response to each of P prompts, in their order; one prompt without a list is a list of one.

        vLLM is started for each call, so pass the prompts together.

        The same prompts in the same order draw the same samples.

        Raises:
            DataError: a prompt is too long.
            ModelError: the policy cannot be loaded, or a reward is not finite.
            ServingError: vLLM did not start, or died too often.
        """
        prompts = as_prompts(prompts)
        ids = self.policy.fitting_ids(prompts, self.settings.max_new_tokens)
        drawn: dict[int, Sequence[Sample]] = {}
        if prompts:
            self._sampler.draw(
                self.policy,
                dict(enumerate(ids)),
                self.settings,
                lambda samples: drawn.update({samples[0].prompt_index: samples}),
            )
        responses = [tuple(sample.response for sample in drawn[index]) for index in range(len(prompts))]
        rewards = self._score(prompts, responses)
        return [_best(*one) for one in zip(prompts, responses, rewards, strict=True)]

    def _score(self, prompts: Sequence[Prompt], responses: Sequence[tuple[str, ...]]) -> FloatArray:
        """Rewards of all samples: (P, n)."""
        sides = [(prompt, response) for prompt, group in zip(prompts, responses, strict=True) for response in group]
        if not sides:
            return np.empty((0, self.settings.num_samples))
        rewards = np.asarray(self.reward_model.score(*map(list, zip(*sides, strict=True))), dtype=np.float64)
        if rewards.shape != (len(sides),):
            raise ModelError(
                f"the reward model gave rewards of shape {rewards.shape} for {len(sides)} responses; its score must "
                "give one number each."
            )
        broken = np.flatnonzero(~np.isfinite(rewards))
        if len(broken):
            prompt, response = sides[broken[0]]
            raise ModelError(
                f"the reward model gave {rewards[broken[0]]} for the response {quoted(response)} to the prompt "
                f"{quoted(prompt_text(prompt))}, and {len(broken)} such rewards in all: no best one can be named. "
                "Train it again or restore its folder."
            )
        return rewards.reshape(len(prompts), self.settings.num_samples)


def _best(prompt: Prompt, responses: tuple[str, ...], rewards: FloatArray) -> BestOfN:
    best = int(np.argmax(rewards))  # the first of equals
    return BestOfN(
        prompt=prompt,
        response=responses[best],
        reward=float(rewards[best]),
        rewards=rewards,
        responses=responses,
        kl=best_of_n_kl(rewards, len(rewards)),
        all_equal=bool((rewards == rewards[0]).all()),
    )
