"""Settings of the curvature."""

from typing import ClassVar, Literal

from pydantic import Field

from rmcore.config.base import Settings

SMALL = {"lanczos_steps": 6, "trace_probes": 2}
COMPARED = {"normalized": True, "num_pairs": 8, "top_k": 2}
PRODUCT_PASSES = 3
"""Training passes that a Hessian-vector product costs; about what 24.9 ms to 7.7 ms a gradient come to."""


class LandscapeConfig(Settings):
    """Curvature of the loss at the trained weights. Left out: it is not measured. It decides nothing.

    All of it is counted in pairs and products, which are the same on every machine. The defaults take about 20 Hessian
    products of 8 pairs: seconds for a tiny model, half a minute for a 22 M encoder on two CPU cores.
    """

    common: ClassVar = ("method",)
    usual: ClassVar = {
        "smoke": {**SMALL, "num_pairs": 4, "top_k": 3},
        "h200": {"parameters": "head"},  # the adapters' products go back through all 8 B
        "experiment smoke": {**COMPARED, **SMALL, "num_pairs": 4},
        "experiment gold": {**COMPARED, **SMALL},
        "experiment small": {**COMPARED, **SMALL},
        "experiment paper": {"normalized": True, "num_pairs": 32, "lanczos_steps": 20, "trace_probes": 8},
    }
    method: Literal["lanczos", "power_iteration", "full", "pyhessian"] = "lanczos"
    """lanczos: both signed ends with residuals; power_iteration: less memory; full: dense, very small models only;
    pyhessian: that library, as a cross-check."""
    num_pairs: int = Field(default=8, ge=1, le=1_000_000)
    """Held-out pairs the loss is averaged over, drawn at random."""
    top_k: int = Field(default=5, ge=1, le=1000)
    """Eigenvalues reported at each end."""
    lanczos_steps: int = Field(default=10, ge=2, le=10_000)
    """Hessian-vector products spent on the spectrum, or at most on each eigenvalue (power_iteration, pyhessian)."""
    trace_probes: int = Field(default=4, ge=2, le=10_000)
    """Hutchinson probes for the trace."""
    parameters: str = Field(default="all", min_length=1)
    """all trained parameters, the reward head, lora adapters, or the dotted name of a module or parameter."""
    normalized: bool = False
    """Also measure λmax with all margins divided by their root mean square, for twice the time: only that compares
    models whose margins differ in size."""


def training_passes(settings: LandscapeConfig) -> float:
    """Give the pairs that a training passes over in the time of a measurement.

    It is here because no key depends on this file: a better estimate of a time changes no result.
    """
    products = settings.lanczos_steps + settings.trace_probes
    products = (2 if settings.normalized else 1) * products + 1  # and one for the error over prompts
    return float(PRODUCT_PASSES * products * settings.num_pairs)
