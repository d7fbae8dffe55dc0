"""Settings of the curvature."""

from typing import Literal, Self

from pydantic import Field, model_validator

from rmcore.config.base import Settings

CurvaturePart = Literal["normalized", "gauss_newton", "density", "layers", "slices", "noise"]
"""Measurements beside the ends of the spectrum and the trace; see `LandscapeConfig.parts`."""


class LandscapeConfig(Settings):
    """Curvature of the loss at the trained weights."""

    checkpoint: str = Field(default="best", pattern=r"^(best|step_\d+)$")
    """Which checkpoint of the training: best, or step_N, one of those that train.save_every keeps."""
    parts: tuple[CurvaturePart, ...] = ("normalized", "gauss_newton", "density", "layers", "slices", "noise")
    """Beside the ends and the trace. normalized: the ends at margins of size 1; gauss_newton: its exact spectrum;
    density: of all eigenvalues; layers: trace and ends by layer; slices: the loss along directions; noise: errors over
    prompts, and bf16."""
    method: Literal["lanczos", "power_iteration", "full"] = "lanczos"
    """lanczos: both signed ends with residuals; power_iteration: less memory; full: dense, very small models only."""
    num_pairs: int = Field(default=32, ge=1)
    """Held-out pairs the loss is averaged over, drawn at random."""
    minutes: float | None = Field(default=None, gt=0)
    """About how long it may take: fewer pairs, then fewer parts, and the record says so; null: a minute on a CPU, no
    limit on a GPU."""
    top_k: int = Field(default=5, ge=1)
    """Eigenvalues reported at each end."""
    lanczos_steps: int = Field(default=20, ge=2)
    """Hessian-vector products spent on the spectrum, and on each start vector of the density."""
    trace_probes: int = Field(default=8, ge=2)
    """Hutchinson probes for the trace."""
    density_vectors: int = Field(default=4, ge=2)
    """Start vectors of the density: its error falls with their root."""
    layer_steps: int = Field(default=8, ge=2)
    """Hessian-vector products spent on the ends of each layer."""
    slice_points: int = Field(default=15, ge=5)
    """Points of each line along which the loss is drawn; each is a pass over the pairs."""
    surface_points: int = Field(default=0, ge=0, le=51)
    """Points a side of a two-dimensional slice, each a pass over the pairs; 0: none."""
    parameters: str = Field(default="all", min_length=1)
    """all trained parameters, the reward head, lora adapters, or the dotted name of a module or parameter."""

    @model_validator(mode="after")
    def _a_basis_only_where_it_may_be_held(self) -> Self:
        basis = sorted({"normalized", "density", "layers", "noise"} & set(self.parts))
        if self.method == "power_iteration" and basis:
            raise ValueError(
                "method=power_iteration is for models whose Lanczos vectors do not fit into memory, and parts "
                f"{', '.join(basis)} need them; leave those parts out, or use method=lanczos"
            )
        return self
