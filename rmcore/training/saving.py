"""Files of a training: checkpoints (the best one, the next best, one every so many steps, the last), and states to
resume from.

A checkpoint is a plain Hugging Face folder that appears whole or not at all. Of a state one process copies the tensors
and continues with the next step, while a thread writes the copy, digests and syncs it; several processes write
together, between two steps.
"""

import re
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self

import psutil
import torch
from safetensors import SafetensorError
from torch import Tensor

from rmcore.config.train import TrainConfig
from rmcore.core.errors import ConfigError, StoreError
from rmcore.core.files import atomic_folder, link_tree, remove_abandoned
from rmcore.models.device import free_bytes
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.training import resume
from rmcore.training.profiling import peak_memory_bytes
from rmcore.training.ranks import ALONE, Ranks
from rmcore.training.record import Selection
from rmcore.training.resume import CHECKPOINTS, ResumePoint, tensor_digests
from rmcore.training.sharding import whole_state_dict
from rmcore.training.state import write_alone, write_together

COSTS = 50
"""Least time between two states, in times for which the steps waited for the last one: 2 % of the training at most."""
COPY_SHARE = 0.5
"""Share of the free memory that copies may take; the rest is for the cache of what is written, and for all others."""
NAME = "rm-opt-training-"
"""Beginning of the name of an abstract socket (unix(7)), which each training has that copies its states: others see it
in /proc, and the kernel removes it with the process, however that ends. Each copy takes at most an equal part of
`COPY_SHARE`: trainings that begin together count the same memory as free."""
CPU = torch.device("cpu")


def save_checkpoint(rm: BradleyTerryRM, folder: Path, ranks: Ranks = ALONE) -> None:
    """Write `rm` to `folder` atomically, as one plain model; on several ranks every one must call this.

    Raises:
        StoreError: the disk is full. What was there before is untouched.
    """
    state = whole_state_dict(rm.model, keep=ranks.is_main) if ranks.world > 1 else None
    if ranks.is_main:
        _publish(folder, lambda temporary: rm.save(temporary, state=state))
    ranks.wait()


def copy_checkpoint(source: Path, folder: Path) -> None:
    """Make `folder` the same checkpoint as `source`, atomically, and by hard links where the disk has them."""
    _publish(folder, lambda place: link_tree(source, place))


def repair_interrupted(folder: Path) -> None:
    """Put right what a kill between two renames left: a checkpoint set aside for a newer one that never came."""
    for retired in filter(_is_ours, folder.glob(".*.old")):
        place = folder / retired.name[1 : -len(".old")]
        if place.exists():
            shutil.rmtree(retired)
        else:
            retired.rename(place)
    remove_abandoned(folder, lambda name: re.fullmatch(r"best|step_\d+", name) is not None)


def _is_ours(path: Path) -> bool:
    return re.fullmatch(r"\.(best|step_\d+)\.old", path.name) is not None and path.is_dir()


