"""Settings of the question whether a policy may be optimised."""

from typing import Literal

from pydantic import Field

from rmcore.config.base import Settings


class ReadinessConfig(Settings):
    """How readiness for an optimisation is judged: the plan and its conditions."""

    planned_optimizer: Literal["best_of_n", "kl_optimum"] = "best_of_n"
    """Method that will optimise the policy: best-of-n sampling, or RL with a KL penalty (its optimum stands for it)."""
    planned_kl: float = Field(default=3.0, ge=0.01)
    """KL in nats that the policy will be moved by; best of 64 is 3.2, less where samples tie."""
    min_gain: float = Field(default=0.3, gt=0)
    """Gain of the true reward that makes it worth while, in standard deviations within prompts; a model that
    is shown to gain less at the plan is refused."""
