"""The folders that vLLM loads: a checkpoint, and the served folder with what a trainer has changed. Whole or not there.

    weights/
        served-000001/    linked from a checkpoint
        update-3f1c.../   written by a trainer: what travelled, and links to the other files of what was served

vLLM always reloads a whole folder, and of that every tensor of every file in the index. A tensor that travelled must
therefore be gone from the older files: one that has it next to others is written again without it. That happens once,
because from its first update on the head has a file of its own, and so have the adapted layers.

`update.json` has the sha256 of each file that is new, and the update's digest is that of `update.json`. A trainer says
it over HTTP, so a folder that was cut short, changed or confused with another is found out before it is loaded.
"""

import hashlib
import json
import re
import shutil
import stat
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from rmcore.core.errors import ModelError, RequestError, StoreError
from rmcore.core.files import atomic_folder, file_digest, link_or_copy, read_object
from rmcore.models.layers import is_reward_head
from rmcore.models.seal import PREFERENCE_FILE, read_beta, write_beta
from rmcore.models.weight_files import INDEX_FILE
from rmcore.serving.types import RewardModelTrainingMode
from rmcore.serving.weight_files import (
    DTYPES,
    WHOLE_FILE,
    WeightLayout,
    copy_without,
    is_finite,
    some_names,
    text_files,
    write_index,
)

MANIFEST_FILE = "update.json"
SHARD_BYTES = 2 << 30
"""Largest file of an update, of which one at a time is held in host memory; a larger tensor has a file of its own."""
FLOATS = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
"""Types that may be cast into each other. 8-bit types have scales next to them, which a cast would not make."""


class UpdateRef(NamedTuple):
    """The reference by which a server is told of a published update."""

    folder_name: str
    """Below the weights folder."""
    digest: str
    """sha256 of its manifest."""


@contextmanager
def published(folder: Path) -> Iterator[Path]:
    """Give a hidden folder to write into; it becomes `folder`, synced, when the block ends well, else it is removed.

    Raises:
        StoreError: there is something of that name already, or writing failed, above all because the disk is full.
    """
    if folder.exists():
        raise StoreError(f"{folder} is there already and may be in use; drop it first, or take another name.")
    try:
        with atomic_folder(folder) as temporary:
            yield temporary
    except (OSError, SafetensorError) as error:
        raise StoreError(
            f"{folder} could not be written ({error}), most often because the disk is full; nothing of it is left and "
            "what was there before is untouched. Free space and try again."
        ) from error


def stage_checkpoint(source: Path, folder: Path) -> None:
    """Make `folder` the model that `source` is now, without its other files, so that it stays what it is.

    Weights are hard links: a checkpoint that its owner replaces or deletes lives on here, at no cost. Who writes into
    one of its files would change this one too, but nobody does: this platform publishes checkpoints by renaming, and
    safetensors itself (0.8) writes a new file and renames it. Small files are edited by hand, so they are copied.

    Raises:
        ModelError: `source` is no whole Hugging Face folder; see `WeightLayout.read`.
        StoreError: `folder` exists, or the disk is full; nothing is left.
    """
    layout, texts = WeightLayout.read(source), text_files(source)
    if layout.files != [WHOLE_FILE]:
        texts.append(INDEX_FILE)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with published(folder) as temporary:
        for name in texts:
            shutil.copyfile(source / name, temporary / name)
        for name in layout.files:
            link_or_copy(source / name, temporary / name)


