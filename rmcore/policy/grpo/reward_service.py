"""The reward server of a training: started beside it, asked by it, and told of new weights."""

import secrets
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rmcore.config.rlhf import RlhfConfig
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.policy.grpo.rlhf_requirements import is_served
from rmcore.policy.sampling.rollouts import RolloutScorer
from rmcore.serving.http_app import HttpSettings
from rmcore.serving.process import RewardServer
from rmcore.serving.scorer import RewardModelScorer
from rmcore.serving.server import ServeSettings
from rmcore.serving.types import RewardModelTrainingMode
from rmcore.serving.weight_sync import CheckpointBackend, RMPublisherAdapter


@dataclass(frozen=True, slots=True)
class RewardService:
    """Who scores a training's samples.

    name: vllm, or local: the reward model in the training's process.
    scorer: asks the server; None: there is none.
    publish: brings weights to the server and gives the version that it serves them as; None where there is none.
    """

    name: str
    scorer: RolloutScorer | None = None
    publish: Callable[[BradleyTerryRM], int] | None = None


@contextmanager
def reward_service(settings: RlhfConfig, checkpoint: Path, *, render_fn: str | None) -> Iterator[RewardService]:
    """Start a vLLM reward server where the settings ask for one; nothing of it is left after the block.

    Raises:
        ConfigError: vLLM is asked for and not there.
        ServingError: it did not start, or its rewards are not those of PyTorch.
    """
    if not is_served(settings):
        yield RewardService("local")
        return
    with tempfile.TemporaryDirectory(prefix="rm-opt-rewards-") as folder:
        place = Path(folder)
        served = ServeSettings(
            str(checkpoint),
            port=0,
            render_fn=render_fn,
            weights_folder=place / "weights",
            http=HttpSettings(token=secrets.token_urlsafe()),
        )
        with RewardServer(served, log=place / "server.log") as server, server.client() as client:
            publisher = RMPublisherAdapter(CheckpointBackend(client), RewardModelTrainingMode.FULL)
            yield RewardService(
                "vllm",
                RewardModelScorer(client, over_length="cut"),
                lambda rm: publisher.publish(rm).weight_version,
            )
