"""Weights of a model in training at several of its steps, on disk, and back in the model for a while or for good."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from rmcore.core.files import atomic_file


class Snapshots:
    """Keeps what is trained of a model: all weights, or those of its adapters.

    Args:
        folder: for the files, `NUMBER.safetensors`; readable by their owner only.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def save(self, model: Any, number: int) -> None:
        """Write the model's trained weights as `number`, whole or not at all."""
        with atomic_file(self._file(number), mode=0o600) as unfinished:
            # Parameters are named once each, so a head tied to the embeddings is written once.
            save_file({name: parameter.detach().cpu().contiguous() for name, parameter in _trained(model)}, unfinished)

    def load(self, model: Any, number: int) -> None:
        """Put the weights `number` into the model, in place."""
        kept = load_file(self._file(number))
        with torch.no_grad():
            for name, parameter in _trained(model):
                parameter.copy_(kept[name])

    def has(self, number: int) -> bool:
        """Whether the weights `number` are still there."""
        return self._file(number).is_file()

    def keep(self, numbers: Sequence[int]) -> None:
        """Delete all weights but those of these numbers."""
        for file in self.folder.glob("*.safetensors"):
            if int(file.stem) not in numbers:
                file.unlink()

    @contextmanager
    def inside(self, model: Any, number: int) -> Iterator[Any]:
        """The model with the weights `number`; after the block it has those from before it, to the bit."""
        present = {name: parameter.detach().clone() for name, parameter in _trained(model)}
        try:
            self.load(model, number)
            yield model
        finally:
            with torch.no_grad():
                for name, parameter in _trained(model):
                    parameter.copy_(present[name])

    def _file(self, number: int) -> Path:
        return self.folder / f"{number}.safetensors"


def _trained(model: Any) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
