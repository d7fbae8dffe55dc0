"""Settings of the question whether a policy may be optimised."""

from typing import Literal, Self

from pydantic import Field, model_validator

from rmcore.config.base import Settings


class ReadinessConfig(Settings):
    """How readiness for an optimisation is judged: the plan and its conditions; and weights of the original score."""

    accuracy_weight: float = Field(default=0.35, ge=0)
    """Original score, which decides nothing: weight of held-out pairwise accuracy."""
    calibration_weight: float = Field(default=0.25, ge=0)
    """Original score: weight of calibration."""
    stability_weight: float = Field(default=0.25, ge=0)
    """Original score: weight of reward variance."""
    landscape_weight: float = Field(default=0.15, ge=0)
    """Original score: weight of curvature."""
    planned_optimizer: Literal["best_of_n", "kl_optimum"] = "best_of_n"
    """Method that will optimise the policy: best-of-n sampling, or RL with a KL penalty (its optimum stands for it)."""
    planned_kl: float = Field(default=3.0, gt=0)
    """KL in nats that the policy will be moved by; best of 64 is 3.2, less where samples tie."""
    min_gain: float = Field(default=0.3, gt=0)
    """Gain of the gold reward that makes it worth while, in standard deviations within prompts; a model that
    is shown to gain less at the plan is refused."""

    @model_validator(mode="after")
    def _weights_sum_to_one(self) -> Self:
        total = self.accuracy_weight + self.calibration_weight + self.stability_weight + self.landscape_weight
        if abs(total - 1) > 1e-6:
            raise ValueError(f"the four weights sum to {total:g}; they must sum to 1 for scores to compare")
        return self
