"""A resumable state on every host: the first one has the training's folder, the others need no access to it.

The state lies where the first process wrote it, and each process reads it while it resumes. On a host that does not see
that file the first of its processes gets a copy through the process group, which all processes there read and which is
gone when the training continues. Sent is the file and not tensor by tensor, so that a host holds it once, on disk, and
not once a process, in memory.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rmcore.core.errors import StoreError
from rmcore.core.files import file_digest
from rmcore.training.ranks import Ranks
from rmcore.training.resume import RESUME_FOLDER, STATE_FILE, ResumePoint

COPY_FOLDER = ".state-of-the-first-host"
CHUNK_BYTES = 64 * 2**20
"""Sent at once: large enough that the network is busy, small beside what training takes."""


@contextmanager
def state_on_this_host(point: ResumePoint, folder: Path, ranks: Ranks) -> Iterator[Path]:
    """Give the state file of `point`, on this host, inside the block. Every rank calls it with its own `folder`.

    Raises:
        StoreError: on every rank: a copy did not arrive as it was sent, or could not be written.
    """
    if ranks.world == 1:
        yield point.state
        return
    own = point.state if ranks.is_main else folder / RESUME_FOLDER / point.state.parent.name / STATE_FILE
    leader = ranks.rank - int(os.environ.get("LOCAL_RANK", "0"))  # torchrun numbers the processes host by host
    is_without = ranks.rank == leader and not ranks.is_main and not _is_whole(own, point)
    receivers = [rank for rank, is_one in enumerate(ranks.gather(is_without)) if is_one]
    copy = folder / COPY_FOLDER
    if ranks.rank in receivers:
        shutil.rmtree(copy, ignore_errors=True)  # of an attempt that was killed
    try:
        if receivers:
            problem = _send(point, copy / STATE_FILE, receivers, ranks)
            told = [problem for problem in ranks.gather(problem) if problem]
            if told:
                raise StoreError(
                    f"the state to resume from did not reach every host: {told[0]}. Run the same command again."
                )
        yield copy / STATE_FILE if leader in receivers else own
        ranks.wait()  # until everybody has read it
    finally:
        if ranks.rank in receivers:
            shutil.rmtree(copy, ignore_errors=True)


def _is_whole(path: Path, point: ResumePoint) -> bool:
    try:
        return file_digest(path) == point.record["sha256"]
    except OSError:  # it is not there, or cannot be read
        return False


def _send(point: ResumePoint, copy: Path, receivers: list[int], ranks: Ranks) -> str:
    """Copy the file of the first rank to `copy` on the ranks that receive it; what went wrong here, if anything did."""
    group = dist.new_group([0, *receivers], backend="gloo")
    if ranks.rank not in (0, *receivers):
        return ""
    size = torch.tensor(point.state.stat().st_size if ranks.is_main else 0)
    dist.broadcast(size, src=0, group=group)
    problem = ""
    for start in range(0, int(size), CHUNK_BYTES):  # all of them, whatever becomes of one: the others wait for each
        length = min(CHUNK_BYTES, int(size) - start)
        chunk = _chunk(point.state, start, length) if ranks.is_main else torch.empty(length, dtype=torch.uint8)
        dist.broadcast(chunk, src=0, group=group)
        if not ranks.is_main and not problem:
            problem = _append(copy, chunk)
    if not ranks.is_main and not problem and not _is_whole(copy, point):
        problem = "it arrived damaged"
    dist.destroy_process_group(group)
    return problem


def _chunk(path: Path, start: int, length: int) -> Tensor:
    """(length,) uint8 of the file; a shorter file is filled up, and found damaged at the other end."""
    with path.open("rb") as stream:
        stream.seek(start)
        content = stream.read(length).ljust(length, b"\0")
    return torch.from_numpy(np.frombuffer(content, dtype=np.uint8).copy())


def _append(path: Path, chunk: Tensor) -> str:
    """Append a chunk to a file, which is made if it is not there; why that failed, if it did."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as stream:
            stream.write(chunk.numpy().data)
    except OSError as error:
        return str(error)
    return ""
