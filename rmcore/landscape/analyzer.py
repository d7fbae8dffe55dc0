"""The analyzer: from a model and pairs to the record of its loss Hessian's spectrum."""

import math
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from rmcore.core.errors import ConfigError, CurvatureError
from rmcore.core.extras import require_extra
from rmcore.core.progress import Report, silent
from rmcore.landscape.eigensolvers import (
    EigenvalueSet,
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


EIGENVALUE_CHANGE = 1e-6
"""Its eigenvalues stop at this relative change: the error of a value is the square of its vector's, here 0.1 %."""


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
