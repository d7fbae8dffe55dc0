"""Many files at once, read on a Ray cluster: `ray:` before a folder, a pattern or an object store's address.

    ray:/shared/pairs/*.jsonl.gz      files that every machine of the cluster sees under that name
    ray:s3://bucket/pairs/*.parquet   objects; gs:// and az:// alike, with the cloud's own variables on all machines

Ray Data has each file opened, unpacked and parsed by some machine, with the readers of `rmcore.data.readers.files`. The
rows arrive here in order, so that what is read is what the files, one after the other by name, would give.
"""

import hashlib
import importlib
import logging
import pickle
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path
from typing import Any

from rmcore.core.errors import ConfigError, DataError, RmcoreError, ServiceError
from rmcore.core.files import known_digests
from rmcore.core.object_store import ObjectStore
from rmcore.core.ray_cluster import RayCluster
from rmcore.data.readers.files import BATCH_ROWS, file_kind, is_file_name, read_file
from rmcore.data.readers.records import RawRecord

SCHEME = "ray:"
_PATTERN = "*?["


def read_cluster(source: str) -> Iterator[RawRecord]:
    """The rows of all files of a source, by name; `row` counts through all of them.

    Raises:
        DataError: no file is there, or one cannot be read.
        ConfigError: Ray is not installed, the cluster has no login, or no core of it is free.
        ServiceError: no cluster answers.
        StoreError: the object store refuses.
    """
    (address, _), names = _place(source), list(_files(source))
    with ExitStack() as stack:
        ray = _connected(stack, source)
        logging.getLogger("ray.data").setLevel(logging.ERROR)  # it tells of its plans on a user's terminal
        context = ray.data.DataContext.get_current()
        context.execution_options.preserve_order = True
        context.enable_progress_bars = False
        files = ray.data.from_items([{"name": name} for name in names], override_num_blocks=len(names))
        parsed = files.map_batches(_parsed, batch_size=1, batch_format="numpy", fn_kwargs={"address": address})
        row = last = 0
        try:
            for batch in parsed.iter_rows():
                read = pickle.loads(batch["records"])  # noqa: S301 - Ray itself hands over what its processes pickle
                if isinstance(read, RmcoreError):
                    raise read
                first, records = read
                if first:
                    row = last
                for record in records:
                    last = row + record.row
                    yield replace(record, row=last)
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None)
            raise ServiceError(
                f"the Ray cluster failed while it read {source} ({repr(cause) if cause else _first_line(error)}): a "
                "process of it was lost, often for lack of memory, has another version of rm-optimizer, or may not "
                "read the files. See to that, and run the same command again, with smaller files if it fails again."
            ) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def cluster_digest(source: str) -> str:
    """Digest of the content of files here; of objects, of their sizes, times and tags.

    Raises:
        DataError, StoreError: as `read_cluster`.
    """
    folder = Path(_place(source)[0]).expanduser()
    versions = _files(source)
    here = [name for name, version in versions.items() if version is None]
    versions |= zip(here, known_digests(folder / name for name in here), strict=True)
    lines = "".join(f"{version} {name}\n" for name, version in versions.items())
    return hashlib.sha256(lines.encode("utf-8", "surrogateescape")).hexdigest()


def _connected(stack: ExitStack, source: str) -> Any:
    """Ray, connected to its cluster; one that this process uses already is used for this, too."""
    known = sys.modules.get("ray")
    if known is not None and known.is_initialized():
        ray: Any = known
    else:
        ray = stack.enter_context(RayCluster(f"a source {source}")).ray
    if ray.available_resources().get("CPU", 0) < 1:
        raise ConfigError(
            f"{source} is read by the Ray cluster, and no core of it is free, so that it would wait for ever without a "
            "word: leave one, with fewer --actors for example."
        )
    importlib.import_module("ray.data")
    return ray


def _place(source: str) -> tuple[str, str]:
    """Address or folder of the files, and the pattern of their names."""
    path = source.removeprefix(SCHEME)
    head, _, last = path.rpartition("/")
    names_files = is_file_name(last) or any(sign in last for sign in _PATTERN)
    return (head, last) if names_files else (path.rstrip("/"), "*")


def _files(source: str) -> dict[str, str | None]:
    """Names of a source's files, sorted, each with the words that tell an object's version; None for a file.

    They are those of one folder that end like files of data, and fit.

    Raises:
        DataError: there is none, or one is of a kind that is not read.
        StoreError: the object store refuses.
    """
    address, pattern = _place(source)
    versions: dict[str, str | None]
    if "://" in address:
        versions = {name: version for name, version in _objects(address).versions().items() if "/" not in name}
    else:
        versions = {file.name: None for file in Path(address).expanduser().glob("*") if file.is_file()}
    fitting = {
        name: versions[name]
        for name in sorted(versions)
        if is_file_name(name) and (name == pattern or fnmatch(name, pattern))
    }
    if not fitting:
        raise DataError(
            f"{source} names no file that can be read: none of {len(versions)} at {address} fits {pattern}. Check the "
            "path; files are found by their endings, such as .jsonl, .parquet, .csv, those of text also with .gz."
        )
    for name in fitting:
        file_kind(Path(name))
    return fitting


def _objects(address: str) -> ObjectStore:
    return ObjectStore(address, named_by="the source", read_only=True)


def _parsed(batch: Mapping[str, Sequence[str]], address: str) -> Iterator[dict[str, list[bytes]]]:
    """The rows of one file, some hundred at a time; runs in a process of Ray's. An error is handed over as it is."""
    name = str(batch["name"][0])
    first = True
    try:
        with tempfile.TemporaryDirectory() as scratch:
            records = read_file(_here(address, name, Path(scratch)))
            while some := list(islice(records, BATCH_ROWS)):
                yield {"records": [pickle.dumps((first, some))]}
                first = False
    except RmcoreError as error:
        yield {"records": [pickle.dumps(type(error)(str(error)))]}


def _here(address: str, name: str, scratch: Path) -> Path:
    """A file as one of this machine; an object is fetched."""
    if "://" not in address:
        return Path(address).expanduser() / name
    fetched = scratch / Path(name).name
    _objects(address).fetch(name, fetched)
    if not fetched.is_file():
        raise DataError(f"{address}/{name} has gone since it was listed; run the same command again.")
    return fetched
