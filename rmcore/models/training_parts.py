"""Parts that a reward model has while it is trained, and that are not saved as they are."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor


class TrainingOnlyModule(Protocol):
    """A part of `BradleyTerryRM.model` that is trained with it and is no part of the plain model that is saved."""

    def plain_state(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Give the state of the plain model: the same rewards, the usual names."""
        ...

    def plain_form(self, model: Any) -> AbstractContextManager[None]:
        """Inside the block `model` has the modules of the plain model; what is in them means nothing."""
        ...

    def save(self, state: Mapping[str, Tensor], folder: Path) -> None:
        """Write what the plain state lacks into the checkpoint's folder."""
        ...


class SplitWeights(Protocol):
    """Float32 weights of which `BradleyTerryRM.model` has the bfloat16 halves, while it is trained."""

    def whole_weights(self, model: torch.nn.Module) -> dict[str, Tensor]:
        """Give them by name, on the CPU."""
        ...

    def exact(self, tensor: Tensor) -> Tensor:
        """Give those that a tensor is the halves of; else the tensor."""
        ...

    def widen(self) -> None:
        """Put them in the place of their halves."""
        ...
