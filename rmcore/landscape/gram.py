"""The exact spectrum of the Gauss-Newton matrix, from a matrix of pairs instead of parameters.

The Gauss-Newton matrix of the mean Bradley-Terry loss is G = (1/n) J^T D J: J (n, N) holds the gradients of the margins
and D the weights sigmoid'(m / T) / T^2. It has N x N entries but rank at most n, and its non-zero eigenvalues are those
of the n x n matrix

    K = (1/n) D^1/2 J J^T D^1/2        (A A^T and A^T A have the same non-zero eigenvalues)

which is small enough to be solved exactly. J J^T is a sum over parameters, so each block of parameters has its own K,
whose eigenvalues are those of the block's diagonal block of G.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from rmcore.core.errors import DataError
from rmcore.core.progress import Report, silent
from rmcore.evaluation.verdicts.intervals import Component, TInterval
from rmcore.landscape.margin_gram import margin_gram
from rmcore.landscape.operators import LossGaussNewton, gauss_newton_weights
from rmcore.landscape.pair_rows import MicroBatch
from rmcore.landscape.parameters import ParameterSubset, parameter_blocks
from rmcore.landscape.sample import group_prompts

MAX_GROUPS = 50
"""Prompt groups of the jackknife: a standard error from G groups is itself known to 1 / sqrt(2 (G - 1)), here 10 %."""
ALPHA = 0.05

_ONE_PROMPT = "all pairs have one prompt, from which no error over prompts can be told; give pairs of more prompts."
_FLAT = "the Gauss-Newton matrix is zero: every margin is saturated or has no gradient in these parameters."
_FLAT_WITHOUT = "without one group of prompts the Gauss-Newton matrix is zero; give more pairs."


@dataclass(frozen=True)
class GaussNewtonSpectrum:
    """All non-zero eigenvalues of the Gauss-Newton matrix, in nats per squared unit of the parameters.

    It is not the Hessian: what the model's own curvature adds is left out (see `operators`). Standard errors and 95 %
    intervals are over prompts, for new pairs as these. A field that is undefined is None, and `reasons` says why.

    Attributes:
        eigenvalues: (n,) largest first; the other N - n are zero. Negative ones, which are rounding, are set to 0.
        rounding: how far below zero the smallest computed eigenvalue was: smaller ones are not told from 0.
        lambda_max: the largest, with its errors over prompts. Too high on average, as its vector was chosen on the same
            pairs.
        trace: their sum.
        effective_rank: (sum lambda)^2 / sum lambda^2: k for k equal ones. At most n, so it grows with the pairs as long
            as they span new directions, which its interval does not tell.
        num_pairs: n.
        num_prompts: distinct prompts.
        num_groups: groups of whole prompts that the jackknife deleted one by one.
        num_parameters: N.
        num_gradients: margin gradients computed; more than n where memory did not hold them together.
        temperature: T, which divides the margins.
        parameters: which parameters the matrix is over.
        blocks: {block: {"lambda_max", "trace", "num_parameters"}} of the diagonal block of each block of parameters;
            their traces add up to `trace`.
        reasons: name of each undefined field -> why.
    """

    eigenvalues: tuple[float, ...]
    rounding: float
    lambda_max: float
    lambda_max_standard_error: float | None
    lambda_max_ci_low: float | None
    lambda_max_ci_high: float | None
    trace: float
    trace_standard_error: float | None
    trace_ci_low: float | None
    trace_ci_high: float | None
    effective_rank: float | None
    effective_rank_standard_error: float | None
    effective_rank_ci_low: float | None
    effective_rank_ci_high: float | None
    num_pairs: int
    num_prompts: int
    num_groups: int
    num_parameters: int
    num_gradients: int
    temperature: float
    parameters: ParameterSubset
    blocks: dict[str, dict[str, float]]
    reasons: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready record: lists, numbers, strings and null."""
        return asdict(self) | {"eigenvalues": list(self.eigenvalues)}


