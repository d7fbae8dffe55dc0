"""PyHessian (Yao et al. 2020, arXiv:1912.07145) run on the same loss, as an independent cross-check.

Not a dependency: it is used where it is installed. Three things of version 0.1 are worked around: it overwrites
`.grad`, its stopping rule for the trace ends after 2 to 4 probes when the running trace is negative, and it gives no
error bars, so each of its eigenvalues gets the residual that our own product finds.
"""

import math
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from rmcore.core.errors import CurvatureError
from rmcore.core.extras import require_extra
from rmcore.landscape.eigensolvers import EigenvalueSet, ProductCounter, norm
from rmcore.landscape.operators import LossHessian
from rmcore.landscape.parameters import measuring

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
    """Eigenvalues of largest magnitude, trace and its standard error, all by PyHessian.

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
