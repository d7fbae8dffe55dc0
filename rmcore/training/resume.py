"""Resumable training states on disk: which one to resume from. Imports no torch, so a parent process can read it too.

    <training folder>/resume/step_<n>/*.safetensors  weights, optimizer, random states (rmcore/training/state.py), each
                                                     process's part in files of its own
                                     record.json     numbers: step, metrics, stopping; the sha256 of each file
                                     checkpoints/    those that the selection of the state names, as hard links
                             resume/beginning.json   the settings it began with, and what was chosen then

A state is written to a temporary folder and renamed, so it exists completely or not at all. The newest two are kept, so
that a training survives the damage of one. Only their owner can read them.
"""

import json
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from rmcore.core.errors import ConfigError, RmcoreError, StoreError
from rmcore.core.files import atomic_file, atomic_folder, file_digest, link_tree, remove_abandoned, write_json
from rmcore.core.tracking import METRICS_FILE

RESUME_FOLDER, RECORD_FILE, BEGINNING_FILE = "resume", "record.json", "beginning.json"
TENSOR_FILES = "*.safetensors"
CHECKPOINTS = "checkpoints"
FINISHED_FILE = "training.json"
"""Written when a training has ended; a folder with it is not resumed."""
KEPT_STATES = 2


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """A complete state to resume from."""

    step: int
    """Number of optimizer steps done."""
    state: Path
    """Its folder."""
    record: Mapping[str, Any]
    notes: tuple[str, ...]
    """Damage found in newer states, which were skipped."""


def find_resume_point(folder: Path) -> ResumePoint | None:
    """Return the newest complete state of a training folder; None if there is none."""
    notes: list[str] = []
    for place in _states(folder):
        record, problem = _read(place)
        if record is not None:
            return ResumePoint(int(record["step"]), place, record, tuple(notes))
        notes.append(f"{place}: {problem}; it was skipped")
    for note in notes:
        print(f"warning: {note}", file=sys.stderr)
    if notes:
        print("warning: no complete state is left; the training starts from the beginning", file=sys.stderr)
    return None


@contextmanager
def new_state(
    folder: Path, step: int, record: Mapping[str, Any], checkpoints: Sequence[Path] = ()
) -> Iterator[tuple[Path, dict[str, str]]]:
    """Give a folder for tensors and a dictionary for the sha256 of each file: the state of `step` when the block ends.

    All older states except one are removed then. The block may end in another thread than the one that began it.

    Args:
        folder: the folder of the training.
        step: number of optimizer steps done.
        record: the numbers.
        checkpoints: folders that the record names. Later checkpoints replace them, so the state keeps its own links,
            which are made before the block.

    Raises:
        StoreError: the state could not be written. Earlier states are untouched.
        RuntimeError: a worker of the feed died meanwhile, see `is_of_a_worker`.
    """
    place, digests = folder / RESUME_FOLDER / f"step_{step}", dict[str, str]()
    try:
        remove_abandoned(place.parent, lambda name: name.startswith("step_"))
        with atomic_folder(place) as temporary:
            temporary.chmod(0o700)
            for checkpoint in checkpoints:
                link_tree(checkpoint, temporary / CHECKPOINTS / checkpoint.name)
            yield temporary, digests
            write_json(temporary / RECORD_FILE, {**record, "step": step, "files": digests})
            for passed_over in _states(folder):
                if int(passed_over.name[5:]) >= step:  # damaged, or this one would not have been resumed from an older
                    shutil.rmtree(passed_over)
        for old in _states(folder)[KEPT_STATES:]:
            shutil.rmtree(old)
    except (OSError, RuntimeError, SafetensorError) as error:  # by a RuntimeError torch tells of a full disk
        if is_of_a_worker(error):
            raise
        raise StoreError(
            f"the state of step {step} could not be written ({error}), most often because the disk is full; the "
            "one before it is untouched. Free space and run again."
        ) from error


def is_of_a_worker(error: BaseException) -> bool:
    """Whether torch reports a worker of the DataLoader: its death in a handler of SIGCHLD, wherever the trainer is."""
    return isinstance(error, RuntimeError) and not isinstance(error, RmcoreError) and "DataLoader" in str(error)


