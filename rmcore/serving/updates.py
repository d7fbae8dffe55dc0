"""An update of the served weights as a folder, which a trainer writes and a server checks (`update_check.py`).

    update-3f1c.../
        update.json                    what travels: mode, beta, each tensor's shape, type and file, each file's sha256
        head.safetensors               the reward head alone
        backbone-00001.safetensors     the other tensors, at most `SHARD_BYTES` a file

The update's digest is the sha256 of `update.json`, which contains the digests of the rest. A trainer says it over HTTP,
so a folder that was cut short, changed or confused with another is found out before the server touches its weights.
"""

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from uuid import uuid4

import torch
from pydantic import Field
from safetensors.torch import save_file
from torch import Tensor

from rmcore.core.errors import RequestError
from rmcore.core.files import file_digest
from rmcore.models.head import is_reward_head
from rmcore.serving.folders import published
from rmcore.serving.types import RewardModelTrainingMode, Wire
from rmcore.serving.weight_files import DTYPES, WeightLayout, is_finite, some_names

MANIFEST_FILE = "update.json"
SHARD_BYTES = 2 << 30
"""Largest file of an update, of which one at a time is held in host memory; a larger tensor has a file of its own."""
FLOATS = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
"""Types that may be cast into each other. 8-bit types have scales next to them, which a cast would not make."""

FileName = Annotated[str, Field(pattern=r"^[\w-][\w.-]*\.safetensors$")]


class TensorRecord(Wire):
    """One tensor that travels."""

    shape: tuple[Annotated[int, Field(ge=0)], ...] = Field(description="As in the served model.")
    dtype: str = Field(description="Safetensors' word.")
    file: FileName = Field(description="Which file of the folder holds it.")


class Manifest(Wire):
    """`update.json`."""

    mode: RewardModelTrainingMode = Field(description="Which tensors travel.")
    tensors: dict[str, TensorRecord] = Field(min_length=1, description="By name.")
    files: dict[FileName, str] = Field(description="sha256 of each file, by its name.")
    beta: float | None = Field(default=None, gt=0, description="Scale of the margins of these weights; as served.")


@dataclass(frozen=True, slots=True)
class UpdateRef:
    """The reference by which a server is told of a published update."""

    folder_name: str
    """Below the weights folder."""
    digest: str
    """sha256 of its manifest."""


