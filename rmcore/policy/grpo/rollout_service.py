"""The vLLM that draws a training's samples: whether there is one, and its start and end."""

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rmcore.config.rlhf import RlhfConfig
from rmcore.core.errors import ConfigError, DataError
from rmcore.data.pair import Prompt
from rmcore.models.loading import pick_device
from rmcore.policy.policy import Policy
from rmcore.policy.sampling.served_policy import ServedPolicy
from rmcore.policy.sampling.vllm_sampler import HIGHEST_TEMPERATURE
from rmcore.serving.vllm_process import find_vllm

WORTH_A_START = 2500
"""Samples from which on a vLLM on a CPU pays for its start: benchmarks/RESULTS.md, "Rollouts of a policy". It saves
16 to 20 ms a sample of the smallest policy, more of larger ones, and takes 30 to 50 s to start."""


def draws_by_vllm(settings: RlhfConfig, temperature: float, device_type: str) -> bool:
    """Whether a vLLM draws the samples of a training.

    Raises:
        ConfigError: it is to, and is not there or refuses the temperature.
    """
    if settings.rollouts == "vllm":
        find_vllm()
        if temperature > HIGHEST_TEMPERATURE:
            raise ConfigError(
                f"policy.temperature={temperature:g}, and vLLM refuses more than {HIGHEST_TEMPERATURE:g}; lower it, or "
                "set rlhf.rollouts=generate."
            )
        return True
    pays = device_type == "cuda" or _num_samples(settings) >= WORTH_A_START
    if settings.rollouts == "auto" and pays and temperature <= HIGHEST_TEMPERATURE:
        with contextlib.suppress(ConfigError):
            find_vllm()
            return True
    return False


def _num_samples(settings: RlhfConfig) -> int:
    return settings.num_seeds * settings.steps * settings.prompts_per_step * settings.group_size


@contextmanager
def rollout_service(
    settings: RlhfConfig,
    policy: Policy,
    prompts: Sequence[Prompt],
    temperature: float,
    max_new_tokens: int,
    device: str,
) -> Iterator[ServedPolicy | None]:
    """Start a vLLM of the policy where the settings ask for one; nothing of it is left after the block.

    On a CPU it starts while the block goes on. On a GPU it is waited for: two that start together take each other's
    memory for their own.

    Raises:
        ConfigError: vLLM is asked for and not there.
        ServingError: it did not start.
    """
    place = pick_device(device)
    if not draws_by_vllm(settings, temperature, place.type):
        yield None
        return
    read = policy.try_fitting_ids(prompts, max_new_tokens)
    longest = max((len(ids) for ids in read if not isinstance(ids, DataError)), default=0)
    with ServedPolicy(policy, find_vllm(), place, longest + max_new_tokens) as served:
        if place.type == "cuda":
            served.wait_started()
        yield served
