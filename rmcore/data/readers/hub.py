"""Data sets of the `datasets` library: a folder written by `save_to_disk`, or a name on the Hugging Face hub.

A folder of files that are named as those on the hub are (`data/train-00000-of-00002.parquet`) is read like one file.

`datasets` takes seconds to import and its own patience with an absent network is 20 s and more, so it is imported only
here and only when needed, and the hub is asked once, with a time-out, before `datasets` is. It runs no code shipped
with a data set (its versions from 4.0 on cannot) and both forms are read as Arrow, batch by batch.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rmcore.core.errors import DataError
from rmcore.data.readers.files import BATCH_ROWS, is_file_name, read_file
from rmcore.data.readers.records import RawRecord, arrow_records

if TYPE_CHECKING:
    from datasets import Dataset

HUB_TIMEOUT_SECONDS = 10.0
"""How long the hub may take to answer: huggingface_hub's own default for one request."""
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})(?:-[0-9a-f]+)?\.")
_SHOWN_FILES = 5
_LOCAL_FORMS = (
    "a .parquet, .json, .jsonl, .csv or .tsv file (.gz too but for Parquet), a folder of files "
    "named as the hub names them, or a folder written by datasets' save_to_disk"
)


def read_folder(folder: Path, split: str) -> Iterator[RawRecord]:
    """The rows of a `save_to_disk` folder; of a DatasetDict, or of files that are named so, the rows of `split`.

    Raises:
        DataError: it is no such folder, is damaged, or has no such split.
    """
    if not any((folder / name).is_file() for name in ("state.json", "dataset_dict.json")):
        last = 0
        for file in _split_files(folder, split):
            first = last
            for record in read_file(file):
                last = first + record.row
                yield replace(record, row=last)
        return
    import datasets
    import pyarrow as pa
    from datasets.exceptions import DatasetsError

    try:
        loaded = datasets.load_from_disk(str(folder))
        yield from _rows(_choose_split(loaded, folder, split))
    except (OSError, KeyError, TypeError, ValueError, pa.ArrowException, DatasetsError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"{folder} cannot be read as a datasets folder ({error}): files of it are missing or damaged. "
            "Write it again with save_to_disk."
        ) from error


def _split_files(folder: Path, split: str) -> list[Path]:
    """The files of a split, in order: `SPLIT.jsonl`, `SPLIT-00000-of-00002.parquet`, or `SPLIT/0000.parquet`.

    Raises:
        DataError: there is none, one is missing, or they are of two data sets.
    """
    within = (folder, folder / "data", folder / split, folder / "data" / split)
    visible = [
        file for inner in within for file in sorted(inner.glob("[!.]*")) if is_file_name(file.name) and file.is_file()
    ]
    shards: dict[tuple[Path, int | None], dict[int, Path]] = {}  # (where, how many files) -> number -> file
    for file in visible:
        stem, shard = file.name.split(".")[0], _SHARD.match(file.name)
        if shard and shard[1] == split:
            shards.setdefault((file.parent, int(shard[3])), {})[int(shard[2])] = file
        elif stem == split:
            shards[file, 1] = {0: file}
        elif file.parent.name == split and stem.isdecimal():
            shards.setdefault((file.parent, None), {})[int(stem)] = file
    if not shards:
        there = ", ".join(str(file.relative_to(folder)) for file in visible[:_SHOWN_FILES]) or "none that can be read"
        raise DataError(
            f"{folder} is no folder of datasets' save_to_disk, and no file in it is named as the split {split!r} is on "
            f"the hub ({split}.jsonl, {split}-00000-of-00002.parquet). Its files are {there}. Name one of them or the "
            "split, or rename them."
        )
    if len(shards) > 1:
        places = " and ".join(str(where.relative_to(folder)) for where, _ in list(shards)[:2])
        raise DataError(f"{folder} has the split {split!r} in {places}: which one is meant is unknown. Name one.")
    [((_, total), files)] = shards.items()
    missing = [number for number in range(max(files) + 1 if total is None else total) if number not in files]
    if missing:
        raise DataError(
            f"{folder} lacks file {missing[0]} of the split {split!r} (they are numbered from 0), so rows are missing. "
            "Download it again."
        )
    return [files[number] for number in sorted(files)]


def read_hub(name: str, split: str) -> Iterator[RawRecord]:
    """The rows of `split` of a hub data set, at the revision that `hub_revision` gives.

    Raises:
        DataError: the hub does not answer or does not have it, or it cannot be read as a table.
    """
    revision = hub_revision(name)
    import datasets
    import pyarrow as pa
    from datasets.exceptions import DatasetsError
    from huggingface_hub.errors import HTTPError

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        yield from _rows(datasets.load_dataset(name, split=split, revision=revision))
    except (OSError, ValueError, RuntimeError, HTTPError, pa.ArrowException, DatasetsError) as error:
        raise DataError(
            f"the data set {name!r}, split {split!r}, of the hub cannot be loaded ({error}). "
            f"Choose another split, or download the data and name it as {_LOCAL_FORMS}."
        ) from error


def hub_revision(name: str) -> str:
    """The commit that the hub now has for `name`; without a network, the one that is in the local cache.

    Raises:
        DataError: neither is to be had.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, HFValidationError, HTTPError, RepositoryNotFoundError

    try:
        revision = HfApi().dataset_info(name, timeout=HUB_TIMEOUT_SECONDS).sha
    except (RepositoryNotFoundError, GatedRepoError, HFValidationError) as error:
        raise DataError(
            f"{name!r} is neither a file or folder here nor a data set that the Hugging Face hub shows you "
            f"({_first_line(error)}). Check the name, log in with `hf auth login` if it is private or gated, "
            f"or name local data: {_LOCAL_FORMS}."
        ) from error
    except (HTTPError, OSError) as error:
        cached = _cached_revision(name)
        if cached is not None:
            return cached
        raise DataError(
            f"{name!r} is no file or folder here, and the Hugging Face hub, where it may be, does not answer "
            f"({_first_line(error)}). Check the network, or name local data: {_LOCAL_FORMS}."
        ) from error
    if revision is None:
        raise DataError(f"the hub names no commit for {name!r}: its content cannot be pinned. Download it as a file.")
    return revision


def _cached_revision(name: str) -> str | None:
    """The commit fetched last, which is also the one that `datasets` falls back to."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return None
    cached = [each for each in repositories if each.repo_type == "dataset" and each.repo_id == name]
    revisions = [revision for repository in cached for revision in repository.revisions]
    return max(revisions, key=lambda revision: revision.last_modified).commit_hash if revisions else None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _choose_split(loaded: Any, folder: Path, split: str) -> "Dataset":
    if not isinstance(loaded, dict):
        if split != "train":  # it would be the same rows again
            raise DataError(
                f"{folder} holds one data set without splits, so there is no {split!r}: leave the split out."
            )
        return loaded
    if split not in loaded:
        raise DataError(f"{folder} has no split {split!r}, its splits are {', '.join(loaded)}: name one of them.")
    return loaded[split]


def _rows(dataset: "Dataset") -> Iterator[RawRecord]:
    row = 1
    for batch in dataset.with_format("arrow").iter(batch_size=BATCH_ROWS):
        yield from arrow_records(batch, row)
        row += batch.num_rows
