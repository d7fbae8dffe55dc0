"""For verl: `reward.custom_reward_function.path=pkg://rmcore.serving.reward_functions.verl`, `name=compute_score`.

The server is that of `reward.custom_reward_function.reward_kwargs.server`. Read from verl 0.10.0.dev
(`trainer/ppo/reward.py`, `reward_manager/naive.py`), which gives a function the answer and what the data say of it.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

from rmcore.core.errors import DataError
from rmcore.serving.client import RewardClient

PROMPT_KEYS = ("prompt", "question", "raw_prompt")


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any], *, server: str, **_: Any
) -> float:
    """The reward in logits of an answer to the question in `extra_info`, a text or messages; a too long one is cut."""
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
