"""The record of a loss Hessian's spectrum, and the analyzer that fills it.

At a trained reward model the Hessian is indefinite and nearly singular, and the largest eigenvalue falls merely because
margins grow. So the record holds both signed ends with their error bars, says which derived quantities are undefined
and why, and no number of it is meant to be read alone.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from rmcore.errors import ConfigError, CurvatureError
from rmcore.landscape.eigensolvers import (
    RELATIVE_TOLERANCE,
    EigenvalueSet,
    Floats,
    dense_eigenvalues,
    dense_matrix,
    hutchinson_trace,
    lanczos,
    lanczos_eigenvalues,
    power_iteration,
)
from rmcore.landscape.operators import LossHessian, MicroBatch, ParameterSubset
from rmcore.landscape.pyhessian_check import pyhessian_spectrum

Method = Literal["lanczos", "power_iteration", "full", "pyhessian"]
Progress = Callable[[int, int], None]

FULL_LIMIT = 20_000
"""Most parameters of a dense Hessian: at 20,000 it takes 3.2 GB and as many products as parameters."""


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
    sharpness_score: float | None
    flatness_index: float | None
    num_pairs: int
    num_parameters: int
    num_products: int
    method: Method
    parameters: ParameterSubset
    converged: bool
    reasons: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready record: lists, numbers, strings and null."""
        record = asdict(self)
        return record | {"eigenvalues": list(self.eigenvalues), "residuals": list(self.residuals)}


class HessianAnalyzer:
    """Spectrum of the loss Hessian of one reward model.

    Args:
        model: a Hugging Face sequence-classification model with one label, any torch module with the same call, or a
            BradleyTerryRM. It is left as it was found: modes, gradients, `requires_grad`.

    Example:
        >>> spectrum = HessianAnalyzer(model).compute_spectrum(micro_batches, top_k=5, num_steps=20)  # doctest: +SKIP
        >>> spectrum.lambda_max, spectrum.residuals[0]  # doctest: +SKIP
    """

    def __init__(self, model: Any) -> None:
        self.model = model

    def compute_spectrum(
        self,
        loader: Iterable[MicroBatch],
        method: Method = "lanczos",
        top_k: int = 20,
        *,
        num_steps: int = 40,
        trace_probes: int = 16,
        parameters: ParameterSubset = "all",
        seed: int = 0,
        progress: Progress | None = None,
    ) -> HessianSpectrum:
        """Eigenvalues, trace and what follows from them, over all pairs of `loader`.

        Args:
            loader: micro-batches of whole pairs, read into memory; see `operators.MicroBatch`.
            method: `lanczos`: both signed ends, the default. `power_iteration`: the largest in magnitude one by one,
                for models too large for Lanczos' basis. `full`: the dense Hessian, up to 20,000 parameters.
                `pyhessian`: the library of that name, as a cross-check.
            top_k: eigenvalues at each end (lanczos, full) or in all (power_iteration, pyhessian); the default is the
                specification's.
            num_steps: products for the spectrum (lanczos; twice `top_k`, so that both ends can hold that many), or at
                most for each eigenvalue (power_iteration, pyhessian). Unused by `full`.
            trace_probes: Hutchinson probes, one product each; the standard error falls with its root. Unused by `full`.
            parameters: `all` trained parameters or the reward `head` only.
            seed: of the random vectors.
            progress: called as progress(done, total) after each product; total is an upper bound until the last call.

        Raises:
            ConfigError: a setting is unknown or too small.
            CurvatureError: a product is not finite, the data change between passes, the model is narrower than float32
                or too large for `full`, or PyHessian is missing.
            DataError, ModelError: see `operators.LossHessian`.
        """
        _check_settings(method, top_k=top_k, num_steps=num_steps, trace_probes=trace_probes)
        hessian = LossHessian.from_loader(self.model, loader, parameters=parameters)
        size = hessian.num_parameters
        num_steps = min(num_steps, size) if method == "lanczos" else num_steps
        counter = _Counter(hessian.product, _most_products(method, size, top_k, num_steps, trace_probes), progress)
        generator = torch.Generator(hessian.device).manual_seed(seed)
        trace, trace_error = math.nan, 0.0
        if method == "full":
            _refuse_large(size)
            found = dense_eigenvalues(dense_matrix(counter, size, hessian.dtype, hessian.device))
            trace = float(found.values.sum())
        elif method == "pyhessian":
            found, trace, trace_error = pyhessian_spectrum(
                hessian, counter, top_k=top_k, max_iterations=num_steps, num_probes=trace_probes, seed=seed
            )
        else:
            if method == "lanczos":
                start = torch.randn(size, generator=generator, device=hessian.device, dtype=hessian.dtype)
                found = lanczos_eigenvalues(lanczos(counter, start, num_steps))
            else:
                found = power_iteration(
                    counter, size, top_k=top_k, max_iterations=num_steps, generator=generator, dtype=hessian.dtype
                )
            trace, trace_error = hutchinson_trace(
                counter, size, num_probes=trace_probes, generator=generator, dtype=hessian.dtype
            )
        counter.finish()
        return _spectrum(found, trace, trace_error, hessian, method, parameters, top_k, counter.done)


