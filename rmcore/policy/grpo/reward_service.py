"""The reward server of a training: started next to it, and asked by it."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rmcore.config.rlhf import RlhfConfig
from rmcore.policy.grpo.rlhf_requirements import is_served
from rmcore.policy.sampling.rollouts import RolloutScorer
from rmcore.serving.process import RewardServer
from rmcore.serving.scorer import RewardModelScorer
from rmcore.serving.server import ServeSettings


@dataclass(frozen=True, slots=True)
class RewardService:
    """Who scores a training's samples.

    name: vllm, or local: the reward model in the training's process.
    scorer: asks the server; None: there is none.
    """

    name: str
    scorer: RolloutScorer | None = None


@contextmanager
def reward_service(settings: RlhfConfig, checkpoint: Path, *, render_fn: str | None) -> Iterator[RewardService]:
    """Start a vLLM reward server where the settings ask for one; nothing of it is left after the block.

    Raises:
        ConfigError: vLLM is requested and not there.
        ServingError: it did not start, or its rewards are not those of PyTorch.
    """
    if not is_served(settings):
        yield RewardService("local")
        return
    with tempfile.TemporaryDirectory(prefix="rm-opt-rewards-") as folder:
        place = Path(folder)
        served = ServeSettings(str(checkpoint), port=0, render_fn=render_fn, weights_folder=place / "weights")
        with RewardServer(served, log=place / "server.log") as server, server.client() as client:
            yield RewardService("vllm", RewardModelScorer(client, over_length="cut"))