def write_update(
    served: Path,
    state: Mapping[str, Tensor],
    mode: RewardModelTrainingMode,
    *,
    changed: Collection[str] = (),
    beta: float | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> UpdateRef:
    """Publish weights as a folder `update-*` next to the served one, which appears whole or not at all.

    Floating-point tensors are cast to the type they are served in (a trainer's float32 is rounded to nearest where
    bfloat16 is served), so that the server's files keep their types for ever. What does not travel is linked; what is
    written again are files of the served folder that hold travelled tensors next to others.

    Args:
        served: the folder that is served, in the folder that the server shares with its publishers.
        state: whole tensors on any device, by the trainer's parameter names, which are Hugging Face's; more than what
            travels is allowed. Nothing may change them meanwhile.
        mode: what travels: all that is served, the reward head's, or the reward head's and `changed`.
        changed: names of the tensors that adapters were added into, which travel in mode `lora`; the other modes know
            by themselves what travels.
        beta: scale of the margins that the weights were trained with; None: that of the served model.
        shard_bytes: largest file of what travels, in bytes.

    Raises:
        RequestError: names are missing or unknown, shapes or types differ, or a value is NaN or infinite in the served
            type.
        ModelError: `served` is not there, or damaged.
        StoreError: the disk is full. Nothing is left.
    """
    layout = WeightLayout.read(served)
    names = _travelling(layout, mode, changed)
    _check_state(state, names, layout)
    kept = [file for file in layout.files if layout.names(file) - set(names)]
    shards = _shards(names, layout, shard_bytes)
    count = len(kept) + len(shards)
    # Numbered again, as save_pretrained does: no name can meet another one, and none grows from update to update.
    files = [WHOLE_FILE] if count == 1 else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    folder = served.with_name(f"update-{uuid4().hex}")
    with published(folder) as temporary:
        for name in text_files(served):
            if name != PREFERENCE_FILE:  # written again: in a link it would change under the served model
                link_or_copy(served / name, temporary / name)
        write_beta(temporary, read_beta(served) if beta is None else beta)
        for file, name in zip(kept, files, strict=False):
            if layout.names(file) & set(names):
                copy_without(served / file, temporary / name, names)
            else:
                link_or_copy(served / file, temporary / name)
        for shard, name in zip(shards, files[len(kept) :], strict=True):
            save_file(_shard_values(state, shard, layout), temporary / name, metadata={"format": "pt"})
        if count > 1:
            write_index(temporary, files)
        new = [PREFERENCE_FILE, *(name for name in files if not _is_of(served, temporary / name))]
        digests = {name: file_digest(temporary / name) for name in new}
        text = json.dumps(digests, indent=1).encode()
        (temporary / MANIFEST_FILE).write_bytes(text)
    return UpdateRef(folder.name, hashlib.sha256(text).hexdigest())


def _is_of(served: Path, file: Path) -> bool:
    """Whether a file is one of the served folder's, under whatever name."""
    return any(file.samefile(one) for one in served.glob("*.safetensors"))


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
    """Before a byte is written, which takes minutes of a large model."""
    if missing := [name for name in names if name not in state]:
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


def _shards(names: Collection[str], layout: WeightLayout, shard_bytes: int) -> list[list[str]]:
    """Names by file. The head has one of its own, so that head updates afterwards leave all others alone."""
    shards, room = [[name for name in names if is_reward_head(name)]], 0
    for name in names:
        if is_reward_head(name):
            continue
        size = layout.tensors[name].num_bytes
        if len(shards) == 1 or size > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(name)
        room -= size
    return [shard for shard in shards if shard]


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


def check_update(served: Path, folder_name: str, digest: str) -> Path:
    """Make sure that an update is whole, is what its publisher wrote, and fits what is served; gives its folder.

    Reads every byte that is new and changes nothing. That the values are good ones, the probe shows.

    Args:
        served: the folder that is served.
        folder_name: the update's, next to that one.
        digest: that the publisher gave, 64 hex digits.

    Raises:
        RequestError: there is no such folder in the weights folder, it is damaged or not of this digest, or it is of
            another model (other tensors, shapes, types, tokenizer or configuration), holds a file that no update has,
            or was written when other weights were served.
    """
    folder = served.with_name(folder_name) if re.fullmatch(r"update-[\w-]+", folder_name) else None
    if folder is None or not folder.is_dir() or folder.is_symlink():
        raise RequestError(
            f"there is no update {folder_name!r:.80}; publish into {served.parent}, and name the folder alone, as "
            "update-*."
        )
    try:
        _require_digest(folder / MANIFEST_FILE, digest)
        expected = read_object(folder / MANIFEST_FILE) or {}
        given = WeightLayout.read(folder)
        _check_fit(folder, given, WeightLayout.read(served))  # before gigabytes are read
        named = {*text_files(folder), *given.files, INDEX_FILE, MANIFEST_FILE}
        if extra := {path.name for path in folder.iterdir()} - named:
            raise RequestError(
                f"update {folder_name} holds {some_names(sorted(extra))}, which no update has and vLLM might load "
                "unchecked; write updates with write_update."
            )
        for name in [PREFERENCE_FILE, *(name for name in given.files if not _is_of(served, folder / name))]:
            if name not in expected:
                raise RequestError(
                    f"update {folder_name} has no digest of {name}, which is no file of the served weights: they "
                    "changed since it was written. Publish again."
                )
            _require_digest(folder / name, str(expected[name]))
        for name in sorted({*text_files(folder), *text_files(served)} - {PREFERENCE_FILE}):
            _require_digest(folder / name, file_digest(served / name))
    except (OSError, ModelError) as error:
        raise RequestError(
            f"update {folder_name!r:.80} cannot be read, or is not whole ({error}); make its files readable for the "
            "server, or publish again."
        ) from error
    return folder


def _require_digest(path: Path, expected: str) -> None:
    if not stat.S_ISREG(path.lstat().st_mode):
        raise RequestError(f"{path} is no plain file but a link or the like; write updates with write_update.")
    found = file_digest(path)
    if found != expected:
        raise RequestError(
            f"{path} has sha256 {found[:12]}, and {expected[:12]} is expected: it was cut short, changed or is of "
            "another update. Publish again."
        )


def _check_fit(folder: Path, given: WeightLayout, served: WeightLayout) -> None:
    for what, names in (
        ("holds", given.tensors.keys() - served.tensors.keys()),
        ("lacks", served.tensors.keys() - given.tensors.keys()),
    ):
        if names:
            raise RequestError(
                f"update {folder.name} {what} {some_names(names)}, unlike the served model; publish its weights."
            )
    for name, spec in given.tensors.items():
        was = served.tensors[name]
        if (spec.shape, spec.dtype) != (was.shape, was.dtype):
            raise RequestError(
                f"update {folder.name} has {name} as {spec}, served is {was}: this is another model. Start a server "
                "for it."
            )


def drop_stale(weights_folder: Path) -> None:
    """Remove what an earlier server and its publishers, killed ones included, left in a weights folder."""
    for folder in sorted(weights_folder.iterdir()):
        if re.match(r"(\.?(served|update)-|\.merged)", folder.name) and folder.is_dir() and not folder.is_symlink():
            shutil.rmtree(folder)