def _publish(folder: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a folder that takes the name, and the place of an older one, once it is whole."""
    with atomic_folder(folder, replace=True) as temporary:
        try:
            write(temporary)
        except (SafetensorError, StoreError) as error:
            raise StoreError(
                f"the checkpoint {folder} could not be written ({error}), most often because the disk is full; the one "
                "before it is untouched. Free space and run again."
            ) from error


class CheckpointWriter:
    """Writes and removes the checkpoints of one training. Every rank calls it; rank 0 writes."""

    def __init__(
        self, rm: BradleyTerryRM, config: TrainConfig, folder: Path, selection: Selection, ranks: Ranks
    ) -> None:
        self.rm, self.config, self.folder, self.selection, self.ranks = rm, config, folder, selection, ranks
        self._saved = -1  # step whose folder was written last: one evaluation may ask for it twice

    def chosen(self) -> list[Path]:
        """List the checkpoints that the selection speaks of and that are there: a kept one may be deleted by hand."""
        if self.selection.best is None:
            return []
        steps = [step for _, step in self.selection.kept] if self.config.keep_top_k > 1 else []
        return [place for place in (self.folder / "best", *map(self.step_folder, steps)) if place.is_dir()]

    def go_back(self, point: ResumePoint | None) -> None:
        """Put those of a state back, and remove what is later: steps that were lost, and will be done again.

        Rank 0 alone calls this. `best` of a lost step stays where there was none before; the next one takes its place.

        Args:
            point: the state; None: the training starts from the beginning.
        """
        for place in self.folder.glob("step_*"):
            if place.name[5:].isdigit() and int(place.name[5:]) > (point.step if point else 0):
                shutil.rmtree(place)
        if point is not None:
            for held in (point.state / CHECKPOINTS).glob("*"):
                copy_checkpoint(held, self.folder / held.name)

    def step_folder(self, step: int) -> Path:
        """Place of the checkpoint of a step."""
        return self.folder / f"step_{step}"

    def evaluated(self, step: int, value: float) -> bool:
        """Note the value of an evaluation, keep and drop checkpoints by it; True if it is the best so far."""
        kept, dropped = self.selection.note(value, step)
        is_best = kept and self.selection.kept[0][1] == step
        if kept and self.config.keep_top_k > 1:
            self.save_step(step)
        if is_best:
            self._save_best(step)
        for old in dropped:
            if not self.is_periodic(old) and self.ranks.is_main:
                shutil.rmtree(self.step_folder(old), ignore_errors=True)
        return is_best

    def finished(self, step: int) -> None:
        """Keep the last step; where nothing was ever evaluated, it is the best one too."""
        self.save_step(step)
        if self.selection.best is None:
            self._save_best(step)

    def save_step(self, step: int) -> None:
        """Write the checkpoint of the present weights, those of `step`, unless it is there."""
        if self._saved != step:
            save_checkpoint(self.rm, self.step_folder(step), self.ranks)
            self._saved = step

    def _save_best(self, step: int) -> None:
        best = self.folder / "best"
        if self._saved != step:
            save_checkpoint(self.rm, best, self.ranks)
        elif self.ranks.is_main:
            copy_checkpoint(self.step_folder(step), best)

    def is_periodic(self, step: int) -> bool:
        """Return whether `save_every` keeps the checkpoint of this step."""
        return self.config.save_every is not None and step % self.config.save_every == 0


def trainings_here() -> int:
    """Count the trainings that copy their states and share this process's network namespace, at least this one.

    Those in other containers are not seen, nor any outside Linux: give each container a limit of memory of its own.
    """
    try:
        lines = Path("/proc/net/unix").read_text(errors="replace").splitlines()
    except OSError:  # not Linux
        return 1
    return max(1, sum(line.rpartition(" ")[2].startswith(f"@{NAME}") for line in lines))


def require_shared(folder: Path, ranks: Ranks) -> None:
    """Make the folder of a training, and refuse one that not all of its processes see: each writes its part of a state.

    Raises:
        ConfigError: on all of them, if it is on a disk of the first one's host.
    """
    if ranks.is_main:
        folder.mkdir(parents=True, exist_ok=True)
    if ranks.world == 1:
        return
    name = ranks.gather(f".seen-{secrets.token_hex(8)}")[0]  # a new one: a network's disk remembers what was not there
    if ranks.is_main:
        (folder / name).touch()
    ranks.wait()
    blind = [rank for rank, sees in enumerate(ranks.gather((folder / name).exists())) if not sees]
    if ranks.is_main:
        (folder / name).unlink()
    if blind:
        raise ConfigError(
            f"of the {ranks.world} processes of this training {len(blind)} (first RANK={blind[0]}) do not see {folder} "
            "as the first one does, and each writes its part of a resumable state there: name an output folder on a "
            "disk that all hosts share."
        )


class StateSaver:
    """Saves the states of one training; to be entered, and left when no further step follows.

    While a state is being written none is due: the next one is saved after the first step that ends later.

    Args:
        folder: the training's.
        every_seconds: least time between two states.
        ranks: the processes that train together; all of them save.
    """

    def __init__(self, folder: Path, every_seconds: float, ranks: Ranks) -> None:
        self.folder, self.every_seconds, self.ranks = folder, every_seconds, ranks
        self._due = time.monotonic() + every_seconds
        self._thread = ThreadPoolExecutor(1, "state")
        self._writing: Future[None] | None = None
        self._name: socket.socket | None = None
        self._copy: dict[str, Tensor] = {}  # kept from state to state: fresh memory costs more than the copying
        self._is_left = self._has_told = self._is_rarer = False

    def __enter__(self) -> Self:
        if self.ranks.world == 1 and sys.platform == "linux":  # of several processes none copies
            with suppress(OSError):  # where a sandbox allows no such socket, others do not count this training
                self._name = socket.socket(socket.AF_UNIX)
                self._name.bind(f"\0{NAME}{secrets.token_hex(8)}")
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait for the state that is being written; one that a second Ctrl-C leaves behind ends with its next file."""
        if self._name is not None:
            self._name.close()
        self._is_left = kind is not None and issubclass(kind, KeyboardInterrupt)
        self._thread.shutdown(wait=False)
        try:
            if not self._is_left:
                self.wait()
        except StoreError as error:  # no step follows that would need it, and no other error is to be hidden by it
            print(f"warning: {error}", file=sys.stderr)

    def is_due(self) -> bool:
        """Whether a state is to be saved after this step.

        Raises:
            StoreError: the one before it could not be written.
        """
        if self._writing is not None and self._writing.done():
            self.wait()
        return self._writing is None and time.monotonic() >= self._due

    def wait(self) -> None:
        """Wait until no state is being written.

        Raises:
            StoreError: it could not be written. Earlier states are untouched.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        record: Mapping[str, Any],
        checkpoints: Sequence[Path],
        *,
        last: bool,
    ) -> None:
        """Save the state of `step`; every rank calls it. What is given may change as soon as it returns.

        Args:
            step: number of optimizer steps done.
            tensors: see `rmcore.training.state.collect_state`.
            record: the numbers.
            checkpoints: folders that the record names.
            last: whether to return when the state is on disk, as no further step follows.

        Raises:
            StoreError: this state, or the one before it, could not be written; of the last one only this. Earlier
                states are untouched.
        """
        is_copied = not last and self.ranks.world == 1 and self._has_room(tensors)
        started = time.monotonic()  # room is made once, which says nothing of the next state
        try:
            self.wait()
        except StoreError as error:
            if not last:
                raise
            print(f"warning: {error}", file=sys.stderr)
        if self.ranks.world > 1 and not self.ranks.is_main:
            self._write_part(tensors, None)
        else:
            copy = self._copied(tensors) if is_copied else None
            with ExitStack() as stack:
                place, digests = stack.enter_context(resume.new_state(self.folder, step, record, checkpoints))
                if self.ranks.world > 1:
                    self._write_part(tensors, place)
                    digests.update(tensor_digests(place))
                elif copy is None:
                    digests.update(write_alone(tensors, place))
                else:
                    self._writing = self._thread.submit(self._write, copy, place, digests, stack.pop_all())
        self.ranks.wait()
        now = time.monotonic()
        pause = COSTS * (now - started)
        if pause > self.every_seconds > 0 and self.ranks.is_main and not last and not self._is_rarer:
            self._is_rarer = True
            print(
                f"note: resumable states are saved every {pause / 60:.0f} min in place of {self.every_seconds / 60:g}: "
                f"steps waited {now - started:.1f} s for the last one.",
                file=sys.stderr,
            )
        self._due = now + max(self.every_seconds, pause)

    def _write_part(self, tensors: Mapping[str, Tensor], place: Path | None) -> None:
        """Write this rank's part into `place`, which the first one alone knows."""
        told = self.ranks.gather(None if place is None else place.relative_to(self.folder))[0]
        write_together(tensors, self.folder / told, self.ranks)

    def _write(self, tensors: Mapping[str, Tensor], place: Path, digests: dict[str, str], state: ExitStack) -> None:
        with state:
            for name, digest in write_alone(tensors, place):
                digests[name] = digest
                if self._is_left:
                    raise StoreError("the training was ended before its state was written.")

    def _has_room(self, tensors: Mapping[str, Tensor]) -> bool:
        """Make room for a copy in host memory, pinned for tensors on a GPU; False where there is none for it."""
        needed = sum(map(_host_bytes, tensors.values()))
        if not self._copy:
            regrown = peak_memory_bytes(CPU) - psutil.Process().memory_info().rss  # what a step takes, and gives back
            if needed > COPY_SHARE / trainings_here() * (free_bytes(CPU) - max(0, regrown)):
                return self._no_room(needed)
        try:
            for name, tensor in tensors.items():
                room = self._copy.get(name)
                if room is None or room.shape != tensor.shape:
                    self._copy[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        except RuntimeError as error:  # of torch, where memory cannot be pinned
            if resume.is_of_a_worker(error):
                raise
            self._copy = {}
            return self._no_room(needed)
        return True

    def _no_room(self, needed: int) -> bool:
        if not self._has_told:
            print(
                f"note: steps wait while a resumable state is written: free memory has no room for a copy of "
                f"it ({needed / 2**30:.1f} GiB).",
                file=sys.stderr,
            )
        self._has_told = True
        return False

    def _copied(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        for name, tensor in tensors.items():
            self._copy[name].copy_(tensor, non_blocking=True)
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return {name: self._copy[name] for name in tensors}


def _host_bytes(tensor: Tensor) -> int:
    """Host memory of a copy: torch rounds each pinned block up to a power of two (CachingHostAllocator)."""
    return 1 << (tensor.nbytes - 1).bit_length() if tensor.is_cuda and tensor.nbytes else tensor.nbytes
