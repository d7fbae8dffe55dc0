"""Publishing the weights of a training to the server that scores for it, while both run.

    publisher = create_rm_publisher("http://127.0.0.1:8100", mode="head_only")
    publisher.publish(rm)                    # after any step; the server answers as the next version
    Trainer(..., callbacks=[PublishEvery(publisher, num_steps=50)])

One publication: write the tensors that travel -> the server checks digest, names, shapes and types against what it
serves -> requests under way end, new ones wait -> vLLM reloads everything -> the probe, scored by the publisher's own
model, must come out the same -> requests continue, as the next version. Nothing sleeps: the answer to the publication
is the signal that the new version serves. What fails on the way leaves the old version serving.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from torch import Tensor

from rmcore.core.errors import ConfigError
from rmcore.models import lora
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.serving.client import RewardClient
from rmcore.serving.parity import make_probe
from rmcore.serving.types import RewardModelTrainingMode, VersionInfo, WeightUpdate
from rmcore.serving.updates import write_update
from rmcore.training.evaluation import Evaluation

PUBLISH_SECONDS = 900.0


class RMPublisherAdapter:
    """Publishes one reward model's weights, one mode, one server.

    They travel as safetensors in a folder that both sides see: any device, any number of GPUs, one file system.

    Args:
        client: of the server.
        mode: which tensors travel.
        weights_folder: the server's weights folder as this machine sees it; None: under the server's own name for it.
    """

    def __init__(self, client: RewardClient, mode: RewardModelTrainingMode, weights_folder: Path | None = None) -> None:
        self.client = client
        self.mode = mode
        self.weights_folder = weights_folder

    def publish(self, rm: BradleyTerryRM) -> VersionInfo:
        """Have the server serve the present weights of `rm`. The model, its modes and random states stay as they are.

        Raises:
            ConfigError: mode lora without adapters, or the server's folder cannot be seen from here.
            RequestError: the tensors do not fit what is served, or are not finite; the old version serves on.
            ModelError, StoreError: the update could not be written, as the disk is full or other weights are served
                meanwhile.
            ServingError: the server failed or is away; its /health says what it serves.
        """
        if (self.mode == RewardModelTrainingMode.LORA) != rm.has_adapters and self.mode != RewardModelTrainingMode.FULL:
            raise ConfigError(
                f"mode={self.mode} does not fit a model {'with' if rm.has_adapters else 'without'} LoRA adapters: it "
                "would leave out what was trained. Use lora with adapters, head_only or full without."
            )
        update = self._write(rm, self.client.version())
        return self.client.publish(update, timeout_s=PUBLISH_SECONDS)

    def _write(self, rm: BradleyTerryRM, served: VersionInfo) -> WeightUpdate:
        """Put the weights next to those that are served."""
        place = self.weights_folder or Path(served.weights_folder)
        layout_folder = place / Path(served.layout_folder).name
        if not layout_folder.is_dir():
            raise ConfigError(
                f"the server publishes through {served.weights_folder}, and {layout_folder} is not to be seen from "
                "here: give the server a --weights-dir on a file system that both share, and name it as seen from here."
            )
        written = write_update(layout_folder, travelling_state(rm), self.mode, changed=adapted_names(rm), beta=rm.beta)
        probe = make_probe(rm, bf16=served.dtype == "bfloat16")
        return WeightUpdate(folder=written.folder_name, digest=written.digest, mode=self.mode, probe=probe)


def create_rm_publisher(
    address: str,
    *,
    token: str | None = None,
    mode: RewardModelTrainingMode | Literal["full", "head_only", "lora"] = "full",
    weights_folder: str | Path | None = None,
) -> RMPublisherAdapter:
    """A publisher to the reward server at `address`, through a folder that both see.

    Args:
        address: of the server, such as http://127.0.0.1:8100.
        token: the server's bearer token; None: as `RewardClient` finds it.
        mode: which tensors the training changes.
        weights_folder: the server's weights folder under the name that it has on this machine, if another one.
    """
    folder = None if weights_folder is None else Path(weights_folder)
    return RMPublisherAdapter(RewardClient(address, token=token), RewardModelTrainingMode(mode), folder)


class PublishEvery:
    """A trainer's callback: publishes at the first evaluation after every `num_steps` steps.

    Args:
        publisher: to which server.
        num_steps: steps between publications; the trainer calls back every `eval_every` steps only.
    """

    def __init__(self, publisher: RMPublisherAdapter, num_steps: int) -> None:
        if num_steps < 1:
            raise ConfigError(f"num_steps={num_steps}: publish after at least one step.")
        self.publisher = publisher
        self.num_steps = num_steps
        self._published = 0

    def __call__(self, evaluation: Evaluation) -> Mapping[str, float]:
        """Publish if it is time, and tell which version serves and what that took."""
        if evaluation.step // self.num_steps <= self._published // self.num_steps:
            return {}
        started = time.perf_counter()
        version = self.publisher.publish(evaluation.rm)
        self._published = evaluation.step
        return {
            "cost/published_version": float(version.weight_version),
            "cost/publish_seconds": time.perf_counter() - started,
        }


def travelling_state(rm: BradleyTerryRM) -> Mapping[str, Tensor]:
    """The weights by the plain model's own names, with adapters added in."""
    state = rm.whole_state()
    return lora.merged_state(rm.model, state) if rm.has_adapters else state


def adapted_names(rm: BradleyTerryRM) -> frozenset[str]:
    """Names, in the plain model, of all weights that training with adapters changes; empty without adapters."""
    if not rm.has_adapters:
        return frozenset()
    return frozenset(_plain_name(name) for name, weight in rm.model.named_parameters() if weight.requires_grad)


def _plain_name(name: str) -> str:
    """Which weight of the plain model a trained parameter of PEFT's wrapper becomes a part of."""
    name = name.removeprefix(lora.PEFT_PREFIX)
    adapted, is_adapter, _ = name.partition(".lora_")
    if is_adapter:
        return f"{adapted}.weight"
    return name.replace(".modules_to_save.default.", ".").replace(".base_layer.", ".")
