"""The analyzer: from a model and pairs to the record of its loss Hessian's spectrum.

At a trained reward model the Hessian is indefinite and nearly singular, and the largest eigenvalue falls merely because
margins grow. So the record holds both signed ends with their error bars, says which derived quantities are undefined
and why, and no number of it is meant to be read alone.
"""

import math
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from rmcore.core.errors import ConfigError, CurvatureError
from rmcore.core.extras import require_extra
from rmcore.core.progress import Report, silent
from rmcore.landscape.eigensolvers import (
    RELATIVE_TOLERANCE,
    EigenvalueSet,
    Floats,
    ProductCounter,
    dense_eigenvalues,
    dense_matrix,
    hutchinson,
    lanczos,
    lanczos_eigenvalues,
    norm,
    power_iteration,
)
from rmcore.landscape.operators import LossHessian, MicroBatch, measuring
from rmcore.models.device import free_bytes

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


FULL_LIMIT = 20_000
"""Most parameters of a dense Hessian: at 20,000 it takes 3.2 GB and as many products as parameters."""


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
        num_steps: int | None = None,
        trace_probes: int = 16,
        parameters: str = "all",
        seed: int = 0,
        report: Report = silent,
    ) -> HessianSpectrum:
        """Eigenvalues, trace and what follows from them, over all pairs of `loader`.

        Args:
            loader: micro-batches of whole pairs, read into memory; see `operators.MicroBatch`.
            method: `lanczos`: both signed ends, the default. `power_iteration`: the largest in magnitude one by one,
                for models too large for Lanczos' basis. `full`: the dense Hessian, up to 20,000 parameters.
                `pyhessian`: the library of that name, as a cross-check.
            top_k: eigenvalues at each end (lanczos, full) or in all (power_iteration, pyhessian); the default is
                `landscape.top_k`'s.
            num_steps: products for the spectrum (lanczos), or at most for each eigenvalue (power_iteration, pyhessian).
                Left out: 40, or twice `top_k` if that is more, so that both ends can hold that many. Unused by `full`.
            trace_probes: Hutchinson probes, one product each; the standard error falls with its root. Unused by `full`.
            parameters: whose curvature; see `operators.NAMED_SUBSETS`.
            seed: of the random vectors.
            report: called after each product; total is an upper bound until the last call.

        Raises:
            ConfigError: a setting is unknown or too small.
            CurvatureError: a product is not finite, the pairs or their loss change between two passes, the model is
                narrower than float32 or too large for `full`, or PyHessian is missing.
            DataError, ModelError: see `operators.LossHessian`.
        """
        num_steps = max(40, 2 * top_k) if num_steps is None else num_steps
        _check_settings(method, top_k=top_k, num_steps=num_steps, trace_probes=trace_probes)
        hessian = LossHessian.from_loader(self.model, loader, parameters=parameters)
        return hessian_spectrum(
            hessian, method, top_k, num_steps=num_steps, trace_probes=trace_probes, seed=seed, report=report
        )[0]


def hessian_spectrum(
    hessian: LossHessian,
    method: Method = "lanczos",
    top_k: int = 20,
    *,
    num_steps: int = 40,
    trace_probes: int = 16,
    seed: int = 0,
    report: Report = silent,
) -> tuple[HessianSpectrum, Tensor]:
    """Compute `HessianAnalyzer.compute_spectrum` from an operator; also its (N,) eigenvector of the largest value."""
    _check_settings(method, top_k=top_k, num_steps=num_steps, trace_probes=trace_probes)
    size = hessian.num_parameters
    num_steps = min(num_steps, size) if method == "lanczos" else num_steps
    counter = ProductCounter(_most_products(method, size, top_k, num_steps, trace_probes), report)
    # Only the product differentiates, and no dot product may be cast to bf16 by the caller's autocast.
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(hessian.device.type, enabled=False):
        found, trace, trace_error = _estimate(
            hessian, counter, method, top_k=top_k, num_steps=num_steps, trace_probes=trace_probes, seed=seed
        )
    counter.finish()
    record = spectrum_record(
        found,
        trace=trace,
        trace_error=trace_error,
        hessian=hessian,
        method=method,
        top_k=top_k,
        num_products=counter.done,
    )
    return record, found.top


def _estimate(
    hessian: LossHessian,
    counter: ProductCounter,
    method: Method,
    *,
    top_k: int,
    num_steps: int,
    trace_probes: int,
    seed: int,
) -> tuple[EigenvalueSet, float, float]:
    """Eigenvalues, and the trace with its standard error."""
    size, product = hessian.num_parameters, counter.counting(hessian.product)
    if method == "full":
        _refuse_large(size)
        found = dense_eigenvalues(dense_matrix(product, size, hessian.dtype, hessian.device))
        return found, float(found.values.sum()), 0.0
    if method == "pyhessian":
        return pyhessian_spectrum(
            hessian, counter, top_k=top_k, max_iterations=num_steps, num_probes=trace_probes, seed=seed
        )
    generator = torch.Generator(hessian.device).manual_seed(seed)
    if method == "lanczos":
        _require_room(num_steps, size, hessian.dtype, hessian.device)
        start = torch.randn(size, generator=generator, device=hessian.device, dtype=hessian.dtype)
        found = lanczos_eigenvalues(lanczos(product, start, num_steps), product)
    else:
        found = power_iteration(
            product, size, top_k=top_k, max_iterations=num_steps, generator=generator, dtype=hessian.dtype
        )
    trace, trace_error = hutchinson(
        counter.counting(hessian.products),
        size,
        num_probes=trace_probes,
        # A generator of its own: the probes are then the same whichever method found the eigenvalues.
        generator=torch.Generator(hessian.device).manual_seed(seed),
        dtype=hessian.dtype,
    )
    return found, trace, trace_error


