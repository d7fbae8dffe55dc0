"""All figures of one curvature record, as far as its parts were measured."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rmcore.reporting.figures.density import density_figure
from rmcore.reporting.figures.gauss_newton import hessian_and_gauss_newton_figure
from rmcore.reporting.figures.landscape import eigenvalues_figure
from rmcore.reporting.figures.layers import layers_figure
from rmcore.reporting.figures.slices import slices_figure, surface_figure
from rmcore.reporting.figures.style import save


def draw_curvature(record: Mapping[str, Any], folder: Path) -> dict[str, Path]:
    """Write the figures into `folder`; returns them by name."""
    drawn = {"eigenvalues": eigenvalues_figure(record["spectrum"])}
    if "gauss_newton" in record:
        drawn["hessian_and_gauss_newton"] = hessian_and_gauss_newton_figure(record["spectrum"], record["gauss_newton"])
    if "density" in record:
        drawn["density"] = density_figure(record["density"])
    if "layers" in record:
        drawn["layers"] = layers_figure(record["layers"])
    if "slices" in record:
        drawn["slices"] = slices_figure(record["slices"])
        if "surface" in record["slices"]:
            drawn["surface"] = surface_figure(record["slices"]["surface"])
    return {name: save(figure, folder / f"{name}.png") for name, figure in drawn.items()}