def write_update(
    weights_folder: Path,
    state: Mapping[str, Tensor],
    mode: RewardModelTrainingMode,
    layout: WeightLayout,
    *,
    changed: Collection[str] = (),
    beta: float | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> UpdateRef:
    """Publish weights as a folder `update-*`, which appears whole or not at all.

    Floating-point tensors are cast to the type they are served in (a trainer's float32 is rounded to nearest where
    bfloat16 is served), so that the server's files keep their types for ever.

    Args:
        weights_folder: the folder that the server shares with its publishers.
        state: whole tensors on any device, by the trainer's parameter names, which are Hugging Face's; more than what
            travels is allowed. Nothing may change them meanwhile.
        mode: what travels: all that is served, the reward head's, or the reward head's and `changed`.
        layout: of the served folder.
        changed: names of the tensors that adapters were added into, which travel in mode `lora`; the other modes know
            by themselves what travels.
        beta: scale of the margins that the weights were trained with; None: that of the served model.
        shard_bytes: largest file, in bytes.

    Raises:
        RequestError: names are missing or unknown, shapes or types differ, a value is NaN or infinite in the served
            type, or the weights folder is not there.
        StoreError: the disk is full. Nothing is left.
    """
    names = _travelling(layout, mode, changed)
    if not weights_folder.is_dir():
        raise RequestError(
            f"the server's weights folder {weights_folder} is not on this machine; publish where it is mounted."
        )
    _check_state(state, names, layout)
    folder = weights_folder / f"update-{uuid4().hex}"
    tensors, files = dict[str, TensorRecord](), dict[str, str]()
    with published(folder) as temporary:
        for file, shard in _shards(names, layout, shard_bytes).items():
            save_file(_shard_values(state, shard, layout), temporary / file, metadata={"format": "pt"})
            files[file] = file_digest(temporary / file)
            for name in shard:
                spec = layout.tensors[name]
                tensors[name] = TensorRecord(shape=spec.shape, dtype=spec.dtype, file=file)
        text = Manifest(mode=mode, tensors=tensors, files=files, beta=beta).model_dump_json(indent=1).encode()
        (temporary / MANIFEST_FILE).write_bytes(text)
    return UpdateRef(folder.name, hashlib.sha256(text).hexdigest())


def _travelling(layout: WeightLayout, mode: RewardModelTrainingMode, changed: Collection[str]) -> list[str]:
    """Names that travel, in the layout's order."""
    if mode == RewardModelTrainingMode.FULL:
        return list(layout.tensors)
    adapted = frozenset(changed) if mode == RewardModelTrainingMode.LORA else frozenset()
    unknown = adapted - layout.tensors.keys()
    if unknown or not (adapted or mode == RewardModelTrainingMode.HEAD_ONLY):
        raise RequestError(
            f"changed names {some_names(unknown) or 'nothing'}, and a {mode} update is of tensors that the served "
            "model has and adapters were added into; give their names as in its checkpoint, or publish full."
        )
    if not any(map(is_reward_head, layout.tensors)):
        raise RequestError(
            f"the served model has no reward head by name, so a {mode} update cannot tell what travels; publish full."
        )
    return [name for name in layout.tensors if is_reward_head(name) or name in adapted]


def _check_state(state: Mapping[str, Tensor], names: Collection[str], layout: WeightLayout) -> None:
    missing = [name for name in names if name not in state]
    if missing:
        raise RequestError(
            f"the state lacks {some_names(missing)}, which the server's model has; publish the weights of the model "
            "that is served, by the names of its checkpoint."
        )
    for name in names:
        spec, tensor = layout.tensors[name], state[name]
        if tuple(tensor.shape) != spec.shape:
            raise RequestError(
                f"{name} has shape {list(tensor.shape)} and is served as {list(spec.shape)}: this is another model. "
                "Start a server for it."
            )
        wanted = DTYPES[spec.dtype]
        if tensor.dtype != wanted and not {tensor.dtype, wanted} <= FLOATS:
            raise RequestError(
                f"{name} has type {tensor.dtype} and is served as {wanted}, between which no cast is meant; publish it "
                "in the served type."
            )


def _shards(names: Collection[str], layout: WeightLayout, shard_bytes: int) -> dict[str, list[str]]:
    """{file: names}. The head has a file of its own, so that head updates afterwards leave all others alone."""
    shards = {"head.safetensors": [name for name in names if is_reward_head(name)]}
    current, room = list[str](), 0
    for name in names:
        if is_reward_head(name):
            continue
        size = layout.tensors[name].num_bytes
        if not current or size > room:
            current, room = shards.setdefault(f"backbone-{len(shards):05d}.safetensors", []), shard_bytes
        current.append(name)
        room -= size
    return {file: shard for file, shard in shards.items() if shard}


def _shard_values(state: Mapping[str, Tensor], names: Collection[str], layout: WeightLayout) -> dict[str, Tensor]:
    """The tensors of one file, on the CPU, in the served type, each with memory of its own."""
    values, seen = dict[str, Tensor](), set[int]()
    for name in names:
        value = state[name].detach().to(device="cpu", dtype=DTYPES[layout.tensors[name].dtype]).contiguous()
        if not is_finite(value):
            raise RequestError(
                f"{name} holds NaN or infinity as {value.dtype}: the training has diverged, or its values are too "
                "large for the served type. Publish the last good weights."
            )
        memory = value.untyped_storage().data_ptr()
        values[name] = value.clone() if memory in seen else value  # tied tensors are one; safetensors refuses that
        seen.add(memory)
    return values