class _Counter:
    """The product, counted and reported."""

    def __init__(self, product: Callable[[Tensor], Tensor], total: int, progress: Progress | None) -> None:
        self.product, self.total, self.progress, self.done = product, total, progress, 0

    def __call__(self, vector: Tensor) -> Tensor:
        result = self.product(vector)
        self.tick()
        return result

    def tick(self) -> None:
        """One more product done."""
        self.done += 1
        if self.progress is not None:
            self.progress(self.done, self.total)

    def finish(self) -> None:
        """Close the gap where fewer products sufficed."""
        if self.progress is not None and self.done < self.total:
            self.progress(self.done, self.done)


def _check_settings(method: Method, *, top_k: int, num_steps: int, trace_probes: int) -> None:
    if method not in get_args(Method):
        raise ConfigError(f"method={method!r} is unknown; choose one of {', '.join(get_args(Method))}.")
    for name, value, least in (("top_k", top_k, 1), ("num_steps", num_steps, 2), ("trace_probes", trace_probes, 2)):
        if value < least:
            raise ConfigError(f"{name}={value} is too small; use at least {least}.")


def _refuse_large(size: int) -> None:
    if size > FULL_LIMIT:
        raise CurvatureError(
            f"method='full' with {size:,} parameters needs {size:,} products and {8 * size * size / 1e9:,.0f} GB: it is "
            f"meant for at most {FULL_LIMIT:,}. Use method='lanczos', or parameters='head'."
        )


def _most_products(method: Method, size: int, top_k: int, num_steps: int, trace_probes: int) -> int:
    if method == "full":
        return size
    spent = num_steps if method == "lanczos" else min(top_k, size) * num_steps
    checks = min(top_k, size) if method == "pyhessian" else 0
    return spent + trace_probes + checks


def _spectrum(
    found: EigenvalueSet,
    trace: float,
    trace_error: float,
    hessian: LossHessian,
    method: Method,
    parameters: ParameterSubset,
    top_k: int,
    num_products: int,
) -> HessianSpectrum:
    reasons: dict[str, str] = {}
    values, residuals = found.values, found.residuals
    both_ends = method in ("lanczos", "full")
    scale = float(np.abs(values).max())
    lambda_max, lambda_min = _ends(values, both_ends, reasons)
    keep = np.arange(len(values))
    if both_ends:
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
        condition_number=_condition_number(values, residuals, reasons),
        effective_rank=_effective_rank(found, torch.finfo(hessian.dtype).eps * scale, method, reasons),
        sharpness_score=_sharpness(lambda_max, trace, trace_error, reasons),
        flatness_index=_flatness(lambda_max, reasons),
        num_pairs=hessian.num_pairs,
        num_parameters=hessian.num_parameters,
        num_products=num_products,
        method=method,
        parameters=parameters,
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


def _condition_number(values: Floats, residuals: Floats, reasons: dict[str, str]) -> float | None:
    resolved = values[(values > 0) & (residuals <= RELATIVE_TOLERANCE * values)]
    if len(resolved) >= 2:
        return float(resolved.max() / resolved.min())
    reasons["condition_number"] = (
        f"{len(resolved)} positive eigenvalue(s) are known to {RELATIVE_TOLERANCE:.0%} of their size and a ratio needs "
        "two; spend more num_steps."
    )
    return None


def _effective_rank(found: EigenvalueSet, rounding: float, method: Method, reasons: dict[str, str]) -> float | None:
    if found.multiplicities is None:
        reasons["effective_rank"] = f"{method} sees the largest eigenvalues only; use method='lanczos' or 'full'."
        return None
    # Values at the level of rounding stand for millions of zero eigenvalues: counted, they would add up to something.
    sizes = np.where(np.abs(found.values) > 10 * rounding, np.abs(found.values), 0.0)
    squares = float((found.multiplicities * sizes**2).sum())
    if squares == 0.0:
        reasons["effective_rank"] = "the Hessian is zero: the loss is flat in these parameters."
        return None
    return float((found.multiplicities * sizes).sum() ** 2 / squares)


def _sharpness(lambda_max: float | None, trace: float, trace_error: float, reasons: dict[str, str]) -> float | None:
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
