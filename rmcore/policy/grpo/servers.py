"""The vLLM servers of a training: one draws its samples, one scores them; which there are, their start and end."""

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rmcore.config.rlhf import RlhfConfig
from rmcore.core.errors import ConfigError, DataError
from rmcore.data.pair import Prompt
from rmcore.models.device import pick_device
from rmcore.policy.grpo.rlhf_requirements import is_served
from rmcore.policy.policy import Policy
from rmcore.policy.sampling.served_policy import ServedPolicy
from rmcore.policy.sampling.vllm_sampler import HIGHEST_TEMPERATURE
from rmcore.serving.scorer import RewardModelScorer
from rmcore.serving.server import RewardServer, ServeSettings
from rmcore.serving.vllm_process import find_vllm


def draws_by_vllm(settings: RlhfConfig, temperature: float, device_type: str) -> bool:
    """Whether a vLLM draws the samples of a training.

    `auto` takes it on a GPU. On a CPU it draws two to four times the tokens/s of `generate`, and a whole step takes as
    long or longer: for the weights of importance sampling TRL computes all log-probabilities once more, which costs
    more than is saved (benchmarks/results/rollouts.md).

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
    if settings.rollouts == "auto" and device_type == "cuda" and temperature <= HIGHEST_TEMPERATURE:
        with contextlib.suppress(ConfigError):
            find_vllm()
            return True
    return False


@contextmanager
def rollout_server(
    settings: RlhfConfig,
    policy: Policy,
    prompts: Sequence[Prompt],
    temperature: float,
    max_new_tokens: int,
    device: str,
) -> Iterator[ServedPolicy | None]:
    """Start a vLLM of the policy where the settings ask for one; nothing of it is left after the block.

    On a CPU it starts while the block runs. On a GPU the block waits for it: two that start together take each other's
    memory for their own.

    Raises:
        ConfigError: vLLM is requested and not there.
        ServingError: it did not start.
    """
    torch_device = pick_device(device)
    if not draws_by_vllm(settings, temperature, torch_device.type):
        yield None
        return
    read = policy.try_fitting_ids(prompts, max_new_tokens)
    longest = max((len(ids) for ids in read if not isinstance(ids, DataError)), default=0)
    with ServedPolicy(policy, find_vllm(), torch_device, longest + max_new_tokens) as served:
        if torch_device.type == "cuda":
            served.wait_started()
        yield served


@contextmanager
def reward_server(
    settings: RlhfConfig, checkpoint: Path, *, render_fn: str | None
) -> Iterator[RewardModelScorer | None]:
    """Start a vLLM of the reward model where the settings ask for one, and give what asks it; nothing is left after.

    Raises:
        ConfigError: vLLM is requested and not there.
        ServingError: it did not start, or its rewards are not those of PyTorch.
    """
    if not is_served(settings):
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="rm-opt-rewards-") as name:
        folder = Path(name)
        served = ServeSettings(str(checkpoint), port=0, render_fn=render_fn, weights_folder=folder / "weights")
        with RewardServer(served, log=folder / "server.log") as server, server.client() as client:
            yield RewardModelScorer(client, over_length="cut")
