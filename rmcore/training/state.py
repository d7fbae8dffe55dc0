"""The tensors of a resumable state: weights, optimizer, random generators, the rewards under the best weights.

Everything is stored by parameter name and whole, not by rank, so that another number of processes can resume from it;
and read with `weights_only=True`, so that a state can hold numbers and nothing else.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rmcore.config.train import RUN_ONLY_FIELDS, TrainConfig
from rmcore.core.errors import TrainingError
from rmcore.data.rendering import TokenizedPair
from rmcore.data.tokenized import TokenizedPairs
from rmcore.data.tokenized_observations import TokenizedObservation, TokenizedObservations
from rmcore.training.optimizers import OptimizerSet, placed_like, whole
from rmcore.training.ranks import Ranks

RandomState = dict[str, Tensor]


def random_state(device: torch.device) -> RandomState:
    """The state of torch's generators that training draws from (dropout)."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: RandomState, device: torch.device) -> None:
    """Put `random_state` back."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def seed_everything(seed: int, ranks: Ranks) -> None:
    """Seed dropout: a different stream on every rank, because each sees other pairs."""
    torch.manual_seed(seed + 1_000_003 * ranks.rank)


def trained_tensors(model: nn.Module) -> dict[str, Tensor]:
    """List what training changes, by name: trained parameters and saved buffers. Frozen weights are the base's."""
    parameters = dict(model.named_parameters())
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    others = {name: value for name, value in model.state_dict().items() if name not in parameters}
    return trained | {name: value for name, value in others.items() if isinstance(value, Tensor)}


def collect_state(
    model: nn.Module, optimizer: OptimizerSet, random_states: list[RandomState], best_rewards: np.ndarray, *, keep: bool
) -> dict[str, Any]:
    """Everything with tensors in it. On several ranks every one must call this; the one that writes it keeps it."""
    return {
        "model": {name: whole(tensor, keep=keep) for name, tensor in trained_tensors(model).items()},
        "optimizer": optimizer.named_state(keep=keep),
        "random": random_states,
        "best_rewards": torch.from_numpy(best_rewards.copy()),
    }


def load_state(path: Path) -> dict[str, Any]:
    """Read what `collect_state` gave and `torch.save` wrote."""
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return state


@torch.no_grad()
def apply_state(state: dict[str, Any], model: nn.Module, optimizer: OptimizerSet) -> None:
    """Put weights and optimizer back, bit for bit.

    Raises:
        TrainingError: the state has other tensors than the model.
    """
    targets = trained_tensors(model)
    differing = sorted(targets.keys() ^ state["model"].keys())
    if differing:
        raise TrainingError(
            f"the resumable state and the model differ in {len(differing)} tensors, first {differing[:3]}; it belongs "
            "to another model or library version. Start anew in another folder."
        )
    for name, tensor in targets.items():
        tensor.copy_(placed_like(state["model"][name], tensor))
    optimizer.load_named_state(state["optimizer"])


def training_settings(
    config: TrainConfig,
    seed: int,
    train: Sequence[TokenizedPair] | Sequence[TokenizedObservation],
    validation: Sequence[TokenizedPair],
) -> dict[str, Any]:
    """List what a state must share with the training that resumes from it, by dotted name."""
    # Where it is to stop changes no step before.
    fields = config.model_dump(mode="json", exclude={*RUN_ONLY_FIELDS, "stop_step"})
    return {
        **{f"train.{name}": value for name, value in fields.items()},
        "seed": seed,
        "pairs.train": _digest(train),
        "pairs.validation": _digest(validation),
    }


def settings_digest(settings: Mapping[str, Any]) -> str:
    """Hex digits of what `training_settings` and its callers list."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()


def _digest(pairs: Sequence[TokenizedPair] | Sequence[TokenizedObservation]) -> str:
    if isinstance(pairs, TokenizedObservations):
        hashed = hashlib.sha256()
        for line in pairs.digest_lines():
            hashed.update(line)
        return f"{len(pairs)} observations, {hashed.hexdigest()[:12]}"
    if isinstance(pairs, TokenizedPairs):
        return f"{len(pairs)} pairs, {pairs.digest()[:12]}"
    digest = hashlib.sha256()
    for pair in pairs:
        if isinstance(pair, TokenizedObservation):
            digest.update(repr(pair).encode())
            continue
        digest.update(f"{pair.pair_id} {pair.chosen.ids} {pair.rejected.ids} {pair.target_margin}\n".encode())
    return f"{len(pairs)} pairs, {digest.hexdigest()[:12]}"
