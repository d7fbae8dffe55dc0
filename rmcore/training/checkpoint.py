"""Checkpoints of a training: plain Hugging Face folders that appear whole or not at all, and which of them it leaves:
the best one, the next best, one every so many steps, the last.
"""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from rmcore.config.train import TrainConfig
from rmcore.core.errors import StoreError
from rmcore.core.files import atomic_folder, link_tree, remove_abandoned
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.training.ranks import ALONE, Ranks
from rmcore.training.record import Selection
from rmcore.training.resume import CHECKPOINTS, ResumePoint
from rmcore.training.sharding import whole_state_dict


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
