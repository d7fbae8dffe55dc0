"""An ensemble on disk: where its members are, what they were, and how they were calibrated.

Members stay where they are: `ensemble.json` names their folders and a digest of what gives the rewards. A path is
relative where the checkpoint is in the parent of the ensemble's folder, so that both can be moved together, and
absolute elsewhere.
"""

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast, get_args

from rmcore.config.model import WeightDtype
from rmcore.core.errors import ConfigError, ModelError
from rmcore.core.files import known_digests, write_json
from rmcore.ensembles.agreement import Calibration
from rmcore.models.seal import SEAL_FILE

RECORD_FILE = "ensemble.json"
FORMAT = 1
MODEL_SUFFIXES = (".safetensors", ".json", ".jinja", ".txt", ".model", ".py")
"""Suffixes of a checkpoint's files that decide its rewards: weights, configuration, tokenizer, rendering."""


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """Where members came from: one checkpoint each."""

    checkpoints: tuple[str, ...]
    dtype: WeightDtype = "float32"
    """Format of the weights, as they were loaded."""


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """The record in an ensemble's folder, verified."""

    source: Source
    calibration: Calibration | None
    threshold: float | None


def write_folder(folder: Path, source: Source, calibration: Calibration | None, threshold: float | None) -> Path:
    """Write `ensemble.json`; returns `folder`.

    Raises:
        ConfigError: a checkpoint is no local folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    members = [
        {"checkpoint": _name(folder, _folder_of(name)), "digest": checkpoint_digest(_folder_of(name))}
        for name in source.checkpoints
    ]
    record = {
        "format": FORMAT,
        "members": members,
        "dtype": source.dtype,
        "calibration": None if calibration is None else asdict(calibration),
        "uncertainty_threshold": threshold,
    }
    write_json(folder / RECORD_FILE, record)
    return folder


def read_folder(folder: Path) -> Record:
    """Read an ensemble's folder; every file must be what it was when the ensemble was saved.

    Raises:
        ModelError: a file is missing, damaged or another one.
    """
    record = _read_record(folder / RECORD_FILE)
    try:
        checkpoints = [_verified(folder, str(one["checkpoint"]), one["digest"]) for one in record["members"]]
        found = record["calibration"]
        calibration = None
        if found is not None:
            lists = {name: tuple(map(float, found[name])) for name in ("offsets", "scales")}
            calibration = Calibration(**{**found, **lists})
        dtype = record["dtype"]
        if dtype not in get_args(WeightDtype):
            raise ValueError(f"dtype {dtype!r}")
        source = Source(tuple(checkpoints), cast(WeightDtype, dtype))
        return Record(source, calibration, record["uncertainty_threshold"])
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(folder / RECORD_FILE, error) from error


def checkpoint_digest(folder: Path) -> str:
    """sha256, in 64 hex digits, over the sorted (name, sha256) of the files in a folder that decide its rewards."""
    files = sorted(
        path for path in folder.iterdir() if path.is_file() and path.suffix in MODEL_SUFFIXES and path.name != SEAL_FILE
    )
    listed = json.dumps([[path.name, digest] for path, digest in zip(files, known_digests(files), strict=True)])
    return hashlib.sha256(listed.encode()).hexdigest()


def _folder_of(name: str) -> Path:
    folder = Path(name)
    if not folder.is_dir():
        raise ConfigError(
            f"{name} is no folder on this machine, so it cannot be said later whether it is still the same model; "
            "download it, and name the folder."
        )
    return folder.resolve()


def _name(folder: Path, checkpoint: Path) -> str:
    home = folder.resolve()
    return os.path.relpath(checkpoint, home) if checkpoint.is_relative_to(home.parent) else str(checkpoint)


def _verified(folder: Path, name: str, digest: str) -> str:
    checkpoint = Path(os.path.normpath(folder.resolve() / name))
    if not checkpoint.is_dir():
        raise ModelError(
            f"member {checkpoint} of the ensemble {folder} is not there; put it back, or make the ensemble again."
        )
    found = checkpoint_digest(checkpoint)
    if found != digest:
        raise ModelError(
            f"member {checkpoint} has digest {found[:12]}, the ensemble {folder} was made of {str(digest)[:12]}: its "
            "files changed since, and the calibration is of other rewards. Restore them, or make the ensemble again."
        )
    return str(checkpoint)


def _read_record(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ModelError(
            f"{path} is not there, so {path.parent} is no ensemble; name a folder that an ensemble was saved to."
        )
    try:
        record = json.loads(path.read_bytes())
        if record["format"] != FORMAT:
            raise ValueError(f"format {record['format']}, this version reads {FORMAT}")
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(path, error) from error
    return dict(record)


def _damaged(path: Path, error: Exception) -> ModelError:
    return ModelError(f"{path} is damaged ({error!r}); restore it, or make the ensemble again.")
