"""Where in the model the curvature sits: traces by block and by tensor, extremes by block.

The trace adds up over any cut of the parameters, so one set of products gives the share of every tensor. Extremes do
not add up: a block's extremes are those of its own diagonal block of the matrix, the curvature when it moves alone.
Those of the whole matrix lie further out (Cauchy's interlacing), by as much as the blocks act together.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rmcore.errors import ConfigError
from rmcore.landscape.eigensolvers import Floats, lanczos, lanczos_eigenvalues, probe_chunks
from rmcore.landscape.operators import PairCurvature
from rmcore.landscape.parameters import parameter_blocks
from rmcore.landscape.products import ProductCounter, Progress, basis_excess

EXTREMES = ("lambda_max", "lambda_max_residual", "lambda_min", "lambda_min_residual")


@dataclass(frozen=True)
class LayerCurvature:
    """Curvature of the parts of a model, in nats per squared unit of the parameters.

    Attributes:
        blocks: one record a block, in the order of the model: name, num_parameters, trace, trace_standard_error,
            lambda_max, lambda_max_residual, lambda_min, lambda_min_residual. The block's extremes are known up to the
            residuals, or None with a reason under the block's name.
        tensors: one record a parameter tensor, block by block: name, block, kind (its name within the
            block), num_parameters, trace, trace_standard_error.
        num_pairs: preference pairs the loss is averaged over.
        num_products: products spent, those of a block alone included.
        num_parameters: N, over all blocks.
        reasons: name of a block without extremes -> why.
    """

    blocks: tuple[dict[str, Any], ...]
    tensors: tuple[dict[str, Any], ...]
    num_pairs: int
    num_products: int
    num_parameters: int
    reasons: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready record: lists, numbers, strings and null."""
        return asdict(self) | {"blocks": list(self.blocks), "tensors": list(self.tensors)}


def layer_curvature(
    operator: PairCurvature, *, num_probes: int, num_steps: int, seed: int, progress: Progress | None = None
) -> LayerCurvature:
    """Trace of each tensor and block of `operator`, and the extremes of each block's diagonal block.

    Traces: Hutchinson's estimator by coordinates. For a vector z of independent signs, z_i (H z)_i is H_ii on average:
    its sum over a tensor estimates the tensor's trace without bias (Bekas, Kokiopoulou and Saad 2007,
    doi:10.1016/j.apnum.2007.01.003). All come from the same probes, so they add up to Hutchinson's total trace.

    Extremes: Lanczos on an operator of the same class over the block alone, whose graph does not reach below the block.
    A product with it costs between nothing (head) and that of the whole matrix (embeddings), on average about half.

    Args:
        operator: Hessian or Gauss-Newton matrix. It stays as it was, and so does its model.
        num_probes: products with the whole matrix, at least 2. Standard errors fall with the root.
        num_steps: products with each block, at least 2; one more measures rounding. A basis of num_steps vectors as
            long as the largest block is held.
        seed: of probes and start vectors.
        progress: called as progress(done, total) after each product; total is an upper bound until the last call.

    Raises:
        ConfigError: num_probes or num_steps is too small.
        CurvatureError: a product is not finite or the operator not symmetric.
    """
    for name, value in (("num_probes", num_probes), ("num_steps", num_steps)):
        if value < 2:
            raise ConfigError(f"{name}={value} is too small for a trace or an extreme with its error; use at least 2.")
    blocks = parameter_blocks(operator.names)
    size_of = dict(zip(operator.names, operator.sizes, strict=True))
    sizes = {block: sum(size_of[name] for name in members) for block, members in blocks.items()}
    counter = ProductCounter(num_probes + sum(min(num_steps, size) + 1 for size in sizes.values()), progress)
    generator = torch.Generator(operator.device).manual_seed(seed)
    reasons: dict[str, str] = {}
    # Only the product differentiates, and no dot product may be cast to bf16 by the caller's autocast.
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(operator.device.type, enabled=False):
        probes = _probe(operator, num_probes, generator, counter)
        extremes: dict[str, dict[str, float | None]] = {}
        for block, members in blocks.items():
            excess = basis_excess(num_steps, sizes[block], operator.dtype, operator.device)
            if not any(probes.touched[name] for name in members):
                extremes[block] = dict.fromkeys(EXTREMES, 0.0)
            elif excess is None:
                extremes[block] = _extremes(operator, members, num_steps, generator, counter)
            else:
                extremes[block] = dict.fromkeys(EXTREMES)
                reasons[block] = f"{excess} Lower num_steps."
    counter.finish()
    return LayerCurvature(
        blocks=tuple(
            {"name": block, "num_parameters": sizes[block]} | probes.trace(members) | extremes[block]
            for block, members in blocks.items()
        ),
        tensors=tuple(
            {"name": name, "block": block, "kind": name.removeprefix(f"{block}."), "num_parameters": size_of[name]}
            | probes.trace((name,))
            for block, members in blocks.items()
            for name in members
        ),
        num_pairs=operator.num_pairs,
        num_products=counter.done,
        num_parameters=operator.num_parameters,
        reasons=reasons,
    )


class Probes(NamedTuple):
    """What the probes say of each tensor, by its name.

    forms: (K,) the sum of z_i (H z)_i over the tensor, for each probe.
    touched: whether any entry of any H z is not 0 there. Where none is, the matrix is 0 in these rows.
    """

    forms: dict[str, Floats]
    touched: dict[str, bool]

    def trace(self, names: Sequence[str]) -> dict[str, float]:
        """Trace over these tensors together, and its standard error."""
        sums = np.sum([self.forms[name] for name in names], axis=0)
        return {"trace": float(sums.mean()), "trace_standard_error": float(sums.std(ddof=1) / math.sqrt(len(sums)))}


def _probe(operator: PairCurvature, num_probes: int, generator: torch.Generator, counter: ProductCounter) -> Probes:
    forms: list[Tensor] = []
    touched = torch.zeros(len(operator.names), dtype=torch.bool)
    products = counter.counting(operator.products)
    for signs in probe_chunks(operator.num_parameters, num_probes, generator, operator.dtype):
        parts = (signs * products(signs)).split(operator.sizes, dim=1)
        forms += torch.stack([part.sum(dim=1, dtype=torch.float64) for part in parts], dim=1).cpu()  # (chunk, T)
        touched |= torch.stack([part.any() for part in parts]).cpu()
    columns = torch.stack(forms, dim=1).numpy()  # (T, K)
    return Probes(
        dict(zip(operator.names, columns, strict=True)), dict(zip(operator.names, touched.tolist(), strict=True))
    )


def _extremes(
    operator: PairCurvature,
    members: tuple[str, ...],
    num_steps: int,
    generator: torch.Generator,
    counter: ProductCounter,
) -> dict[str, float | None]:
    """Ends of the diagonal block of these tensors. A function of its own, so that its graphs and basis are freed."""
    block = type(operator)(
        operator.module, operator.micro_batches, parameters=members, temperature=operator.temperature
    )
    product = counter.counting(block.product)
    start = torch.randn(block.num_parameters, generator=generator, device=block.device, dtype=block.dtype)
    found = lanczos_eigenvalues(lanczos(product, start, num_steps), product)
    ends = (found.values[0], found.residuals[0], found.values[-1], found.residuals[-1])
    return dict(zip(EXTREMES, map(float, ends), strict=True))
