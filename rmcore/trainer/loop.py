"""The training loop: steps, evaluations, the best checkpoint, when to stop.

The loop knows pairs, a model and a folder. What its numbers are sent to is the tracker's business.
"""

import csv
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch.optim import Optimizer

from rmcore.batching import MicroBatch, micro_batches, pack_pairs, step_order
from rmcore.config import TrainConfig
from rmcore.data.rendering import TokenizedPair
from rmcore.errors import TrainingError
from rmcore.memory import choose_token_budget, peak_memory_bytes
from rmcore.metrics.report_card import batch_metrics
from rmcore.model import BradleyTerryRM
from rmcore.optim import make_optimizer, make_schedule
from rmcore.tracking import Tracker
from rmcore.trainer.checkpoint import save_checkpoint
from rmcore.trainer.step import StepResult, train_step

CSV_COLUMNS = {
    "train_loss": "train/loss",
    "train_acc": "train/pairwise_accuracy",
    "train_margin": "train/mean_margin",
    "eval_loss": "eval/loss",
    "eval_acc": "eval/pairwise_accuracy",
    "eval_margin": "eval/mean_margin",
    "eval_pairs": "eval/num_pairs",
}
DISTRIBUTION_PAIRS = 500
"""Training pairs whose rewards are described where there are no validation pairs."""
HIGHER_IS_BETTER = {"eval/pairwise_accuracy": True, "eval/loss": False, "eval/ece": False}


@dataclass(slots=True)
class TrainResult:
    """How a training ended."""

    num_steps: int
    """Optimizer steps done."""
    planned_steps: int
    stop_reason: str
    best_step: int
    best_metric: str | None
    """None without validation pairs: best is then the last step."""
    best_value: float | None
    num_pairs: int
    """Pairs seen, with repetition over epochs."""
    num_tokens: int
    """Padded tokens computed in training steps."""
    num_real_tokens: int
    token_budget: int
    train_seconds: float
    """Wall seconds in optimizer steps, without evaluations and checkpoints."""
    peak_memory_bytes: int
    """Most memory so far: of the device on a GPU, else of this process."""

    @property
    def pairs_per_second(self) -> float:
        """Training throughput."""
        return self.num_pairs / max(self.train_seconds, 1e-9)

    def to_dict(self) -> dict:
        """A JSON-ready record."""
        return asdict(self) | {"pairs_per_second": self.pairs_per_second}


@dataclass(slots=True)
class _Best:
    """The best evaluation so far and how long ago it was."""

    metric: str
    value: float | None = None
    step: int = 0
    evaluations_since: int = 0

    def improved(self, value: float, step: int) -> bool:
        """Note one evaluation; True if it is the best so far. An undefined value never is."""
        sign = 1 if HIGHER_IS_BETTER[self.metric] else -1
        if math.isfinite(value) and (self.value is None or sign * value > sign * self.value):
            self.value, self.step, self.evaluations_since = value, step, 0
            return True
        self.evaluations_since += 1
        return False


@dataclass(slots=True)
class _Window:
    """Step results since the last logged line, averaged by pairs."""

    results: list[StepResult] = field(default_factory=list)
    seconds: float = 0.0

    def summary(self, lr: float) -> dict[str, float]:
        pairs = sum(result.num_pairs for result in self.results)

        def mean(name: str) -> float:
            return sum(getattr(result, name) * result.num_pairs for result in self.results) / pairs

        return {
            "train/loss": mean("loss"),
            "train/pairwise_accuracy": mean("pairwise_accuracy"),
            "train/mean_margin": mean("mean_margin"),
            "train/grad_norm": mean("grad_norm"),
            "train/lr": lr,
            "train/log10_lr": math.log10(max(lr, 1e-30)),
            "cost/pairs_per_second": pairs / max(self.seconds, 1e-9),
            "cost/padding_share": 1
            - sum(r.num_real_tokens for r in self.results) / sum(r.num_tokens for r in self.results),
        }


