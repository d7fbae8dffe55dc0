"""Each side of benchmarks/landscape.py: from weights and pairs to the vectors of the five largest eigenvalues.

All sides take the same loss and start vector (PyHessian draws its own), in evaluation mode and float32, with the
attention kernel that can be differentiated twice. What is their own: the product with the Hessian, and how eigenvalues
are found from products. Peers are imported where they run: none of them is needed for the other sides.
"""

import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import numpy as np
import torch
from landscape_subject import SEED, Subject, mean_loss
from torch import Tensor, nn
from torch.nn.functional import softplus

from rmcore.landscape.eigensolvers import LanczosFactorization, lanczos, lanczos_eigenvalues
from rmcore.landscape.operators import LossHessian
from rmcore.landscape.pair_rows import Rows, margins
from rmcore.landscape.parameters import measuring
from rmcore.landscape.vectors import dot, norm

TOP_K = 5
TOLERANCE = 0.01
"""Residual ||H v - theta v|| over |theta| that counts as reached."""
SEARCH_STEPS = 20
"""Lanczos steps of the search for the fewest that suffice; doubled until some do."""


def fewest_steps(subject: Subject) -> int:
    """Fewest Lanczos steps whose five largest Ritz values have residuals of at most 1 % by their formula.

    A run of m steps is the beginning of a longer one, so one run tells all.
    """
    operator, steps, enough = LossHessian(subject.rm, [subject.batch]), SEARCH_STEPS, []
    while not enough:
        with torch.no_grad():
            found = lanczos(operator.product, subject.start(operator.num_parameters), steps)
        enough = [m for m in range(TOP_K, len(found.diagonal) + 1) if _converged(found, m)]
        steps *= 2
    return enough[0]


def _converged(found: LanczosFactorization, steps: int) -> bool:
    off = found.off_diagonal[: steps - 1]
    values, vectors = np.linalg.eigh(np.diag(found.diagonal[:steps]) + np.diag(off, 1) + np.diag(off, -1))
    beta = found.off_diagonal[steps - 1] if steps <= len(found.off_diagonal) else found.last_beta
    top = np.argsort(-np.abs(values))[:TOP_K]
    return bool(np.all(np.abs(beta * vectors[-1, top]) <= TOLERANCE * np.abs(values[top])))


def judge(subject: Subject, vectors: Tensor) -> tuple[list[float], list[float]]:
    """Rayleigh quotient theta of each vector by our product, largest magnitude first, and its residual over |theta|."""
    operator = LossHessian(subject.rm, [subject.batch])
    found = []
    for vector in vectors.to(operator.dtype):
        unit = vector / norm(vector)
        image = operator.product(unit)
        value = dot(unit, image)
        found.append((value, norm(image - value * unit) / abs(value)))
    found.sort(key=lambda one: -abs(one[0]))
    return [value for value, _ in found], [residual for _, residual in found]


class LimitReachedError(Exception):
    """A side took longer than it may."""


