"""Measure one model's curvature as one record: what the stage and the command share.

Every count (pairs, products, probes) is a setting and nothing looks at a clock or at free memory, so that equal
settings give equal records on a busy machine, too.
"""

import math
from typing import Any

import numpy as np
from torch import Tensor

from rmcore.core.progress import Report, labelled
from rmcore.landscape.analyzer import hessian_spectrum
from rmcore.landscape.eigensolvers import dot
from rmcore.landscape.operators import LossHessian
from rmcore.landscape.sample import CurvatureSample
from rmcore.landscape.settings import LandscapeConfig

MAX_GROUPS = 16
"""Groups of prompts: the standard error of a number from G groups is itself known to 1 / sqrt(2 (G - 1)), here 18 %."""
ONE_PROMPT = "all pairs have one prompt, from which no error over prompts can be told; give pairs of more prompts."
NO_MARGIN = "every margin is 0, so they have no size to divide by."


def measure_curvature(
    model: Any, sample: CurvatureSample, config: LandscapeConfig, *, seed: int, report: Report
) -> dict[str, Any]:
    """Measure the ends of the spectrum and the trace, and how far the largest eigenvalue would move with other prompts.

    Args:
        model: see `operators.LossHessian`.
        sample: the pairs.
        config: by which method, and by how many products.
        seed: of every random vector.
        report: called as report(done, total, what) within each part.

    Returns:
        The record of `HessianSpectrum`, JSON-ready, with `over_prompts`: {"standard_error" of lambda_max or None,
        "num_prompts", "num_groups", "reasons"}. With `config.normalized` also `normalized`: {"temperature",
        "lambda_max", "residual", "reasons"} of the Hessian of softplus(-m / T), T the root mean square of the margins.
        Margins that grow by a factor leave it as it was (up to the head's own weights), while the raw Hessian falls, so
        models whose margins differ in size can be compared by it.

    Raises:
        CurvatureError, DataError, ModelError, ConfigError: see `analyzer.HessianAnalyzer.compute_spectrum`.
    """
    hessian = LossHessian.from_loader(model, sample.batches, parameters=config.parameters)
    counts = {"num_steps": config.lanczos_steps, "trace_probes": config.trace_probes, "seed": seed}
    spectrum, top = hessian_spectrum(
        hessian, config.method, config.top_k, **counts, report=labelled(report, "Hessian products")
    )
    record = spectrum.to_dict()
    record["over_prompts"] = error_over_prompts(model, sample, top, config, labelled(report, "errors over prompts"))
    if spectrum.lambda_max is None:  # the vector is that of a negative eigenvalue
        record["over_prompts"] |= {
            "standard_error": None,
            "reasons": {"standard_error": spectrum.reasons["lambda_max"]},
        }
    if config.normalized:
        scale = float(hessian.margins().square().mean().sqrt())
        found = {"temperature": scale, "lambda_max": None, "residual": None, "reasons": {"lambda_max": NO_MARGIN}}
        if scale > 0:
            scaled = LossHessian(model, sample.batches, parameters=config.parameters, temperature=scale)
            told = labelled(report, "margins of size 1")
            ends, _ = hessian_spectrum(scaled, config.method, config.top_k, **counts, report=told)
            found |= {"lambda_max": ends.lambda_max, "residual": ends.residuals[0], "reasons": ends.reasons}
        record["normalized"] = found
    return record


def error_over_prompts(
    model: Any, sample: CurvatureSample, top: Tensor, config: LandscapeConfig, report: Report
) -> dict[str, Any]:
    """Standard error of lambda_max over prompts: a residual says nothing of how it would move with other pairs.

    The pairs are cut into G groups of whole prompts. For the unit eigenvector v the form v . H_g v of a group is exact,
    and the eigenvalue is the mean of these forms over pairs; so to first order (perturbation of a simple eigenvalue:
    the vector's own change is of second order) its error over prompts is that of a ratio of means (Cochran 1977,
    Sampling Techniques, 6.4). It leaves out that the largest eigenvalue of a sample is too high on average, because its
    vector was chosen on the same pairs.

    Args:
        model: see `operators.LossHessian`.
        sample: the pairs that the vector was found on.
        top: (N,) unit eigenvector of lambda_max.
        config: the parameters.
        report: called after each group.
    """
    groups = sample.prompt_groups(MAX_GROUPS)
    counts = {"num_prompts": len(set(sample.prompts)), "num_groups": len(groups)}
    if len(groups) < 2:
        return {"standard_error": None, **counts, "reasons": {"standard_error": ONE_PROMPT}}
    forms = np.zeros(len(groups))  # (G,)
    for number, group in enumerate(groups):
        product = LossHessian(model, group.batches, parameters=config.parameters).product(top)
        forms[number] = dot(top.to(product), product)
        report(number + 1, len(groups), "groups")
    sizes = np.array([len(group.pairs) for group in groups], dtype=np.float64)
    mean = float((forms * sizes).sum() / sizes.sum())
    spread = float(((sizes * (forms - mean)) ** 2).sum()) * len(groups) / (len(groups) - 1)
    return {"standard_error": math.sqrt(spread) / float(sizes.sum()), **counts, "reasons": {}}