def gauss_newton_spectrum(
    model: Any,
    micro_batches: Iterable[MicroBatch],
    *,
    prompts: Sequence[str],
    parameters: ParameterSubset = "all",
    temperature: float | None = None,
    memory_bytes: int | None = None,
    report: Report = silent,
) -> GaussNewtonSpectrum:
    """The whole spectrum of the Gauss-Newton matrix of the mean Bradley-Terry loss over n pairs.

    Args:
        model: see `operators.PairCurvature`; left as it was found.
        micro_batches: the pairs, n in all.
        prompts: (n,) prompt of each pair, in the order of the micro-batches.
        parameters: the coordinates; see `ParameterSubset`.
        temperature: T, logits; divides the margins. None: see `operators.PairCurvature`.
        memory_bytes: see `margin_gram`; None takes half of what is free.
        report: called after each margin gradient.

    Raises:
        DataError: not one prompt a pair, or see `operators.PairCurvature`.
        CurvatureError: margins or gradients are not finite, or the memory does not hold two gradients.
        ModelError, ConfigError: see `operators.PairCurvature`.

    Example:
        >>> spectrum = gauss_newton_spectrum(model, batches, prompts=prompts)  # doctest: +SKIP
        >>> spectrum.lambda_max, spectrum.effective_rank  # doctest: +SKIP
    """
    operator = LossGaussNewton(model, micro_batches, parameters=parameters, temperature=temperature)
    num_pairs = operator.num_pairs
    if len(prompts) != num_pairs:
        raise DataError(
            f"got {len(prompts)} prompts for {num_pairs} pairs: errors over prompts need the prompt of each pair. Pass "
            "one a pair, in the order of the micro-batches."
        )
    gram = margin_gram(operator, memory_bytes=memory_bytes, report=report)
    scale = (gauss_newton_weights(gram.margins, operator.temperature) / num_pairs).sqrt()
    members = parameter_blocks(operator.names)
    sizes = dict(zip(operator.names, operator.sizes, strict=True))
    matrix = torch.zeros((num_pairs, num_pairs), dtype=torch.float64)
    blocks = {}
    for name, products in gram.blocks.items():
        block = products * scale[:, None] * scale
        matrix += block
        blocks[name] = {
            "lambda_max": float(_eigenvalues(block)[0]),
            "trace": float(block.trace()),
            "num_parameters": sum(sizes[member] for member in members[name]),
        }
    lowest = float(torch.linalg.eigvalsh(matrix)[0])
    groups = group_prompts(prompts, MAX_GROUPS)
    estimates, reasons = jackknife(matrix, groups)
    return GaussNewtonSpectrum(
        eigenvalues=tuple(_eigenvalues(matrix).tolist()),
        rounding=max(0.0, -lowest),
        **estimates,
        num_pairs=num_pairs,
        num_prompts=len(set(prompts)),
        num_groups=len(groups),
        num_parameters=operator.num_parameters,
        num_gradients=gram.num_gradients,
        temperature=operator.temperature,
        parameters=parameters,
        blocks=blocks,
        reasons=reasons,
    )


def jackknife(matrix: Tensor, groups: Sequence[Sequence[int]]) -> tuple[dict[str, Any], dict[str, str]]:
    """lambda_max, trace and effective_rank of K with standard errors and 95 % t intervals over groups of prompts.

    Deleting a group removes its rows and columns and divides by the pairs that are left. With X_(g) the value without
    group g, the variance over G groups is (G - 1) / G sum_g (X_(g) - mean)^2 with G - 1 degrees of freedom (delete-a-
    group jackknife: Kott 2001, Journal of Official Statistics 17(4)).

    Args:
        matrix: K, (n, n) float64.
        groups: positions of the pairs of each group; together all n.

    Returns:
        `lambda_max`, `lambda_max_standard_error`, `lambda_max_ci_low`, `lambda_max_ci_high` and so on, None where
        undefined, and the reason by name for each None.
    """
    without = [_statistics(_without(matrix, group)) for group in groups] if len(groups) > 1 else []
    estimates: dict[str, Any] = {}
    reasons: dict[str, str] = {}
    for name, value in _statistics(matrix).items():
        errors = [f"{name}_{suffix}" for suffix in ("standard_error", "ci_low", "ci_high")]
        replicates = [statistics[name] for statistics in without]
        defined = [replicate for replicate in replicates if replicate is not None]
        estimates |= {name: value} | dict.fromkeys(errors)
        if value is None:
            reasons |= dict.fromkeys([name, *errors], _FLAT)
        elif not replicates:
            reasons |= dict.fromkeys(errors, _ONE_PROMPT)
        elif len(defined) < len(replicates):
            reasons |= dict.fromkeys(errors, _FLAT_WITHOUT)
        else:
            count, mean = len(defined), sum(defined) / len(defined)
            variance = (count - 1) / count * sum((replicate - mean) ** 2 for replicate in defined)
            bounds = TInterval(value, (Component(variance, count - 1),)).bounds(ALPHA)
            estimates |= dict(zip(errors, (math.sqrt(variance), *bounds), strict=True))
    return estimates, reasons


def _without(matrix: Tensor, group: Sequence[int]) -> Tensor:
    keep = torch.ones(len(matrix), dtype=torch.bool)
    keep[list(group)] = False
    return matrix[keep][:, keep] * (len(matrix) / int(keep.sum()))


def _statistics(matrix: Tensor) -> dict[str, float | None]:
    """Compute λmax, trace and effective rank of K, whose sum lambda^2 is the sum of its squared entries."""
    trace, squares = float(matrix.trace()), float(matrix.square().sum())
    return {
        "lambda_max": float(_eigenvalues(matrix)[0]),
        "trace": trace,
        "effective_rank": trace**2 / squares if squares > 0 else None,
    }


def _eigenvalues(matrix: Tensor) -> Tensor:
    """Largest first, not below 0."""
    return torch.linalg.eigvalsh(matrix).flip(0).clamp(min=0)
