"""Where in the model the curvature sits: traces by block and by tensor, extremes by block.

The trace adds up over any cut of the parameters, so one set of products gives the share of every tensor. Extremes do
not add up: a block's extremes are those of its own diagonal block of the matrix, the curvature when it moves alone.
Those of the whole matrix lie further out (Cauchy's interlacing), by as much as the blocks act together.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from rmcore.core.errors import ConfigError
from rmcore.core.progress import Report, silent
from rmcore.landscape.eigensolvers import TraceSamples, lanczos, lanczos_eigenvalues
from rmcore.landscape.operators import PairCurvature
from rmcore.landscape.parameters import parameter_blocks
from rmcore.landscape.products import ProductCounter, basis_excess

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
        num_products: products spent on the extremes, each with a block alone.
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
    operator: PairCurvature, traces: TraceSamples, *, num_steps: int, seed: int, report: Report = silent
) -> LayerCurvature:
    """Trace of each tensor and block of `operator`, and the extremes of each block's diagonal block.

    Extremes: Lanczos on an operator of the same class over the block alone, whose graph does not reach below the block.
    A product with it costs between nothing (head) and that of the whole matrix (embeddings), on average about half.

    Args:
        operator: Hessian or Gauss-Newton matrix. It stays as it was, and so does its model.
        traces: of the whole matrix, by tensor: `eigensolvers.hutchinson` with `operator.sizes`.
        num_steps: products with each block, at least 2; one more measures rounding. A basis of num_steps vectors as
            long as the largest block is held.
        seed: of the start vectors.
        report: called after each product; total is an upper bound until the last call.

    Raises:
        ConfigError: num_steps is too small.
        CurvatureError: a product is not finite or the operator not symmetric.
    """
    if num_steps < 2:
        raise ConfigError(f"num_steps={num_steps} is too small for an extreme with its error; use at least 2.")
    blocks = parameter_blocks(operator.names)
    place = {name: index for index, name in enumerate(operator.names)}
    parts = {block: [place[name] for name in members] for block, members in blocks.items()}
    size_of = dict(zip(operator.names, operator.sizes, strict=True))
    sizes = {block: sum(size_of[name] for name in members) for block, members in blocks.items()}
    counter = ProductCounter(sum(min(num_steps, size) + 1 for size in sizes.values()), report)
    generator = torch.Generator(operator.device).manual_seed(seed)
    reasons: dict[str, str] = {}
    # Only the product differentiates, and no dot product may be cast to bf16 by the caller's autocast.
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(operator.device.type, enabled=False):
        extremes: dict[str, dict[str, float | None]] = {}
        for block, members in blocks.items():
            excess = basis_excess(num_steps, sizes[block], operator.dtype, operator.device)
            if not traces.touched[parts[block]].any():
                extremes[block] = dict.fromkeys(EXTREMES, 0.0)
            elif excess is None:
                extremes[block] = _extremes(operator, members, num_steps, generator, counter)
            else:
                extremes[block] = dict.fromkeys(EXTREMES)
                reasons[block] = f"{excess} Lower num_steps."
    counter.finish()
    return LayerCurvature(
        blocks=tuple(
            {"name": block, "num_parameters": sizes[block]} | _trace(traces, parts[block]) | extremes[block]
            for block in blocks
        ),
        tensors=tuple(
            {"name": name, "block": block, "kind": name.removeprefix(f"{block}."), "num_parameters": size_of[name]}
            | _trace(traces, [place[name]])
            for block, members in blocks.items()
            for name in members
        ),
        num_pairs=operator.num_pairs,
        num_products=counter.done,
        num_parameters=operator.num_parameters,
        reasons=reasons,
    )


def _trace(traces: TraceSamples, parts: Sequence[int]) -> dict[str, float]:
    trace, error = traces.trace(parts)
    return {"trace": trace, "trace_standard_error": error}


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