def tensor_digests(state: Path) -> dict[str, str]:
    """The sha256 of each file with tensors in the folder of a state, by name; {} where it is not there.

    Raises:
        OSError: one cannot be read.
    """
    files = sorted(state.glob(TENSOR_FILES))
    with ThreadPoolExecutor() as pool:  # hashlib lets other threads run
        return dict(zip([path.name for path in files], pool.map(file_digest, files), strict=True))


def begin(folder: Path, settings: Mapping[str, Any], chosen: Mapping[str, Any]) -> None:
    """Record what a training begins with: `settings` by dotted name, and `chosen`, what it determined by itself.

    The states of another training in this folder are removed.
    """
    clear(folder)
    write_json(folder / RESUME_FOLDER / BEGINNING_FILE, {"settings": settings, "chosen": chosen})


def read_beginning(folder: Path, settings: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return what the unfinished training in `folder` determined when it began; None if there is none.

    Raises:
        ConfigError: it began with other settings, and has states or checkpoints; each difference is named.
        StoreError: its record is damaged.
    """
    place = folder / RESUME_FOLDER / BEGINNING_FILE
    if not place.is_file():
        return None
    try:
        beginning: Mapping[str, Any] = json.loads(place.read_text(encoding="utf-8"))
    except ValueError as error:
        raise StoreError(
            f"{place} is damaged ({error}), so the settings of the training there are not known. Name another "
            "folder, or remove this one to start from the beginning."
        ) from error
    own = json.loads(json.dumps(settings))  # tuples become lists, as in the file
    theirs = beginning["settings"]
    differing = [
        f"{name}: {theirs.get(name, 'absent')!r} there, {own.get(name, 'absent')!r} here"
        for name in sorted(theirs.keys() | own.keys())
        if theirs.get(name) != own.get(name)
    ]
    if not differing:
        chosen: Mapping[str, Any] = beginning["chosen"]
        return chosen
    if not _states(folder) and not any(folder.glob("step_*")) and not (folder / "best").exists():
        return None
    raise ConfigError(
        f"{folder} holds an unfinished training with other settings:\n  "
        + "\n  ".join(differing)
        + "\nIt can only be resumed as it began: repeat that command, or name another folder for this one."
    )


def rewind(folder: Path) -> ResumePoint | None:
    """Prepare a training folder for its next attempt, and return where it resumes; None: from the beginning.

    Lines of `metrics.jsonl` that are newer than the state are removed, because those steps will be repeated. Must be
    called before anything reads the metrics of the next attempt.
    """
    if not (folder / RESUME_FOLDER).is_dir():
        return None  # no training was begun here, so its files are not ours
    point = find_resume_point(folder)
    metrics = folder / METRICS_FILE
    if metrics.is_file():
        kept = metrics.read_bytes().splitlines(keepends=True)[: point.record["num_rows"] if point else 0]
        with atomic_file(metrics) as temporary:
            temporary.write_bytes(b"".join(kept))
    return point


def clear(folder: Path) -> None:
    """Remove the states of a training that has ended."""
    shutil.rmtree(folder / RESUME_FOLDER, ignore_errors=True)


def _states(folder: Path) -> list[Path]:
    """Newest first."""
    found = [path for path in (folder / RESUME_FOLDER).glob("step_*") if path.name[5:].isdigit()]
    return sorted(found, key=lambda path: int(path.name[5:]), reverse=True)


def _read(place: Path) -> tuple[dict[str, Any] | None, str]:
    try:
        record = json.loads((place / RECORD_FILE).read_text(encoding="utf-8"))
        found = tensor_digests(place)
    except (OSError, ValueError) as error:
        return None, f"unreadable ({error})"
    written = record.get("files") if isinstance(record, dict) else None
    if not isinstance(written, dict) or not written:
        return None, f"its {RECORD_FILE} names no files; it is damaged"
    differing = sorted(name for name in written.keys() | found.keys() if written.get(name) != found.get(name))
    if differing:
        return None, f"{differing[0]} has changed since it was written"
    return record, ""
