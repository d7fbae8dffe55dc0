"""The analyzer: from a model and pairs to the record of its loss Hessian's spectrum."""

from collections.abc import Iterable
from typing import Any, get_args

import torch
from torch import Tensor

from rmcore.core.errors import ConfigError, CurvatureError
from rmcore.core.progress import Report, silent
from rmcore.landscape.eigensolvers import (
    EigenvalueSet,
    ProductCounter,
    dense_eigenvalues,
    dense_matrix,
    hutchinson,
    lanczos,
    lanczos_eigenvalues,
    power_iteration,
)
from rmcore.landscape.operators import LossHessian, MicroBatch
from rmcore.landscape.parameters import ParameterSubset
from rmcore.landscape.pyhessian_check import pyhessian_spectrum
from rmcore.landscape.spectrum import HessianSpectrum, Method, spectrum_record
from rmcore.models.device import free_bytes

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
        parameters: ParameterSubset = "all",
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
            parameters: whose curvature; see `ParameterSubset`.
            seed: of the random vectors.
            report: called after each product; total is an upper bound until the last call.

        Raises:
            ConfigError: a setting is unknown or too small.
            CurvatureError: a product is not finite, the data change between passes, the model is narrower than float32
                or too large for `full`, or PyHessian is missing.
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
        excess = _basis_excess(num_steps, size, hessian.dtype, hessian.device)
        if excess is not None:
            raise CurvatureError(f"{excess} Lower num_steps, or use method='power_iteration' or fewer parameters.")
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


def _basis_excess(num_steps: int, size: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why a Lanczos basis does not fit into the free memory, or None where it does."""
    needed, free = min(num_steps, size) * size * dtype.itemsize, free_bytes(device)
    if needed <= free:
        return None
    return (
        f"the Lanczos basis of {min(num_steps, size):,} steps over {size:,} parameters takes {needed / 1e9:,.1f} GB "
        f"and {free / 1e9:,.1f} GB are free."
    )
