"""The record of a loss Hessian's spectrum, and how its derived quantities follow from the estimates.

At a trained reward model the Hessian is indefinite and nearly singular, and the largest eigenvalue falls merely because
margins grow. So the record holds both signed ends with their error bars, says which derived quantities are undefined
and why, and no number of it is meant to be read alone.
"""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np

from rmcore.landscape.eigensolvers import RELATIVE_TOLERANCE, EigenvalueSet, Floats
from rmcore.landscape.operators import LossHessian

Method = Literal["lanczos", "power_iteration", "full", "pyhessian"]


@dataclass(frozen=True)
class HessianSpectrum:
    """Curvature of the mean Bradley-Terry loss, in nats per squared unit of the parameters.

    Every field that can be undefined is None then, and `reasons` has its name with the reason.

    Attributes:
        eigenvalues: signed, largest first: the top_k at each end (lanczos, full), or the top_k largest in magnitude
            (power_iteration, pyhessian).
        residuals: ||H v - theta v|| of each: some true eigenvalue lies at most this far from it.
        lambda_max: largest eigenvalue.
        lambda_min: smallest, most negative eigenvalue.
        trace_estimate: sum of all eigenvalues, by Hutchinson's estimator (exact with `full`).
        trace_standard_error: of that estimate; 0 with `full`.
        condition_number: largest over smallest positive eigenvalue among those known to 1 % of their size. The Hessian
            of a reward model is singular (a constant added to all rewards changes nothing), so with lanczos this is
            the spread of what `num_steps` products resolve, not of the whole spectrum.
        effective_rank: (sum |lambda|)^2 / sum lambda^2 over all N eigenvalues: k for k equal ones (R_0 of Bartlett et
            al. 2020, arXiv:1906.11300, definition 3, with magnitudes as H is indefinite). Estimated by Lanczos
            quadrature (eigensolvers.lanczos_eigenvalues), exact with `full`.
        negative_mass: sum of |lambda| over the negative eigenvalues / sum |lambda|, 0 for a convex loss; estimated and
            exact as effective_rank is.
        sharpness_score: lambda_max / trace.
        flatness_index: 1 / lambda_max.
        num_pairs: preference pairs the loss is averaged over.
        num_parameters: N, the size of the Hessian.
        num_products: Hessian-vector products spent.
        method: how the eigenvalues were computed.
        parameters: which parameters the Hessian is over.
        converged: lambda_max and lambda_min (lanczos), or every eigenvalue given (power_iteration, pyhessian), are
            known to 1 %: of the largest magnitude with lanczos, of each one's own otherwise.
        reasons: name of each undefined field -> why.
    """

    eigenvalues: tuple[float, ...]
    residuals: tuple[float, ...]
    lambda_max: float | None
    lambda_min: float | None
    trace_estimate: float
    trace_standard_error: float
    condition_number: float | None
    effective_rank: float | None
    negative_mass: float | None
    sharpness_score: float | None
    flatness_index: float | None
    num_pairs: int
    num_parameters: int
    num_products: int
    method: Method
    parameters: str
    converged: bool
    reasons: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready record: lists, numbers, strings and null."""
        record = asdict(self)
        return record | {"eigenvalues": list(self.eigenvalues), "residuals": list(self.residuals)}


def spectrum_record(
    found: EigenvalueSet,
    *,
    trace: float,
    trace_error: float,
    hessian: LossHessian,
    method: Method,
    top_k: int,
    num_products: int,
) -> HessianSpectrum:
    """The record of what was found, with a reason for whatever it leaves undefined."""
    reasons: dict[str, str] = {}
    effective_rank, negative_mass = _bulk(found, method, reasons)
    values, residuals = found.values, found.residuals  # (K,), (K,), the largest eigenvalue first
    both_ends = method in ("lanczos", "full")
    scale = float(np.abs(values).max())
    lambda_max, lambda_min = _ends(values, both_ends, reasons)
    keep = np.arange(len(values))
    if both_ends:
        # Lanczos converges at both ends first; Ritz values between them are no eigenvalues and are not shown.
        keep = keep[(keep < top_k) | (keep >= len(values) - top_k)]
        converged = max(residuals[0], residuals[-1]) <= RELATIVE_TOLERANCE * scale
    else:
        converged = bool(np.all(residuals <= RELATIVE_TOLERANCE * np.abs(values)))
    return HessianSpectrum(
        eigenvalues=tuple(values[keep].tolist()),
        residuals=tuple(residuals[keep].tolist()),
        lambda_max=lambda_max,
        lambda_min=lambda_min,
        trace_estimate=trace,
        trace_standard_error=trace_error,
        condition_number=_condition_number(found, method, reasons),
        effective_rank=effective_rank,
        negative_mass=negative_mass,
        sharpness_score=_sharpness(lambda_max, trace, trace_error, reasons),
        flatness_index=_flatness(lambda_max, reasons),
        num_pairs=hessian.num_pairs,
        num_parameters=hessian.num_parameters,
        num_products=num_products,
        method=method,
        parameters=hessian.subset,
        converged=bool(converged),
        reasons=reasons,
    )


def _ends(values: Floats, both_ends: bool, reasons: dict[str, str]) -> tuple[float | None, float | None]:
    """The two extremes. By magnitude, the first of each sign is that sign's extreme; another sign stays unseen."""
    largest, smallest = float(values[0]), float(values[-1])
    if both_ends:
        return largest, smallest
    if largest <= 0:
        reasons["lambda_max"] = "none of the largest eigenvalues in magnitude is positive; use method='lanczos'."
    if smallest >= 0:
        reasons["lambda_min"] = "none of the largest eigenvalues in magnitude is negative; use method='lanczos'."
    return (largest if largest > 0 else None), (smallest if smallest < 0 else None)


