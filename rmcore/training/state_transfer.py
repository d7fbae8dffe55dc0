"""A resumable state on every host: the first one has the training's folder, the others need no access to it.

The state is stored where the first process wrote it, whole. A process that does not see that folder writes its part
next to its own place for a moment and sends the files there. While a training resumes, each process reads what it
needs; on a host that does not see the folder the first of its processes gets a copy, which all processes there read and
which is gone when the training continues. Sent are files and not tensors, chunk by chunk, so that a host holds them on
disk and not in memory.
"""

import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rmcore.core.errors import StoreError
from rmcore.core.files import file_digest
from rmcore.training.ranks import LONGEST_WAIT, Ranks
from rmcore.training.resume import RESUME_FOLDER, ResumePoint, tensor_digests
from rmcore.training.state import write_together

COPY_FOLDER, PART_FOLDER = ".state-of-the-first-host", ".part-of-a-state"
CHUNK_BYTES = 64 * 2**20
"""Sent at once: large enough that the network is busy, small compared with what training takes."""


def write_parts(tensors: Mapping[str, Tensor], folder: Path, place: Path | None, ranks: Ranks) -> dict[str, str]:
    """Write a state of several ranks, each its part; every rank calls it. The sha256 of each file by name, of all.

    Args:
        tensors: see `rmcore.training.state.collect_state`.
        folder: the training's, as this rank knows it.
        place: where all parts are to lie, a folder below it; on the first rank alone.
        ranks: the processes that train together.

    Raises:
        StoreError: on every rank: a part could not be written, or did not arrive as it was sent.
    """
    mark = None
    if place is not None:
        mark = place / f".{secrets.token_hex(8)}"
        mark.touch()
    told = ranks.gather(None if mark is None else mark.relative_to(folder))[0]
    is_seen = (folder / told).exists()
    senders = [rank for rank, is_there in enumerate(ranks.gather(is_seen)) if not is_there]
    if mark is not None:
        mark.unlink()
    together = (folder / told).parent
    part = (together if is_seen else folder) / f"{PART_FOLDER}-{ranks.rank}"
    shutil.rmtree(part, ignore_errors=True)  # of an attempt that was killed
    try:
        part.mkdir(parents=True, mode=0o700)
        write_together(tensors, part, ranks)
        by_rank = ranks.gather(_finished(part, together if is_seen else None))
        problems = [problem for _, problem in by_rank]
        for rank in senders:
            source_or_target = part if ranks.rank == rank else together
            problems += ranks.gather(_send(source_or_target, by_rank[rank][0], rank, [0], ranks))
        if any(problems):
            raise StoreError(
                f"a part of the state did not reach the first host: {next(filter(None, problems))}. The states before "
                "it are untouched; run the same command again."
            )
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return {name: digest for digests, _ in by_rank for name, digest in digests.items()}


def _finished(part: Path, together: Path | None) -> tuple[dict[str, str], str]:
    """The sha256 of each file of this rank's part, put to the others where there is a place; and what went wrong."""
    try:
        digests = tensor_digests(part)
        if together is not None:
            for name in digests:
                (part / name).rename(together / name)
            part.rmdir()  # now, as the first rank continues with a folder that must not change
    except OSError as error:
        return {}, str(error)
    return digests, ""


@contextmanager
def state_on_this_host(point: ResumePoint, folder: Path, ranks: Ranks) -> Iterator[Path]:
    """Give the folder with the state of `point`, on this host, inside the block. Every rank calls it with its own one.

    Raises:
        StoreError: on every rank: a copy did not arrive as it was sent, or could not be written.
    """
    if ranks.world == 1:
        yield point.state
        return
    own = point.state if ranks.is_main else folder / RESUME_FOLDER / point.state.name
    leader = ranks.rank - int(os.environ.get("LOCAL_RANK", "0"))  # torchrun numbers the processes host by host
    is_without = ranks.rank == leader and not ranks.is_main and not _is_whole(own, point.record["files"])
    receivers = [rank for rank, is_one in enumerate(ranks.gather(is_without)) if is_one]
    copy = folder / COPY_FOLDER
    if ranks.rank in receivers:
        shutil.rmtree(copy, ignore_errors=True)  # of an attempt that was killed
    try:
        if receivers:
            source = point.state if ranks.is_main else copy
            problem = _send(source, point.record["files"], 0, receivers, ranks)
            told = [problem for problem in ranks.gather(problem) if problem]
            if told:
                raise StoreError(
                    f"the state to resume from did not reach every host: {told[0]}. Run the same command again."
                )
        yield copy if leader in receivers else own
        ranks.wait()  # until everybody has read it
    finally:
        if ranks.rank in receivers:
            shutil.rmtree(copy, ignore_errors=True)


def _is_whole(state: Path, digests: Mapping[str, str]) -> bool:
    try:
        return all(file_digest(state / name) == digest for name, digest in digests.items())
    except OSError:  # it is not there, or cannot be read
        return False


def _send(place: Path, digests: Mapping[str, str], sender: int, receivers: list[int], ranks: Ranks) -> str:
    """Copy files from `place` on one rank to `place` on those that receive them; what went wrong here, if anything."""
    group = dist.new_group([sender, *receivers], backend="gloo", timeout=LONGEST_WAIT)
    if ranks.rank not in (sender, *receivers):
        return ""
    is_sender, problem = ranks.rank == sender, ""
    for name in sorted(digests):
        size = torch.tensor((place / name).stat().st_size if is_sender else 0)
        dist.broadcast(size, src=sender, group=group)
        for start in range(0, int(size), CHUNK_BYTES):  # all of them, whatever becomes of one: the others wait for each
            length = min(CHUNK_BYTES, int(size) - start)
            chunk = _chunk(place / name, start, length) if is_sender else torch.empty(length, dtype=torch.uint8)
            dist.broadcast(chunk, src=sender, group=group)
            if not is_sender and not problem:
                problem = _append(place / name, chunk)
    if not is_sender and not problem and not _is_whole(place, digests):
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
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with path.open("ab") as stream:
            stream.write(chunk.numpy().data)
        path.chmod(0o600)
    except OSError as error:
        return str(error)
    return ""