class Products:
    """Counts and limits the products of one side."""

    def __init__(self, limit: float) -> None:
        self.deadline, self.count = time.perf_counter() + limit, 0

    def counted(self, product: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The same product, counted."""

        def call(vector: Any) -> Any:
            if time.perf_counter() > self.deadline:
                raise LimitReachedError
            self.count += 1
            return product(vector)

        return call


def lanczos_budgets(fewest: int) -> Iterator[int]:
    """The fewest steps by the formula, then one more at a time."""
    return count(fewest)


def rm_opt(subject: Subject, products: Products, steps: int) -> Tensor:
    """Lanczos with all residuals, which takes one product more."""
    operator = LossHessian(subject.rm, [subject.batch])
    product = products.counted(operator.product)
    with torch.no_grad():
        found = lanczos(product, subject.start(operator.num_parameters), steps)
        lanczos_eigenvalues(found, product)
        values, vectors = found.ritz()
        top = vectors[:, np.argsort(-np.abs(values))[:TOP_K]].T.copy()
        return torch.as_tensor(top, dtype=found.basis.dtype, device=found.basis.device) @ found.basis


def eigenthings(subject: Subject, products: Products, steps: int, method: str = "autograd") -> Tensor:
    """Its Lanczos on its operator."""
    from hessian_eigenthings import HessianOperator, LambdaOperator
    from hessian_eigenthings import lanczos as its_lanczos

    module = subject.rm.model
    with measuring(module, list(module.parameters())):
        data = [{"ids": subject.rows.input_ids, "mask": subject.rows.attention_mask}]
        operator = HessianOperator(
            module, data, lambda model, batch: mean_loss(model, Rows(batch["ids"], batch["mask"])), method=method
        )
        product = LambdaOperator(products.counted(operator.matvec), operator.size, operator.device, operator.dtype)
        return its_lanczos(product, k=TOP_K, max_iter=steps, reorthogonalize=True, seed=SEED).eigenvectors


def eigenthings_differences(subject: Subject, products: Products, steps: int) -> Tensor:
    """The same with differences of gradients for the product: two gradients each, and not exact."""
    return eigenthings(subject, products, steps, "finite_difference")


def share_budgets(_: int) -> Iterator[float]:
    """Largest residual of one vector at which the next is begun: errors of the first ones limit the later ones."""
    return iter((TOLERANCE, TOLERANCE / 2, TOLERANCE / 4, TOLERANCE / 8))


class _Margins(nn.Module):
    """(P, 4, L) ids and masks of both sides -> (P,) margins: the one-input form that two peers call."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, stacked: Tensor) -> Tensor:
        """Reward of the chosen minus reward of the rejected side."""
        rows = Rows(torch.cat([stacked[:, 0], stacked[:, 1]]), torch.cat([stacked[:, 2], stacked[:, 3]]))
        return margins(self.module, rows, stacked.device)


def _stacked(subject: Subject) -> tuple[Tensor, Tensor]:
    ids, mask = subject.rows
    stacked = torch.stack([*ids.chunk(2), *mask.chunk(2)], 1)
    return stacked, torch.ones(len(stacked), device=stacked.device)


def pyhessian_kept(subject: Subject, products: Products, share: float, *, keep: bool = True) -> Tensor:
    """Its power iteration on one batch, whose graph it keeps.

    Its own rule stops at a change of the value and needs a guess. Here it stops at the product whose vector has the
    residual asked for, so it spends the fewest products that it could.
    """
    from pyhessian import hessian as pyhessian

    its_product = sys.modules["pyhessian.hessian"].hessian_vector_product

    class Watched(pyhessian):
        """Counts, and knows the residual of the last vector."""

        residual = math.inf

        def dataloader_hv_product(self, v: list[Tensor]) -> tuple[float, list[Tensor]]:
            if keep:
                image = products.counted(lambda vector: its_product(self.gradsH, self.params, vector))(v)
                value = float(sum((a * b).sum() for a, b in zip(image, v, strict=True)))
            else:
                value, image = products.counted(super().dataloader_hv_product)(v)
            squares = sum(((a - value * b) ** 2).sum() for a, b in zip(image, v, strict=True))
            self.residual = float(squares) ** 0.5 / abs(value)
            return value, list(image)

    class Reached:
        """Greater than any change of the value once the residual is small: `change < tol` asks the right side."""

        def __gt__(self, change: float) -> bool:
            return tool.residual <= share

    module = subject.rm.model
    with measuring(module, list(module.parameters())), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*create_graph=True.*")
        torch.manual_seed(SEED)
        module.zero_grad()
        inputs = {"data": _stacked(subject)} if keep else {"dataloader": [_stacked(subject)]}
        tool = Watched(
            _Margins(module), lambda m, _: softplus(-m).mean(), **inputs, cuda=subject.rm.device.type != "cpu"
        )
        tool.full_dataset = True  # then every product passes through the method above
        _, vectors = tool.eigenvalues(maxIter=sys.maxsize, tol=Reached(), top_n=TOP_K)
        return torch.stack([torch.cat([part.detach().reshape(-1) for part in parts]) for parts in vectors])


def pyhessian_loader(subject: Subject, products: Products, share: float) -> Tensor:
    """The same on a loader, its way for more than one batch: it builds the graph anew for each product."""
    return pyhessian_kept(subject, products, share, keep=False)


def curvlinops(subject: Subject, products: Products, share: float) -> Tensor:
    """ARPACK (implicitly restarted Lanczos, 20 vectors) on its operator; it is told the residual to reach."""
    from curvlinops import HessianLinearOperator
    from scipy.sparse.linalg import LinearOperator, eigsh

    module = subject.rm.model
    parameters = list(module.parameters())
    with measuring(module, parameters):
        data = [_stacked(subject)]
        theirs = HessianLinearOperator(
            _Margins(module), nn.BCEWithLogitsLoss(), parameters, data, check_deterministic=False
        ).to_scipy(np.float32)
        counted = LinearOperator(theirs.shape, matvec=products.counted(theirs.matvec), dtype=np.float32)
        start = subject.start(theirs.shape[0]).cpu().numpy()
        _, vectors = eigsh(counted, k=TOP_K, which="LM", tol=share, v0=start)
    return torch.as_tensor(vectors.T.copy(), device=subject.rm.device)


Solver = Callable[[Subject, Products, Any], Tensor]
"""(subject, counter, budget) -> (K, N) vectors."""
SIDES: dict[str, tuple[Solver, Callable[[int], Iterator[Any]]]] = {
    "rm-opt": (rm_opt, lanczos_budgets),
    "hessian-eigenthings": (eigenthings, lanczos_budgets),
    "hessian-eigenthings, differences": (eigenthings_differences, lanczos_budgets),
    "PyHessian, one batch": (pyhessian_kept, share_budgets),
    "PyHessian, loader": (pyhessian_loader, share_budgets),
    "curvlinops, eigsh": (curvlinops, share_budgets),
}
