"""Weights in their files: which tensors these hold, and those that stay there until the model is sharded.

The index of several files is not trusted. A model that is to be sharded is first loaded from placeholders, so that no
process ever holds all of it: tensors of the right shape that are one column in memory, repeated. The library does with
them all that it does with weights (it renames, ties, draws what is missing and computes buffers), and a parameter that
is the placeholder itself afterwards is the tensor of that name in the files, value for value. Its slices are read when
the model is sharded. The reward head, buffers and all that was drawn are real from the start.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel

from rmcore.core.errors import ModelError
from rmcore.core.hub import is_hub_name
from rmcore.models.layers import is_reward_head

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


class Held(NamedTuple):
    """A tensor as the header of its file describes it."""

    dtype: str
    """Safetensors' word."""
    shape: tuple[int, ...]


def read_index(folder: Path) -> dict[str, str] | None:
    """{tensor: file} of the index; None where there is none.

    Raises:
        ModelError: it is damaged, or names a file that does not lie directly in `folder`: a path, or a link out of it.
            Links of the hub's cache, from a snapshot to the blobs next to it, are its way of storing files and stay.
    """
    path = folder / INDEX_FILE
    if not path.exists():
        return None
    try:
        listed = json.loads(path.read_bytes())["weight_map"]
        if not all(isinstance(file, str) for file in listed.values()) or not listed:
            raise TypeError("weight_map does not map names to files")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{path} is damaged ({error!r}); save or download the model again.") from error
    for file in set(listed.values()):
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise ModelError(
                f"{path} names {file!r}, which is no safetensors file directly in its folder; such an index cannot be "
                "trusted. Save the model again with save_pretrained."
            )
        if not _lies_in(folder.resolve(), (folder / file).resolve()):
            raise ModelError(
                f"{folder / file}, which the index names, is a link to {(folder / file).resolve()}, outside the "
                "model's folder; such a folder cannot be trusted. Put the file itself there, if the weights are yours."
            )
    return dict(listed)


def read_tensors(folder: Path) -> dict[str, Held]:
    """Describe the tensors of a model's folder by the headers of its files; {} where it has no safetensors.

    Raises:
        ModelError: the index or a file is damaged.
    """
    whole = (folder / WEIGHTS_FILE).is_file()  # which the library takes where there is an index, too
    files = [WEIGHTS_FILE] if whole else sorted(set((read_index(folder) or {}).values()))
    found: dict[str, Held] = {}
    for file in files:
        found |= read_header(folder / file)
    return found


def read_header(path: Path) -> dict[str, Held]:
    """Describe the tensors of a safetensors file without their values: 100 GB are described in milliseconds.

    Raises:
        ModelError: it is absent, cut short or damaged.
    """
    try:
        # Not as "pt": torch would map the file so that the kernel sets memory aside for all of it.
        with safe_open(path, framework="np") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - it is no mapping
            return {name: Held(held.get_dtype(), tuple(held.get_shape())) for name, held in slices.items()}
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"{path} cannot be read as safetensors ({error}): it is absent, cut short or damaged; copy or save it "
            "again."
        ) from error


def _lies_in(folder: Path, file: Path) -> bool:
    if folder in file.parents:
        return True
    return folder.parent.name == "snapshots" and folder.parent.parent / "blobs" in file.parents


