"""Which checkpoints a training leaves: the best one, the next best, one every so many steps, the last."""

import shutil
from pathlib import Path

from rmcore.config.train import TrainConfig
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.training.checkpoint import copy_checkpoint, save_checkpoint
from rmcore.training.ranks import Ranks
from rmcore.training.selection import Selection


class CheckpointWriter:
    """Writes and removes the checkpoints of one training. Every rank calls it; rank 0 writes."""

    def __init__(
        self, rm: BradleyTerryRM, config: TrainConfig, folder: Path, selection: Selection, ranks: Ranks
    ) -> None:
        self.rm, self.config, self.folder, self.selection, self.ranks = rm, config, folder, selection, ranks
        self._saved = -1  # step whose folder was written last: one evaluation may ask for it twice

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
            if not self._is_periodic(old) and self.ranks.is_main:
                shutil.rmtree(self.step_folder(old), ignore_errors=True)
        return is_best

    def stepped(self, step: int) -> None:
        """Keep what `save_every` asks for."""
        if self._is_periodic(step):
            self.save_step(step)

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

    def _is_periodic(self, step: int) -> bool:
        return self.config.save_every is not None and step % self.config.save_every == 0
