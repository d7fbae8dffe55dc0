"""Reward functions that ask a running reward server, for trainers that call a function.

TRL    `GRPOTrainer(reward_funcs=reward_function(client))`
verl   `reward.custom_reward_function.path=pkg://rmcore.serving.reward_functions`, `.name=compute_score`, and the
       server as `reward.custom_reward_function.reward_kwargs.server`. Read from verl 0.10.0.dev
       (`trainer/ppo/reward.py`, `reward_manager/naive.py`), which gives the answer and what the data say of it.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from rmcore.core.errors import DataError
from rmcore.serving.client import RewardClient

PROMPT_KEYS = ("prompt", "question", "raw_prompt")
"""Keys of the prompt in verl's `extra_info`."""


def reward_function(client: RewardClient) -> Callable[..., list[float]]:
    """Rewards in logits of prompts and completions, each call by one version of the weights; long ones are cut."""

    def reward(prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float]:
        one = isinstance(completions, str)  # not its characters
        inputs = [_input(prompts, completions)] if one else list(map(_input, prompts, completions))
        return list(client.score(inputs, over_length="cut").rewards)

    return reward


def _input(prompt: Any, completion: Any) -> dict[str, Any]:
    """A user's text with its answer, or messages: all of a completion but its last message belong to the prompt."""
    if isinstance(completion, str):
        return {"prompt": prompt, "response": completion}
    return {"prompt": [*prompt, *completion[:-1]], "response": completion[-1]}


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any], *, server: str, **_: Any
) -> float:
    """The reward in logits of an answer to the question in `extra_info`, a text or messages; a too long one is cut.

    Raises:
        DataError: `extra_info` has no question.
    """
    found = (extra_info.get(key) for key in PROMPT_KEYS)
    prompt = next((one for one in found if one is not None and len(one)), None)  # an array has no truth of its own
    if prompt is None:
        raise DataError(f"a row of {data_source} has none of {PROMPT_KEYS} in extra_info; put its question there.")
    given = prompt if isinstance(prompt, str) else list(prompt)
    return _client(server).score([{"prompt": given, "response": solution_str}], over_length="cut").rewards[0]


@cache
def _client(server: str) -> RewardClient:
    """One for all threads of a worker."""
    return RewardClient(server, max_concurrency=64)