@dataclass(frozen=True, slots=True)
class Place:
    """Place of a tensor in a file."""

    file: Path
    name: str

    def read(self) -> Tensor:
        """The tensor; pages of the file are read as they are looked at."""
        with safe_open(self.file, framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(self.name)
            return tensor

    def read_rows(self, start: int, count: int) -> Tensor:
        """Some of its rows, copied out of the file."""
        with safe_open(self.file, framework="pt") as opened:
            rows: Tensor = opened.get_slice(self.name)[start : start + count]
            return rows


class Deferred:
    """The parameters of one model whose values are still in their files."""

    def __init__(self, places: dict[int, Place], placeholders: Iterable[Tensor]) -> None:
        """Take the place of each placeholder by its address; `placeholders` are kept, so that addresses stay theirs."""
        self._places = places
        self._placeholders = list(placeholders)

    def values(self, tensor: Tensor) -> Tensor:
        """The tensor that a placeholder stands for, in the precision of its file; any other tensor is given back."""
        place = self._places.get(tensor.data_ptr()) if tensor.device.type == "cpu" else None
        return tensor if place is None else place.read()

    def leave_out(self, model: nn.Module) -> dict[str, Place]:
        """Put parameters without memory (on torch's meta device) in the place of placeholders; their files by name.

        Raises:
            ModelError: the model has not all of them any more, so some weights would never be read.
        """
        found: dict[str, Place] = {}
        for name, parameter in list(model.named_parameters()):
            place = self._places.get(parameter.data_ptr())
            if place is not None:
                found[name] = place
                holder, _, leaf = name.rpartition(".")
                empty = nn.Parameter(
                    torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"),
                    requires_grad=parameter.requires_grad,
                )
                setattr(model.get_submodule(holder), leaf, empty)
        if len(found) != len(self._places):
            raise ModelError(
                f"of {len(self._places)} weights that are to be read when the model is sharded {len(found)} are left: "
                "something has copied or replaced the others. Train it in one process."
            )
        return found


def load_deferred(source: str, config: PretrainedConfig) -> tuple[PreTrainedModel, frozenset[str], Deferred]:
    """Load the model of a folder or hub name without the values of its backbone, in float32.

    Returns:
        The model, the names of the parameters that its files do not hold, and what is still to be read.

    Raises:
        ModelError: this model must be loaded whole; the message is the reason, as part of a sentence.
    """
    places = _places(source)
    read = {name: tensor for name, place in places.items() if (tensor := _small(place)) is not None}
    hollow = {name: _placeholder(place) for name, place in places.items() if name not in read}
    with torch.device("meta"):
        kind: Any = type(AutoModelForSequenceClassification.from_config(config))
    model, info = kind.from_pretrained(
        None, config=config, state_dict=read | hollow, dtype=torch.float32, output_loading_info=True
    )
    model.config.name_or_path = model.name_or_path = source
    by_address = {tensor.data_ptr(): (tensor, places[name]) for name, tensor in hollow.items()}
    whole = {tensor.data_ptr() for tensor in read.values()}
    missing = frozenset(info["missing_keys"])
    kept: dict[int, Place] = {}
    real: dict[str, Tensor] = {}
    addresses = [parameter.data_ptr() for _, parameter in model.named_parameters(remove_duplicate=False)]
    for name, parameter in model.named_parameters():
        placeholder, place = by_address.get(parameter.data_ptr(), (None, None))
        if placeholder is None or place is None:
            if name not in missing and parameter.data_ptr() not in whole:
                raise ModelError(f"{name} is made from its files in another way than by reading it")
            continue
        if (parameter.shape, parameter.stride()) != (placeholder.shape, placeholder.stride()):
            raise ModelError(f"{name} is another form of what is in its files")
        if addresses.count(parameter.data_ptr()) > 1:
            raise ModelError(f"it uses one weight in several places ({name} is one)")
        if is_reward_head(name):
            real[name] = place.read().to(parameter.dtype)
        else:
            kept[parameter.data_ptr()] = place
    real |= {
        name: by_address[value.data_ptr()][1].read().to(value.dtype)
        for name, value in model.named_buffers()
        if value.data_ptr() in by_address
    }
    model.load_state_dict(real, strict=False, assign=True)
    return model, missing, Deferred(kept, hollow.values())


def _places(source: str) -> dict[str, Place]:
    """Places of all tensors of a model."""
    folder = Path(source)
    if is_hub_name(source):
        folder = Path(snapshot_download(source, allow_patterns=["model*.safetensors", INDEX_FILE]))
    single = folder / WEIGHTS_FILE
    if single.is_file():  # which the library takes where there is an index, too
        with safe_open(single, framework="pt") as opened:
            return {name: Place(single, name) for name in opened.keys()}  # noqa: SIM118 - it is no mapping
    index = read_index(folder)
    if index is None:
        raise ModelError(f"there is no {WEIGHTS_FILE} in {folder}")
    return {name: Place(folder / file, name) for name, file in index.items()}


def _small(place: Place) -> Tensor | None:
    """The tensor, where it is read at once: a single number, nothing, or numbers of another kind than weights."""
    with safe_open(place.file, framework="pt") as opened:
        held = opened.get_slice(place.name)
        if math.prod(held.get_shape()) > 1 and held.get_dtype() in FLOATS:
            return None
        tensor: Tensor = opened.get_tensor(place.name)
        return tensor.float() if tensor.is_floating_point() else tensor


def _placeholder(place: Place) -> Tensor:
    """A tensor of the shape in the file with memory for its first column; turned or cut it has other strides."""
    with safe_open(place.file, framework="pt") as opened:
        rows, *others = opened.get_slice(place.name).get_shape()
    return torch.zeros(rows).as_strided((rows, *others), (1, *(0 for _ in others)))
