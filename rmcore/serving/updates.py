"""The folders that vLLM loads: a checkpoint, and the served folder with what a trainer has changed. Whole or not there.

    weights/
        served-000001/    linked from a checkpoint
        update-3f1c.../   written by a trainer: the served folder, with new files for what travelled

vLLM always reloads a whole folder, so an update is one: its files have the names and the tensors of the served ones,
and a file in which nothing travels is a link. `update.json` has the sha256 of each file that is new, and the update's
digest is that of `update.json`. A trainer says it over HTTP, so a folder that was cut short, changed or confused with
another is found out before it is loaded.
"""

import hashlib
import json
import re
import shutil
import stat
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rmcore.core.errors import ModelError, RequestError, StoreError
from rmcore.core.files import atomic_folder, file_digest, link_or_copy, read_object, remove_abandoned, remove_folder
from rmcore.models.layers import is_reward_head
from rmcore.models.seal import PREFERENCE_FILE, read_beta, write_beta
from rmcore.serving.types import RewardModelTrainingMode
from rmcore.serving.weight_files import DTYPES, WeightLayout, model_files, some_names

MANIFEST_FILE = "update.json"
WAITING_SECONDS = 3600.0
"""An update that is older has been given up by its publisher."""
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
    layout, names = WeightLayout.read(source), model_files(source)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with published(folder) as temporary:
        for name in names:
            put = link_or_copy if name in layout.files else shutil.copyfile
            put(source / name, temporary / name)


def write_update(
    served: Path,
    state: Mapping[str, Tensor],
    mode: RewardModelTrainingMode,
    *,
    changed: Collection[str] = (),
    beta: float | None = None,
) -> UpdateRef:
    """Publish weights as a folder `update-*` next to the served one, which appears whole or not at all.

    Floating-point tensors are cast to the type they are served in (a trainer's float32 is rounded to nearest where
    bfloat16 is served), so that the server's files keep their types for ever. One file at a time is held in host
    memory.

    Args:
        served: the folder that is served, in the folder that the server shares with its publishers.
        state: whole tensors on any device, by the trainer's parameter names, which are Hugging Face's; more than what
            travels is allowed. Nothing may change them meanwhile.
        mode: what travels: all that is served, the reward head's, or the reward head's and `changed`.
        changed: names of the tensors that adapters were added into, which travel in mode `lora`; the other modes know
            by themselves what travels.
        beta: scale of the margins that the weights were trained with; None: that of the served model.

    Raises:
        RequestError: names are missing or unknown, shapes or types differ, or a value is NaN or infinite in the served
            type.
        ModelError: `served` is not there, or damaged.
        StoreError: the disk is full. Nothing is left.
    """
    layout = WeightLayout.read(served)
    travelling = _travelling(layout, mode, changed)
    _check_state(state, travelling, layout)
    new = [PREFERENCE_FILE, *(file for file in layout.files if layout.names(file) & travelling)]
    folder = served.with_name(f"update-{uuid4().hex}")
    with published(folder) as temporary:
        write_beta(temporary, read_beta(served) if beta is None else beta)
        for name in {*model_files(served), *new} - {PREFERENCE_FILE}:
            if name in new:
                _write_again(served / name, temporary / name, {one: state[one] for one in travelling})
            else:
                link_or_copy(served / name, temporary / name)
        text = json.dumps({name: file_digest(temporary / name) for name in new}, indent=1).encode()
        (temporary / MANIFEST_FILE).write_bytes(text)
    return UpdateRef(folder.name, hashlib.sha256(text).hexdigest())


def _travelling(layout: WeightLayout, mode: RewardModelTrainingMode, changed: Collection[str]) -> set[str]:
    """Names that travel."""
    if mode == RewardModelTrainingMode.FULL:
        return set(layout.tensors)
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
    return {name for name in layout.tensors if is_reward_head(name) or name in adapted}


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


def _write_again(source: Path, target: Path, state: Mapping[str, Tensor]) -> None:
    """Write a file of the served weights to `target`, those of its tensors that `state` has by its values."""
    with safe_open(source, framework="pt") as file:
        values = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
        for name in values.keys() & state.keys():
            # Memory of its own: tied tensors are one, which safetensors refuses.
            values[name] = torch.empty_like(values[name]).copy_(state[name].detach())
            if not _is_finite(values[name]):
                raise RequestError(
                    f"{name} holds NaN or infinity as {values[name].dtype}: the training has diverged, or its values "
                    "are too large for the served type. Publish the last good weights."
                )
        save_file(values, target, file.metadata())


def _is_finite(value: Tensor) -> bool:
    known = value.float() if value.is_floating_point() and value.element_size() == 1 else value  # 8 bits know no NaN
    return bool(torch.isfinite(known).all())


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
        _require(folder / MANIFEST_FILE, digest)
        expected = read_object(folder / MANIFEST_FILE) or {}
        layout = WeightLayout.read(served)
        names = {*model_files(served), PREFERENCE_FILE}
        if extra := {path.name for path in folder.iterdir()} - names - {MANIFEST_FILE}:
            raise RequestError(
                f"update {folder_name} holds {some_names(extra)}, which no update has and vLLM might load unchecked; "
                "write updates with write_update."
            )
        if other := WeightLayout.read(folder).tensors.items() ^ layout.tensors.items():  # before gigabytes are read
            raise RequestError(
                f"update {folder_name} has {some_names({name for name, _ in other})} with another name, shape, type or "
                "file than the served model: this is another model. Start a server for it."
            )
        for name in sorted(names):
            may_differ = name in layout.files or name == PREFERENCE_FILE
            _require(folder / name, expected.get(name) if may_differ else None, served / name)
    except (OSError, ModelError) as error:
        raise RequestError(
            f"update {folder_name!r:.80} cannot be read, or is not whole ({error}); make its files readable for the "
            "server, or publish again."
        ) from error
    return folder


def _require(path: Path, digest: object, served: Path | None = None) -> None:
    """Make sure that a file is a plain one of this digest; where there is none, the same as the served one."""
    if not stat.S_ISREG(path.lstat().st_mode):
        raise RequestError(f"{path} is no plain file but a link or the like; write updates with write_update.")
    if digest is None and served is not None:
        if path.samefile(served):
            return
        digest = file_digest(served)
    found = file_digest(path)
    if found != digest:
        raise RequestError(
            f"{path} has sha256 {found[:12]}, and {str(digest)[:12]} is expected: it was cut short, changed or is of "
            "another update, or other weights are served since it was written. Publish again."
        )


def drop_left(weights_folder: Path, served: str = "", over: Collection[str] = ()) -> None:
    """Remove the folders that no server and no publisher needs any more; what cannot be removed is said.

    What a living publisher writes stays, and so does an update that may still be requested.

    Args:
        weights_folder: of the one server that publishes through it.
        served: name of the folder that is served, if one is.
        over: names of updates that are not requested again.
    """
    given_up = time.time() - WAITING_SECONDS
    try:
        for folder in [*weights_folder.glob("served-*"), *weights_folder.glob("update-*")]:
            is_old = folder.name in over or folder.name.startswith("served-") or folder.lstat().st_mtime < given_up
            if folder.name != served and is_old and folder.is_dir() and not folder.is_symlink():
                remove_folder(folder)
        remove_abandoned(weights_folder, lambda name: name.startswith(("served-", "update-")))
    except OSError as error:  # weights serve all the same
        print(
            f"warning: old weights in {weights_folder} could not be deleted ({error}); delete them by hand",
            file=sys.stderr,
        )
