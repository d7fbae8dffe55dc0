"""All figures of one curvature record, as far as its parts were measured."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rmcore.reporting.figures.density import density
from rmcore.reporting.figures.gauss_newton import hessian_and_gauss_newton
from rmcore.reporting.figures.landscape import eigenvalues
from rmcore.reporting.figures.layers import layers
from rmcore.reporting.figures.slices import slices, surface


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
