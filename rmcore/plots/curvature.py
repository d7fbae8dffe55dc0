"""All figures of one curvature record, as far as its parts were measured."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rmcore.plots.density import density
from rmcore.plots.gauss_newton import hessian_and_gauss_newton
from rmcore.plots.landscape import eigenvalues
from rmcore.plots.layers import layers
from rmcore.plots.slices import slices, surface


def draw_curvature(record: Mapping[str, Any], folder: Path) -> dict[str, Path]:
    """Write the figures into `folder`; returns them by name."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {"eigenvalues": eigenvalues(record["spectrum"], folder / "eigenvalues.png")}
    if "gauss_newton" in record:
        name = "hessian_and_gauss_newton"
        drawn[name] = hessian_and_gauss_newton(record["spectrum"], record["gauss_newton"], folder / f"{name}.png")
    if "density" in record:
        drawn["density"] = density(record["density"], folder / "density.png")
    if "layers" in record:
        drawn["layers"] = layers(record["layers"], folder / "layers.png")
    if "slices" in record:
        drawn["slices"] = slices(record["slices"], folder / "slices.png")
        if "surface" in record["slices"]:
            drawn["surface"] = surface(record["slices"]["surface"], folder / "surface.png")
    return drawn
