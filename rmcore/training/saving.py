"""Files of a training: checkpoints (the best one, the next best, one every so many steps, the last), and states to
resume from.

A checkpoint is a plain Hugging Face folder that appears whole or not at all. States are written between two steps, by
several processes together.
"""

import re
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from rmcore.config.train import TrainConfig
from rmcore.core.errors import ConfigError, StoreError
from rmcore.core.files import atomic_folder, link_tree, remove_abandoned
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.training import resume
from rmcore.training.ranks import ALONE, Ranks
from rmcore.training.record import Selection
from rmcore.training.resume import CHECKPOINTS, ResumePoint
from rmcore.training.sharding import whole_state_dict
from rmcore.training.state import write_alone, write_together

COSTS = 50
"""Least time between two states, in times that the last one took: 2 % of the training at most."""


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
    """Saves the states of one training.

    Args:
        folder: the training's.
        every_seconds: least time between two states.
        ranks: the processes that train together; all of them save.
    """

    def __init__(self, folder: Path, every_seconds: float, ranks: Ranks) -> None:
        self.folder, self.every_seconds, self.ranks = folder, every_seconds, ranks
        self._due = time.monotonic() + every_seconds
        self._is_rarer = False

    def is_due(self) -> bool:
        """Whether a state is to be saved after this step."""
        return time.monotonic() >= self._due

    def save(
        self, step: int, tensors: Mapping[str, Tensor], record: Mapping[str, Any], checkpoints: Sequence[Path]
    ) -> None:
        """Save the state of `step`, and return when it is on disk; every rank calls it.

        Args:
            step: number of optimizer steps done.
            tensors: see `rmcore.training.state.collect_state`.
            record: the numbers.
            checkpoints: folders that the record names.

        Raises:
            StoreError: it could not be written. Earlier states are untouched.
        """
        started = time.monotonic()
        if self.ranks.is_main:
            with resume.new_state(self.folder, step, record, checkpoints) as place:
                self._write(tensors, place)
        else:
            self._write(tensors, None)
        self.ranks.wait()
        now = time.monotonic()
        pause = COSTS * (now - started)
        if pause > self.every_seconds > 0 and self.ranks.is_main and not self._is_rarer:
            self._is_rarer = True
            print(
                f"note: resumable states are saved every {pause / 60:.0f} min in place of {self.every_seconds / 60:g}: "
                f"the last one took {now - started:.1f} s.",
                file=sys.stderr,
            )
        self._due = now + max(self.every_seconds, pause)

    def _write(self, tensors: Mapping[str, Tensor], place: Path | None) -> None:
        """Write the tensors into `place`, which the first rank alone knows."""
        if self.ranks.world == 1 and place is not None:
            write_alone(tensors, place)
            return
        told = self.ranks.gather(None if place is None else place.relative_to(self.folder))[0]
        write_together(tensors, self.folder / told, self.ranks)