def planned_steps(config: TrainConfig, num_pairs: int) -> int:
    """Optimizer steps of a run over `num_pairs` training pairs: `steps`, else `epochs` rounded up to whole steps."""
    if config.steps is not None:
        return config.steps
    per_epoch = math.ceil(num_pairs / config.pairs_per_step)
    return max(1, round(config.epochs * per_epoch))


class Trainer:
    """Trains one reward model into one folder.

    The folder then holds `metrics.csv`, `best/`, `step_<last>/`, and `step_*/` every `save_every` steps. (The tracker
    writes `metrics.jsonl`.)

    Args:
        rm: the model; trained in place.
        config: settings.
        train: P tokenized training pairs.
        validation: held-out pairs for choosing the best step; may be empty, then best = last and nothing stops early.
        folder: where checkpoints go.
        tracker: receives numbers by step.
        seed: data order and dropout.
        progress: called as progress(step, planned_steps, text) after each step.
    """

    def __init__(
        self,
        rm: BradleyTerryRM,
        config: TrainConfig,
        *,
        train: Sequence[TokenizedPair],
        validation: Sequence[TokenizedPair],
        folder: Path,
        tracker: Tracker,
        seed: int,
        progress: Callable[[int, int, str], None] | None = None,
    ) -> None:
        self.rm, self.config, self.folder, self.tracker, self.seed = rm, config, folder, tracker, seed
        self.train, self.validation = train, validation
        self.progress = progress
        self.num_steps = planned_steps(config, len(train))
        self.token_budget = config.token_budget or choose_token_budget(
            rm.model.config,
            num_parameters=rm.num_parameters,
            max_seq_len=rm.renderer.rendering.max_seq_len,
            precision=config.precision,
            gradient_checkpointing=config.gradient_checkpointing,
            device=rm.device,
        )
        pack_pairs([max(pair.num_tokens for pair in train)], self.token_budget)  # refuses now what would fail mid-way
        self._rows: dict[int, dict[str, float]] = {}
        self._best = _Best(config.best_metric)
        self.best_rewards = np.zeros((0, 2), dtype=np.float32)
        """(P, 2) rewards, chosen first, under the best weights; of the split named below."""
        self.best_rewards_split = "validation"

    def run(self) -> TrainResult:
        """Train to the end, to early stopping, or to an error; the last good state is always on disk.

        Raises:
            TrainingError: loss or gradient is not finite.
            KeyboardInterrupt: passed on after the current weights have been saved as `step_*`.
        """
        torch.manual_seed(self.seed)
        if self.config.gradient_checkpointing:
            self.rm.model.gradient_checkpointing_enable()
        optimizer = make_optimizer(self.rm.model, self.config)
        schedule = make_schedule(optimizer, self.config, self.num_steps)
        totals, window, seconds = [0, 0, 0], _Window(), 0.0
        stop_reason, step = "all steps done", 0
        try:
            for step, (indices, batches) in enumerate(self._steps(), start=1):
                started = time.perf_counter()
                lr = float(schedule.get_last_lr()[0])
                result = self._one_step_or_save(optimizer, batches, step, indices)
                schedule.step()
                elapsed = time.perf_counter() - started
                seconds, window.seconds = seconds + elapsed, window.seconds + elapsed
                window.results.append(result)
                totals = [
                    totals[0] + result.num_pairs,
                    totals[1] + result.num_tokens,
                    totals[2] + result.num_real_tokens,
                ]
                last = step == self.num_steps
                if step % self.config.log_every == 0 or last:
                    self._log(step, window.summary(lr))
                    window = _Window()
                if self.validation and (step % self.config.eval_every == 0 or last):
                    self._evaluate(step)
                if self.config.save_every and step % self.config.save_every == 0 and not last:
                    save_checkpoint(self.rm, self.folder / f"step_{step}")
                if self.progress is not None:
                    self.progress(step, self.num_steps, f"loss {result.loss:.3f}")
                patience = self.config.early_stopping_patience
                if self.validation and patience is not None and self._best.evaluations_since >= patience and not last:
                    stop_reason = f"{self.config.best_metric} did not improve for {patience} evaluations"
                    break
        except KeyboardInterrupt:
            save_checkpoint(self.rm, self.folder / f"step_{step}")
            raise
        finally:
            self._write_csv()
        save_checkpoint(self.rm, self.folder / f"step_{step}")
        if not self.validation or self._best.value is None:
            save_checkpoint(self.rm, self.folder / "best")
            self._best.step = step
            self.best_rewards = score_tokenized(self.rm, self.train[:DISTRIBUTION_PAIRS])
            self.best_rewards_split = "train"
        return TrainResult(
            num_steps=step,
            planned_steps=self.num_steps,
            stop_reason=stop_reason,
            best_step=self._best.step,
            best_metric=self.config.best_metric if self.validation else None,
            best_value=self._best.value,
            num_pairs=totals[0],
            num_tokens=totals[1],
            num_real_tokens=totals[2],
            token_budget=self.token_budget,
            train_seconds=seconds,
            peak_memory_bytes=peak_memory_bytes(self.rm.device),
        )

    def probe(self, num_steps: int) -> int:
        """Run the first steps to see what they cost: padded tokens computed. Weights change, nothing is saved."""
        optimizer = make_optimizer(self.rm.model, self.config)
        steps = enumerate(islice(self._steps(), num_steps), start=1)
        return sum(self._one_step(optimizer, batches, step, indices).num_tokens for step, (indices, batches) in steps)

    def _steps(self) -> Iterator[tuple[list[int], list[MicroBatch]]]:
        for indices in step_order(len(self.train), self.config.pairs_per_step, self.num_steps, seed=self.seed):
            pairs = [self.train[index] for index in indices]
            yield indices, list(micro_batches(pairs, token_budget=self.token_budget, pad_id=self.rm.pad_id))

    def _one_step_or_save(
        self, optimizer: Optimizer, batches: list[MicroBatch], step: int, indices: Sequence[int]
    ) -> StepResult:
        """Run one step; where it is refused, its update was not applied, so the weights are still worth keeping."""
        try:
            return self._one_step(optimizer, batches, step, indices)
        except TrainingError:
            if step > 1:
                save_checkpoint(self.rm, self.folder / f"step_{step - 1}")
            raise

    def _one_step(
        self, optimizer: Optimizer, batches: list[MicroBatch], step: int, indices: Sequence[int]
    ) -> StepResult:
        self.rm.model.train()
        pair_ids = [self.train[index].pair_id for index in indices]
        return train_step(
            self.rm.model, optimizer, batches, self.config, step=step, pair_ids=pair_ids, device=self.rm.device
        )

    def _evaluate(self, step: int) -> None:
        rewards = score_tokenized(self.rm, self.validation)
        if not np.isfinite(rewards).all():
            raise TrainingError(
                f"step {step}: rewards of held-out pairs are not finite, so the last updates blew the weights up; the "
                "best checkpoint so far is kept. Lower the learning rate, lengthen the warm-up, or clip harder."
            )
        margins = rewards[:, 0].astype(np.float64) - rewards[:, 1]
        values = {f"eval/{name}": value for name, value in batch_metrics(margins).items()}
        self._log(step, values | {"eval/num_pairs": float(len(margins))})
        if self._best.improved(values[self.config.best_metric], step):
            self.best_rewards = rewards
            save_checkpoint(self.rm, self.folder / "best")

    def _log(self, step: int, values: dict[str, float]) -> None:
        self.tracker.metrics(step, values)
        self._rows.setdefault(step, {}).update(values)

    def _write_csv(self) -> None:
        with (self.folder / "metrics.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["step", *CSV_COLUMNS])
            for step, values in sorted(self._rows.items()):
                writer.writerow([step, *(values.get(name, "") for name in CSV_COLUMNS.values())])


def score_tokenized(rm: BradleyTerryRM, pairs: Sequence[TokenizedPair]) -> np.ndarray:
    """Rewards of both sides of P tokenized pairs: (P, 2) float32, chosen first."""
    return rm.score_sides([side for pair in pairs for side in (pair.chosen, pair.rejected)]).reshape(-1, 2)
