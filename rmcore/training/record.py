"""Records of a training, without torch: how many steps it has, what was measured of each, which one is best, how the
training ended, and the table `metrics.csv`.
"""

import csv
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from rmcore.config.train import TrainConfig
from rmcore.core.files import atomic_file

LAST = "last"
"""The `best_metric` that chooses no step: no evaluation is noted then."""
HIGHER_IS_BETTER = {"eval/pairwise_accuracy": True, "eval/loss": False, "eval/ece": False}
CSV_COLUMNS = {
    "train_loss": "train/loss",
    "train_acc": "train/pairwise_accuracy",
    "train_margin": "train/mean_margin",
    "eval_loss": "eval/loss",
    "eval_acc": "eval/pairwise_accuracy",
    "eval_margin": "eval/mean_margin",
    "eval_pairs": "eval/num_pairs",
}
ENOUGH_STEPS = 60
"""Steps that a training is given where nothing was said: one pass over 300 pairs is 20, in which a pretrained encoder
learns next to nothing (benchmarks/results/few-pairs.md)."""
MOST_PASSES = 10
"""More passes over very few pairs learn them by heart."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Measurements of one optimizer step, before its update. Counts and means are over its pairs of all ranks."""

    num_pairs: int
    """Observations, where these are not pairs."""
    num_tokens: int
    """Computed tokens, with padding; a prompt that both sides share counts once where rows are packed."""
    num_real_tokens: int
    """Tokens of both sides of each pair."""
    loss: float
    """Mean training loss in nats, with label smoothing and penalties."""
    pairwise_accuracy: float
    mean_margin: float
    grad_norm: float
    """Before clipping."""


@dataclass(slots=True)
class Selection:
    """The evaluations so far, as far as they matter for what is kept and for stopping."""

    metric: str
    keep: int = 1
    kept: list[tuple[float, int]] = field(default_factory=list)
    """(value, step) of the best evaluations, best first."""
    evaluations_since: int = 0
    """Evaluations since the last improvement."""

    @classmethod
    def of(cls, config: TrainConfig) -> "Selection":
        """A fresh one for a training."""
        return cls(config.best_metric, config.keep_top_k)

    @property
    def best(self) -> tuple[float, int] | None:
        """(value, step) of the best evaluation; None if no value was defined yet."""
        return self.kept[0] if self.kept else None

    def note(self, value: float, step: int) -> tuple[bool, list[int]]:
        """Note one evaluation. An undefined value (NaN) is never good; of equals the earlier is better.

        Returns:
            Whether `step` is now among the kept ones, and the steps that no longer are.
        """
        if not math.isfinite(value):
            self.evaluations_since += 1
            return False, []
        sign = 1 if HIGHER_IS_BETTER[self.metric] else -1
        is_better = self.best is None or sign * (value - self.best[0]) > 0
        self.evaluations_since = 0 if is_better else self.evaluations_since + 1
        self.kept = sorted([*self.kept, (value, step)], key=lambda entry: (-sign * entry[0], entry[1]))
        dropped = [old for _, old in self.kept[self.keep :]]
        self.kept = self.kept[: self.keep]
        return step not in dropped, [old for old in dropped if old != step]


@dataclass(slots=True)
class TrainResult:
    """How a training ended."""

    num_steps: int
    """Optimizer steps done."""
    planned_steps: int
    stop_reason: str
    best_step: int
    best_metric: str | None
    """None where no step was chosen, without validation pairs or by best_metric=last: best is then the last step."""
    best_value: float | None
    kept_steps: list[dict[str, float]]
    """Step and value of the best evaluations that were kept, best first."""
    num_pairs: int
    """Pairs seen, with repetition over epochs."""
    num_tokens: int
    """Tokens computed in training steps: padding included, a shared prompt once."""
    num_real_tokens: int
    """Tokens of both sides of every pair seen."""
    token_budget: int
    train_seconds: float
    """Wall seconds in optimizer steps, without evaluations and checkpoints. On a GPU, which the host does not wait for
    after each step, from the first step that was not read to their reading."""
    peak_memory_bytes: int
    """Most memory: allocated on a GPU since training began, else of this process so far."""
    peak_training_bytes: int | None
    """Most bytes of tensors besides the model at once: gradients, activations, temporaries, optimizer state. On a CPU
    of the second step (the first, if alone); None there for several processes or with compile: see `PeakMeter`."""
    num_processes: int
    resumed_from: list[int]
    """Steps from which earlier attempts were resumed, in order; empty for a training in one piece."""
    compiled: bool

    @property
    def pairs_per_second(self) -> float:
        """Training throughput."""
        return self.num_pairs / max(self.train_seconds, 1e-9)

    def to_dict(self) -> dict:
        """A JSON-ready record."""
        return asdict(self) | {"pairs_per_second": self.pairs_per_second}


