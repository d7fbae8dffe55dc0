"""Which evaluated step is best, which ones are kept, and when there is no more hope."""

import math
from dataclasses import dataclass, field

from rmcore.config.train import TrainConfig

LAST = "last"
"""The `best_metric` that chooses no step: no evaluation is noted then."""
HIGHER_IS_BETTER = {"eval/pairwise_accuracy": True, "eval/loss": False, "eval/ece": False}


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
