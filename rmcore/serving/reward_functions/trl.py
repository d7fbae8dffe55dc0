"""Reward functions for TRL's trainers: `GRPOTrainer(reward_funcs=reward_function(client))`."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from rmcore.serving.async_client import AsyncRewardClient
from rmcore.serving.client import RewardClient


def reward_function(client: RewardClient) -> Callable[..., list[float]]:
    """Rewards in logits of prompts and completions, each call by one version of the weights; long ones are cut."""

    def reward(prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float]:
        return list(client.score(_inputs(prompts, completions), over_length="cut").rewards)

    return reward


def async_reward_function(make: Callable[[], AsyncRewardClient]) -> Callable[..., Awaitable[list[float]]]:
    """The same without a thread that waits; `make` gives a client for a call, in the event loop of the trainer."""

    async def reward(prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float]:
        async with make() as client:
            return list((await client.score(_inputs(prompts, completions), over_length="cut")).rewards)

    return reward


def _inputs(prompts: Sequence[Any], completions: Sequence[Any]) -> list[dict[str, Any]]:
    if isinstance(completions, str):  # one, not its characters
        return [_input(prompts, completions)]
    return list(map(_input, prompts, completions))


def _input(prompt: Any, completion: Any) -> dict[str, Any]:
    """A user's text with its answer, or messages: all of a completion but its last message belong to the prompt."""
    if isinstance(completion, str):
        return {"prompt": prompt, "response": completion}
    return {"prompt": [*prompt, *completion[:-1]], "response": completion[-1]}