def _condition_number(found: EigenvalueSet, method: Method, reasons: dict[str, str]) -> float | None:
    if found.multiplicities is None:
        reasons["condition_number"] = f"{method} sees the largest eigenvalues only; use method='lanczos' or 'full'."
        return None
    values, residuals = found.values, found.residuals
    # The smallest positive one decides the ratio, and it is the one that is least well known.
    resolved = values[(values > 0) & (residuals <= RELATIVE_TOLERANCE * values)]
    if len(resolved) >= 2:
        return float(resolved.max() / resolved.min())
    reasons["condition_number"] = (
        f"{len(resolved)} positive eigenvalue(s) are known to {RELATIVE_TOLERANCE:.0%} of their size and a ratio needs "
        "two; spend more num_steps."
    )
    return None


def _bulk(found: EigenvalueSet, method: Method, reasons: dict[str, str]) -> tuple[float | None, float | None]:
    """Effective rank and negative mass."""
    names = ("effective_rank", "negative_mass")
    if found.multiplicities is None:
        reasons.update(
            dict.fromkeys(names, f"{method} sees the largest eigenvalues only; use method='lanczos' or 'full'.")
        )
        return None, None
    sizes = np.abs(found.values)
    squares = float((found.multiplicities * sizes**2).sum())
    if squares == 0.0:
        reasons.update(dict.fromkeys(names, "the Hessian is zero: the loss is flat in these parameters."))
        return None, None
    total = float((found.multiplicities * sizes).sum())
    negative = float((found.multiplicities * sizes)[found.values < 0].sum())
    return total**2 / squares, negative / total  # (sum |lambda|)^2 / sum lambda^2: 1 if one counts, D if all alike


def _sharpness(lambda_max: float | None, trace: float, trace_error: float, reasons: dict[str, str]) -> float | None:
    # The trace is a mean over random probes: within two standard errors of 0 its sign is a guess.
    if lambda_max is not None and trace > 2 * trace_error and trace > 0:
        return lambda_max / trace
    reasons["sharpness_score"] = (
        f"the trace {trace:.3g} (standard error {trace_error:.2g}) is not positive beyond its error, so a share of it "
        "means nothing."
        if lambda_max is not None
        else "lambda_max is undefined."
    )
    return None


def _flatness(lambda_max: float | None, reasons: dict[str, str]) -> float | None:
    if lambda_max is not None and lambda_max > 0:
        return 1 / lambda_max
    reasons["flatness_index"] = (
        "lambda_max is undefined." if lambda_max is None else f"lambda_max is {lambda_max:.3g}, not positive."
    )
    return None
