"""Settings of the evaluation on held-out pairs, and of the question whether a policy may be optimised."""

from typing import Annotated, Literal

from pydantic import Field

from rmcore.config.base import Names, Settings, Threshold
from rmcore.config.model import WeightDtype


class EvaluateConfig(Settings):
    """Held-out metrics and their intervals."""

    num_resamples: int = Field(default=1000, ge=100, le=100_000)
    """Bootstrap resamples over prompts for the 95 % intervals."""
    thresholds: tuple[Threshold, ...] = (0.3, 0.5, 0.7)
    """Probabilities from which a single response counts as good: for its true and false positive rates."""
    train_pairs: int = Field(default=500, ge=1)
    """Training pairs scored for the train-test gap."""
    answers: Annotated[str | None, Names("file")] = None
    """A file of answers that a judge has scored, ranked or compared, several a prompt: what the model chooses among
    them decides on evidence level 2, in place of the labelled pairs' own answers."""
    dtype: WeightDtype | None = None
    """Format of the weights while held-out pairs are scored. Left out: bfloat16 on a GPU, else float32."""


class ReadinessConfig(Settings):
    """How readiness for an optimisation is judged: the plan and its conditions."""

    planned_optimizer: Literal["best_of_n", "kl_optimum"] = "best_of_n"
    """Method that will optimise the policy: best-of-n sampling, or RL with a KL penalty (its optimum stands for it)."""
    planned_kl: float = Field(default=3.0, ge=0.01)
    """KL in nats that the policy will be moved by; best of 64 is 3.2, less where samples tie."""
    min_gain: float = Field(default=0.3, gt=0)
    """Gain of the true reward that makes it worth while, in standard deviations within prompts; a model that
    is shown to gain less at the plan is refused."""