def _check_settings(method: Method, *, top_k: int, num_steps: int, trace_probes: int) -> None:
    if method not in get_args(Method):
        raise ConfigError(f"method={method!r} is unknown; choose one of {', '.join(get_args(Method))}.")
    for name, value, least in (("top_k", top_k, 1), ("num_steps", num_steps, 2), ("trace_probes", trace_probes, 2)):
        if value < least:
            raise ConfigError(f"{name}={value} is too small; use at least {least}.")


def _refuse_large(size: int) -> None:
    if size > FULL_LIMIT:
        raise CurvatureError(
            f"method='full' with {size:,} parameters needs {size:,} products and {8 * size * size / 1e9:,.0f} GB: it "
            f"is meant for at most {FULL_LIMIT:,}. Use method='lanczos', or parameters='head'."
        )


def _most_products(method: Method, size: int, top_k: int, num_steps: int, trace_probes: int) -> int:
    if method == "full":
        return size
    spent = num_steps if method == "lanczos" else min(top_k, size) * num_steps
    checks = {"lanczos": 1, "pyhessian": min(top_k, size)}.get(method, 0)
    return spent + trace_probes + checks


def _require_room(num_steps: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse a Lanczos basis that does not fit into the free memory."""
    needed, free = min(num_steps, size) * size * dtype.itemsize, free_bytes(device)
    if needed > free:
        raise CurvatureError(
            f"the Lanczos basis of {min(num_steps, size):,} steps over {size:,} parameters takes {needed / 1e9:,.1f} "
            f"GB and {free / 1e9:,.1f} GB are free. Lower num_steps, or use method='power_iteration' or fewer "
            "parameters."
        )


EIGENVALUE_CHANGE = 1e-6
"""PyHessian's eigenvalues stop at this relative change: the error of a value is the square of its vector's, 0.1 %."""


class _Margins(nn.Module):
    """(P, 4, L) stacked ids and masks of both sides -> (P,) margins / T: the one-input form that PyHessian calls."""

    def __init__(self, module: nn.Module, temperature: float) -> None:
        super().__init__()
        self.module, self.temperature = module, temperature

    def forward(self, stacked: Tensor) -> Tensor:
        """Reward of the chosen minus reward of the rejected side, over the temperature."""
        ids, mask = torch.cat([stacked[:, 0], stacked[:, 1]]), torch.cat([stacked[:, 2], stacked[:, 3]])
        chosen, rejected = self.module(input_ids=ids, attention_mask=mask).logits[:, 0].chunk(2)
        return (chosen - rejected) / self.temperature


class _Loader:
    """The micro-batches as (inputs, targets); PyHessian passes over it once a product."""

    def __init__(self, hessian: LossHessian, counter: ProductCounter) -> None:
        self.batches = [
            torch.stack([*r.input_ids.chunk(2), *r.attention_mask.chunk(2)], 1) for r in hessian.micro_batches
        ]
        self.counter = counter

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for stacked in self.batches:
            yield stacked, torch.ones(len(stacked))
        self.counter.add(1)


def _mean_loss(margins: Tensor, targets: Tensor) -> Tensor:
    return (targets * softplus(-margins)).mean()


def pyhessian_spectrum(
    hessian: LossHessian, counter: ProductCounter, *, top_k: int, max_iterations: int, num_probes: int, seed: int
) -> tuple[EigenvalueSet, float, float]:
    """Eigenvalues of largest magnitude, trace and its standard error, all by PyHessian: an independent cross-check.

    Three things of its version 0.1 are worked around: it overwrites `.grad`, its stopping rule for the trace ends after
    2 to 4 probes when the running trace is negative, and it gives no error bars, so each of its eigenvalues gets the
    residual that our own product finds (Yao et al. 2020, arXiv:1912.07145).

    Raises:
        ConfigError: PyHessian is not installed.
        CurvatureError: the model is not float32 (it draws float32 vectors).
    """
    require_extra("pyhessian", "curvature", "method='pyhessian' (others: lanczos, power_iteration, full)")
    from pyhessian import hessian as pyhessian

    if hessian.dtype != torch.float32:
        raise CurvatureError("PyHessian works in float32 only and this model is float64; use method='lanczos'.")
    gradients: list[tuple[Any, Any]] = [(p, p.grad) for p in hessian.module.parameters()]
    devices = [hessian.device] if hessian.device.type == "cuda" else []
    with measuring(hessian.module, hessian.parameters), torch.random.fork_rng(devices), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*create_graph=True.*")
        torch.manual_seed(seed)
        try:
            hessian.module.zero_grad()
            scaled = _Margins(hessian.module, hessian.temperature)
            tool = pyhessian(scaled, _mean_loss, dataloader=_Loader(hessian, counter), cuda=bool(devices))
            values, vectors = tool.eigenvalues(maxIter=max_iterations, tol=EIGENVALUE_CHANGE, top_n=top_k)
            samples = tool.trace(maxIter=num_probes, tol=-math.inf)  # no early stop: see above
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient
    product = counter.counting(hessian.product)
    found, residuals = [], []
    for value, parts in zip(values, vectors, strict=True):
        vector = torch.cat([part.detach().reshape(-1) for part in parts])
        found.append(vector / norm(vector))
        residuals.append(norm(product(found[-1]) - value * found[-1]))
    trace_error = float(np.std(samples, ddof=1) / math.sqrt(len(samples)))
    return EigenvalueSet.largest_first(values, residuals, found), float(np.mean(samples)), trace_error
