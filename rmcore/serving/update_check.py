"""Checks that a server makes before an update may touch its weights: nothing here changes a file.

Cheap things first: names and shapes are compared before gigabytes are read. Whatever is wrong is the request's fault,
so all of it is a `RequestError`, and the server continues as it was.
"""

import hashlib
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError
from safetensors import safe_open

from rmcore.core.errors import ModelError, RequestError
from rmcore.core.files import file_digest
from rmcore.models.head import is_reward_head
from rmcore.serving.types import RewardModelTrainingMode
from rmcore.serving.updates import MANIFEST_FILE, Manifest
from rmcore.serving.weight_files import TensorSpec, WeightLayout, is_finite, read_header, some_names


@dataclass(frozen=True, slots=True)
class CheckedUpdate:
    """An update that was found to fit the served weights."""

    folder: Path
    mode: RewardModelTrainingMode
    tensors: Mapping[str, TensorSpec]
    """Tensors that travelled, by name."""
    beta: float | None
    """Scale of the margins of these weights; None: that of the served ones."""

    @property
    def files(self) -> list[str]:
        """Names of its safetensors files, sorted."""
        return sorted({spec.file for spec in self.tensors.values()})


def check_update(
    weights_folder: Path, folder_name: str, digest: str, mode: RewardModelTrainingMode, layout: WeightLayout
) -> CheckedUpdate:
    """Make sure that an update is whole, is what its publisher wrote, and fits the served weights.

    Reads every byte. Nothing is changed.

    Args:
        weights_folder: the folder that the server shares with its publishers.
        folder_name: the update's, directly below it.
        digest: that the publisher gave, 64 hex digits.
        mode: that the publisher gave.
        layout: of the served folder.

    Raises:
        RequestError: the folder is not one of this weights folder's, is damaged, is not of this digest or mode, its
            tensors are not those the mode asks for, differ in shape or type, or hold NaN or infinity.
    """
    try:
        folder = _find(weights_folder, folder_name)
        manifest = _read_manifest(folder, digest)
        if manifest.mode != mode:
            raise RequestError(
                f"update {folder.name} was published as {manifest.mode} and is announced as {mode}; announce it as "
                "what it is."
            )
        _check_fit(folder, manifest, layout)
        specs = {name: TensorSpec(one.shape, one.dtype, one.file) for name, one in manifest.tensors.items()}
        for file, expected in manifest.files.items():
            _check_file(folder / file, expected, {name: spec for name, spec in specs.items() if spec.file == file})
    except (OSError, ModelError) as error:
        raise RequestError(
            f"update {folder_name!r:.80} cannot be read ({error}); make its files readable for the server, or publish "
            "again."
        ) from error
    return CheckedUpdate(folder, mode, specs, manifest.beta)


def _find(weights_folder: Path, folder_name: str) -> Path:
    """The update's folder, which is a real one directly below the weights folder."""
    folder = weights_folder / folder_name if re.fullmatch(r"update-[\w-]+", folder_name) else None
    if folder is None or not folder.is_dir() or folder.is_symlink():
        raise RequestError(
            f"there is no update {folder_name!r:.80}; publish into {weights_folder}, and name the folder alone, as "
            "update-*."
        )
    return folder


def _read_manifest(folder: Path, digest: str) -> Manifest:
    path = folder / MANIFEST_FILE
    _check_regular(path)
    text = path.read_bytes()
    found = hashlib.sha256(text).hexdigest()
    if found != digest:
        raise RequestError(
            f"{path} has sha256 {found[:12]}, the request says {digest[:12]}: it is another update or was changed. "
            "Publish again."
        )
    try:
        manifest = Manifest.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise RequestError(f"{path} is no manifest ({place}: {first['msg']}); write it with write_update.") from error
    if manifest.files.keys() != {record.file for record in manifest.tensors.values()}:
        raise RequestError(f"{path} lists other files than its tensors are in; write it with write_update.")
    return manifest


def _check_fit(folder: Path, manifest: Manifest, layout: WeightLayout) -> None:
    """Whether the mode's tensors, all of them and no others, travel, with the served shapes and types."""
    given = manifest.tensors.keys()
    unknown = given - layout.tensors.keys()
    if manifest.mode == RewardModelTrainingMode.HEAD_ONLY:
        unknown |= {name for name in given if not is_reward_head(name)}
    if unknown:
        raise RequestError(
            f"update {folder.name} holds {some_names(unknown)}, which a {manifest.mode} update of the served model may "
            "not; publish the served model's weights in the right mode."
        )
    full = manifest.mode == RewardModelTrainingMode.FULL
    missing = {name for name in layout.tensors if full or is_reward_head(name)} - given
    if missing:
        raise RequestError(
            f"update {folder.name} lacks {some_names(missing)}, which a {manifest.mode} update must hold; publish it "
            "with write_update."
        )
    for name, record in manifest.tensors.items():
        served = layout.tensors[name]
        if (record.shape, record.dtype) != (served.shape, served.dtype):
            raise RequestError(
                f"update {folder.name} has {name} as {record.dtype} {list(record.shape)}, served is {served}: this is "
                "another model. Start a server for it."
            )


def _check_file(path: Path, expected: str, specs: Mapping[str, TensorSpec]) -> None:
    """Whether a file is the one that was published and holds just these tensors, all finite."""
    _check_regular(path)
    found = file_digest(path)
    if found != expected:
        raise RequestError(
            f"{path} has sha256 {found[:12]}, its manifest says {expected[:12]}: it was cut short or changed. Publish "
            "again."
        )
    if read_header(path).tensors != specs:
        raise RequestError(f"{path} holds other tensors than its manifest says; write updates with write_update.")
    with safe_open(path, framework="pt") as file:
        for name in specs:
            if not is_finite(file.get_tensor(name)):
                raise RequestError(f"{name} in {path} holds NaN or infinity, so rewards would; publish good weights.")


def _check_regular(path: Path) -> None:
    if not stat.S_ISREG(path.lstat().st_mode):
        raise RequestError(f"{path} is no plain file but a link or the like; write updates with write_update.")
