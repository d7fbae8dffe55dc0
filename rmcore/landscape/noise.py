"""How far curvature would move with other pairs or narrower floats: what an estimator's own error leaves out.

A Ritz residual and a probe's standard error say how well the curvature of *these* pairs is known. Here: how much it
varies over pairs.
"""

import math
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rmcore.core.errors import ConfigError
from rmcore.core.progress import Report, silent
from rmcore.landscape.eigensolvers import probe_chunks
from rmcore.landscape.operators import LossHessian
from rmcore.landscape.parameters import ParameterSubset
from rmcore.landscape.sample import CurvatureSample
from rmcore.landscape.vectors import dot, dots, norm

MAX_GROUPS = 16
"""Prompt groups: the standard error of a number from G groups is itself known to 1 / sqrt(2 (G - 1)), here 18 %."""
TARGET = 0.1
"""Relative standard error that `pairs_for_10_percent` is for."""


@dataclass(frozen=True)
class CurvatureNoise:
    """Standard errors over prompts, and the effect of bf16.

    quantities: by name (lambda_max, lambda_min, trace): value, standard_error over prompts, and pairs_for_10_percent,
        how many pairs (with as many a prompt as here) would bring that error to 10 % of the value.
    bf16_relative_error: ||H_bf16 v - H v|| / ||H v|| along the eigenvector of lambda_max, autocast to bf16.
    bf16_lambda_max: v . H_bf16 v.
    num_pairs, num_prompts, num_groups: what the errors are from.
    reasons: name of each undefined quantity -> why.
    """

    quantities: dict[str, dict[str, float]]
    bf16_relative_error: float
    bf16_lambda_max: float
    num_pairs: int
    num_prompts: int
    num_groups: int
    reasons: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready record."""
        bf16 = {"relative_error": self.bf16_relative_error, "lambda_max": self.bf16_lambda_max}
        counts = {"num_pairs": self.num_pairs, "num_prompts": self.num_prompts, "num_groups": self.num_groups}
        return self.quantities | {"bf16": bf16, "reasons": self.reasons} | counts


def curvature_noise(
    model: Any,
    sample: CurvatureSample,
    ends: Tensor,
    *,
    num_probes: int,
    parameters: ParameterSubset = "all",
    seed: int = 0,
    report: Report = silent,
) -> CurvatureNoise:
    """Sampling errors of lambda_max, lambda_min and trace over prompts, and what bf16 does.

    The pairs are cut into groups of whole prompts. For each group g and unit eigenvector v the form v . H_g v is exact,
    and the eigenvalue is their mean; so to first order (perturbation of a simple eigenvalue: the vector's own change is
    of second order) its error over prompts is that of a mean of group values. The trace likewise, with the mean over
    probes z of z . H_g z. A group's weight is its number of pairs; errors are those of a ratio estimator (Cochran 1977,
    Sampling Techniques, 6.4).

    What it leaves out: the largest eigenvalue of a sample is too high on average, because its vector was chosen on the
    same pairs.

    Args:
        model: see `operators.PairCurvature`.
        sample: the pairs that the ends were found on.
        ends: (2, N) unit eigenvectors of lambda_max and lambda_min.
        num_probes: Rademacher probes for the trace.
        parameters: as the ends were found over.
        seed: of the probes, the same as those of `analyzer.hessian_spectrum` with this seed.
        report: called after each group.

    Raises:
        ConfigError: `ends` has another shape than two vectors over these parameters.
    """
    groups = sample.prompt_groups(MAX_GROUPS)
    names = ("lambda_max", "lambda_min")
    forms = []
    for number, group in enumerate(groups, start=1):
        hessian = LossHessian(model, group.batches, parameters=parameters, keep_graphs=False)
        if ends.shape != (2, hessian.num_parameters):
            raise ConfigError(
                f"got eigenvectors {tuple(ends.shape)} for {hessian.num_parameters} parameters: pass both ends, (2, N)."
            )
        generator = torch.Generator(ends.device).manual_seed(seed)  # the same probes for every group
        probes = probe_chunks(hessian.num_parameters, num_probes, generator, ends.dtype)
        forms.append([form for vectors in chain([ends], probes) for form in dots(vectors, hessian.products(vectors))])
        report(number, len(groups), "groups of prompts")
    of_group = np.array(forms)
    of_group = np.column_stack([of_group[:, :2], of_group[:, 2:].mean(1)])
    sizes = np.array([len(group.pairs) for group in groups], dtype=np.float64)
    bf16_error, bf16_value = _bf16(model, sample, ends[0], parameters)
    quantities, reasons = {}, {}
    for name, column in zip((*names, "trace"), of_group.T, strict=True):
        if len(groups) < 2:
            reasons[name] = "all pairs have one prompt, from which no error over prompts can be told; give more."
        else:
            quantities[name] = _ratio(column, sizes)
    return CurvatureNoise(
        quantities, bf16_error, bf16_value, len(sample.pairs), len(set(sample.prompts)), len(groups), reasons
    )


def _ratio(values: np.ndarray, sizes: np.ndarray) -> dict[str, float]:
    """Mean over pairs from the means `values` (G,) of groups of `sizes` (G,), its standard error, and pairs wanted."""
    value = float((values * sizes).sum() / sizes.sum())
    count = len(values)
    spread = ((sizes * (values - value)) ** 2).sum() * count / (count - 1)
    error = float(math.sqrt(spread) / sizes.sum())
    wanted = {} if value == 0 else {"pairs_for_10_percent": float(sizes.sum() * (error / (TARGET * value)) ** 2)}
    return {"value": value, "standard_error": error} | wanted


def _bf16(model: Any, sample: CurvatureSample, vector: Tensor, parameters: ParameterSubset) -> tuple[float, float]:
    exact = LossHessian(model, sample.batches, parameters=parameters, keep_graphs=False).product(vector)
    narrow = LossHessian(model, sample.batches, parameters=parameters, keep_graphs=False, bf16=True).product(vector)
    return norm(narrow - exact) / norm(exact), dot(vector, narrow)
