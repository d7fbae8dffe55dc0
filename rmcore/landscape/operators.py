"""Products with the Hessian of the mean Bradley-Terry loss, without ever forming it.

A matrix over N parameters has N x N entries; a product with one vector costs a few gradients. Everything in this
package (extreme eigenvalues, trace) is built from such products.

With margins m_p = reward_chosen[p] - reward_rejected[p] and a temperature T (that of the training's loss unless given:
1 / beta), over n pairs:

    loss          L = (1/n) sum_p softplus(-m_p / T)
    Hessian       H = d2 L / d theta2
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import softplus

from rmcore.core.errors import ConfigError, CurvatureError, DataError
from rmcore.landscape.autograd import gradient_of, second_derivative_errors
from rmcore.landscape.pair_rows import MicroBatch, Rows, checked_rows, margins
from rmcore.landscape.parameters import (
    ParameterSubset,
    loss_temperature,
    measuring,
    reward_module,
    select_parameters,
)

LOSS_REPEAT_TOLERANCE = 1e-5  # two float32 passes over reordered pairs differ by rounding only, about 1e-7


class LossHessian:
    """H, a symmetric (N, N) matrix over n pairs, known by its products with vectors.

    By reverse over reverse (Pearlmutter 1994, Fast exact multiplication by the Hessian): differentiate <grad, v>. Sums
    run over the micro-batches and are divided once by n, so that the cut into micro-batches does not matter.
    The graph of a micro-batch is built once for all vectors of a call of `products`, and freed after it.

    Args:
        model: a torch module whose `model(input_ids=..., attention_mask=...).logits` is (R, 1), or an object with such
            a module as `.model`. Its modes, gradients and `requires_grad` flags are as before after every call.
        micro_batches: what the loss is averaged over; see `MicroBatch`.
        parameters: the coordinates of theta; see `ParameterSubset`.
        temperature: T, logits; the root mean square of the margins makes models with margins of any size comparable.
            None: 1 / `model.beta` where the model has one, as BradleyTerryRM does, else 1, which a bare torch module
            always gets: the curvature is then that of the loss it was trained with.

    Attributes:
        num_pairs: n.
        num_parameters: N, the length of every flat vector.
        names: parameter names in the order of a flat vector.

    Raises:
        DataError: no micro-batch, or one that is not made of pairs.
        ModelError, ConfigError, CurvatureError: see `reward_module` and `select_parameters`.
    """

    def __init__(
        self,
        model: Any,
        micro_batches: Iterable[MicroBatch],
        *,
        parameters: ParameterSubset = "all",
        temperature: float | None = None,
    ) -> None:
        self.module = reward_module(model)
        self.micro_batches = tuple(checked_rows(micro_batch) for micro_batch in micro_batches)
        if not self.micro_batches:
            raise DataError("there is no micro-batch: the loss of no pair has no curvature. Give at least one pair.")
        if temperature is None:
            temperature = loss_temperature(model)
        if not 0 < temperature < math.inf:
            raise ConfigError(f"temperature={temperature} divides the margins: give a positive number of logits.")
        self.num_pairs = sum(rows.num_pairs for rows in self.micro_batches)
        self.temperature = temperature
        self.subset = parameters
        selected = select_parameters(self.module, parameters)
        self.names = tuple(selected)
        self.parameters = tuple(selected.values())
        self.sizes = [p.numel() for p in self.parameters]
        self.num_parameters = sum(self.sizes)
        self.device = self.parameters[0].device
        self.dtype = torch.float64 if any(p.dtype == torch.float64 for p in self.parameters) else torch.float32

    @classmethod
    def from_loader(
        cls,
        model: Any,
        loader: Iterable[MicroBatch],
        *,
        parameters: ParameterSubset = "all",
    ) -> Self:
        """Read `loader` once into memory (token ids only) and check that loss and data repeat.

        A loader that can be read again is read again: one that draws other pairs each time would give curvature of an
        unknown sample. The loss must also repeat, or the model itself is random. Same idea as the check for
        determinism in curvlinops.

        Raises:
            CurvatureError: the loss is not finite, or the second pass over the data gives another one.
        """
        operator = cls(model, list(loader), parameters=parameters)
        again = operator.micro_batches if isinstance(loader, Iterator) else tuple(checked_rows(rows) for rows in loader)
        pairs_again = sum(rows.num_pairs for rows in again)
        first = operator.loss()
        second = operator._loss_sum(again) / pairs_again if pairs_again else float("nan")
        same_pairs = _pair_tokens(again) == _pair_tokens(operator.micro_batches)
        if not same_pairs or abs(first - second) > LOSS_REPEAT_TOLERANCE * max(abs(first), 1e-3):
            raise CurvatureError(
                f"two passes over the loader gave {operator.num_pairs} pairs with mean loss {first:.8g}, then "
                f"{pairs_again} pairs with {second:.8g}: the curvature of a loss that changes is not defined. Pass a "
                "list of micro-batches or a loader that repeats itself, and a model whose randomness is off in eval()."
            )
        return operator

    def margins(self) -> Tensor:
        """(n,) margins in logits, without temperature, in the order of the micro-batches."""
        with self._measuring(), torch.no_grad():
            return torch.cat([margins(self.module, rows, self.device) for rows in self.micro_batches])

    def _loss(self, rows: Rows) -> Tensor:
        return softplus(-margins(self.module, rows, self.device) / self.temperature).sum()

    def _loss_sum(self, micro_batches: Iterable[Rows]) -> float:
        with self._measuring(), torch.no_grad():
            return sum(float(self._loss(rows)) for rows in micro_batches)

    def loss(self) -> float:
        """Mean loss in nats a pair.

        Raises:
            CurvatureError: it is not finite.
        """
        loss = self._loss_sum(self.micro_batches) / self.num_pairs
        if not torch.isfinite(torch.tensor(loss)):
            raise CurvatureError(
                f"the mean loss over {self.num_pairs} pairs is {loss}: there is no curvature at these weights. "
                "Evaluate the checkpoint first; if its rewards are not finite, go back to an earlier one."
            )
        return loss

    def gradient(self) -> Tensor:
        """Gradient of the mean loss, (N,). Its norm says how far these weights are from a stationary point."""
        with self._measuring():
            total = torch.zeros(self.num_parameters, dtype=self.dtype, device=self.device)
            for rows in self.micro_batches:
                total += self._flat(gradient_of([self._loss(rows)], self.parameters))
        return total / self.num_pairs

    def product(self, vector: Tensor) -> Tensor:
        """The matrix times v.

        Args:
            vector: v, (N,), in the order of `names`.

        Returns:
            (N,), in `dtype`, on the model's device.

        Raises:
            CurvatureError: the product is not finite, or the model has an operation without a second derivative.
            ConfigError: the vector has another length.
        """
        return self.products(vector[None])[0]

    def products(self, vectors: Tensor) -> Tensor:
        """The matrix times each of K vectors, (K, N) -> (K, N): each graph is built once for all of them."""
        if vectors.ndim != 2 or vectors.shape[1] != self.num_parameters:
            raise ConfigError(
                f"got a vector {tuple(vectors.shape[1:])} for {self.num_parameters} parameters: "
                "pass a flat one of that length."
            )
        # The second backward, too, would follow the caller's autocast.
        with self._measuring(), second_derivative_errors():
            directions = [self._split(vector) for vector in vectors.to(self.device)]
            totals = torch.zeros((len(directions), self.num_parameters), dtype=self.dtype, device=self.device)
            for rows in self.micro_batches:
                gradient = gradient_of([self._loss(rows)], self.parameters, create_graph=True)
                # A parameter that the loss does not touch has a constant zero gradient, which has no graph.
                live = [index for index, g in enumerate(gradient) if g.requires_grad]
                for k, direction in enumerate(directions):
                    found = gradient_of(
                        [gradient[index] for index in live],
                        self.parameters,
                        weights=[direction[index] for index in live],
                        keep=k + 1 < len(directions),
                    )
                    totals[k] += self._flat(found)
                del gradient  # its graph is as large as two backward passes: free it before the next one is built
        if not bool(torch.isfinite(totals).all()):
            raise CurvatureError(
                f"a product over {self.num_pairs} pairs has NaN or infinite entries: weights or rewards are not finite "
                "or overflow. Evaluate the checkpoint first; go back to an earlier one, or use float64."
            )
        return totals / self.num_pairs

    def _measuring(self) -> AbstractContextManager[None]:
        return measuring(self.module, self.parameters)

    def _split(self, vector: Tensor) -> list[Tensor]:
        pieces = vector.split(self.sizes)
        return [piece.view_as(p).to(p.dtype) for piece, p in zip(pieces, self.parameters, strict=True)]

    def _flat(self, parts: Iterable[Tensor]) -> Tensor:
        return torch.cat([part.detach().reshape(-1).to(self.dtype) for part in parts])


def _pair_tokens(micro_batches: Iterable[Rows]) -> list[tuple[list[int], list[int]]]:
    """The pairs in an order of their own, to compare two passes by."""
    return sorted(pair for rows in micro_batches for pair in rows.pair_tokens())