@dataclass(slots=True)
class Totals:
    """Sums over the whole training."""

    num_pairs: int = 0
    num_tokens: int = 0
    num_real_tokens: int = 0
    seconds: float = 0.0

    def add(self, result: StepResult, seconds: float) -> None:
        """Count one step."""
        self.num_pairs += result.num_pairs
        self.num_tokens += result.num_tokens
        self.num_real_tokens += result.num_real_tokens
        self.seconds += seconds


@dataclass(slots=True)
class Window:
    """Step results since the last logged line, averaged by pairs."""

    results: list[StepResult] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, result: StepResult, seconds: float) -> None:
        """Count one step."""
        self.results.append(result)
        self.seconds += seconds

    def summary(self, lr: float) -> dict[str, float]:
        """The metrics of one logged line; `lr` is that of the last step."""
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
            "cost/computed_share": sum(r.num_tokens for r in self.results)
            / sum(r.num_real_tokens for r in self.results),
        }


@dataclass(slots=True)
class Progress:
    """The progress of a training, apart from tensors: what a resumable state records next to them."""

    token_budget: int
    selection: Selection
    step: int = 0
    """Optimizer steps done."""
    totals: Totals = field(default_factory=Totals)
    window: Window = field(default_factory=Window)
    rows: dict[int, dict[str, float]] = field(default_factory=dict)
    """Everything logged, by step."""
    num_rows: int = 0
    """Calls of the tracker so far: the lines of `metrics.jsonl` that belong to this state."""
    resumed_from: list[int] = field(default_factory=list)
    peak_training_bytes: int | None = None
    """See TrainResult; kept here because a training that resumes from a later step does not measure it again."""

    def add(self, result: StepResult, seconds: float) -> None:
        """Count one step."""
        self.step += 1
        self.totals.add(result, seconds)
        self.window.add(result, seconds)

    def result(self, **more: Any) -> TrainResult:
        """How a training ended that is recorded here; `more` are the fields of the result that are not known here."""
        best = self.selection.best
        return TrainResult(
            num_steps=self.step,
            best_step=best[1] if best else self.step,
            best_value=best[0] if best else None,
            kept_steps=[{"step": step, "value": value} for value, step in self.selection.kept],
            num_pairs=self.totals.num_pairs,
            num_tokens=self.totals.num_tokens,
            num_real_tokens=self.totals.num_real_tokens,
            train_seconds=self.totals.seconds,
            peak_training_bytes=self.peak_training_bytes,
            token_budget=self.token_budget,
            resumed_from=self.resumed_from,
            **more,
        )

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready record; what is not a number becomes null."""
        rows = {
            str(step): {name: value if math.isfinite(value) else None for name, value in values.items()}
            for step, values in self.rows.items()
        }
        return asdict(self) | {"rows": rows}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> "Progress":
        """Read a record of `to_dict` back, to the last bit."""
        rows = {
            step: {name: math.nan if value is None else value for name, value in values.items()}
            for step, values in record["rows"].items()
        }
        return TypeAdapter(cls).validate_python({**record, "rows": rows})


class MetricsTable:
    """`metrics.csv`: one line a step with the columns below, empty where nothing was measured.

    It grows with the training, a whole line at a time. What a former attempt wrote after the state that this one goes
    on from is not kept: the file begins with `rows`, and takes the place of an older one as a whole.

    Args:
        path: the file.
        rows: what was measured so far, by step.
    """

    def __init__(self, path: Path, rows: Mapping[int, Mapping[str, float]]) -> None:
        with atomic_file(path) as temporary:
            self._file = temporary.open("w", newline="", encoding="utf-8")  # left open: it goes with its name
            self._writer = csv.writer(self._file)
            self._writer.writerow(["step", *CSV_COLUMNS])
            for step, values in sorted(rows.items()):
                self.add(step, values)
            self._file.flush()

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Append the line of a step, all of whose numbers are known."""
        self._writer.writerow([step, *(values.get(name, "") for name in CSV_COLUMNS.values())])
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def passes(config: TrainConfig, num_pairs: int) -> float:
    """Passes over `num_pairs` training pairs, at least one: `epochs`, else as many as `ENOUGH_STEPS` take.

    >>> passes(TrainConfig(epochs=None), 300), passes(TrainConfig(epochs=None), 5000)
    (4, 1)
    """
    if config.epochs is not None:
        return config.epochs
    return min(MOST_PASSES, max(1, math.ceil(ENOUGH_STEPS * config.pairs_per_step / max(1, num_pairs))))


def planned_steps(config: TrainConfig, num_pairs: int) -> int:
    """Optimizer steps of a run over `num_pairs` training pairs: `steps`, else `passes` rounded to whole steps."""
    if config.steps is not None:
        return config.steps
    per_epoch = math.ceil(num_pairs / config.pairs_per_step)
    return max(1, round(passes(config, num_pairs) * per_epoch))
