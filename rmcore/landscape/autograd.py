"""Differentiating twice: one call for gradients, and what torch's refusals mean."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from rmcore.core.errors import CurvatureError

NO_SECOND_DERIVATIVE = ("double backward", "derivative for", "differentiate twice")  # parts of torch's messages


@contextmanager
def second_derivative_errors() -> Iterator[None]:
    """Turn torch's messages about a missing second derivative into one that says what to do."""
    try:
        yield
    except RuntimeError as error:
        message = str(error)
        if not any(known in message for known in NO_SECOND_DERIVATIVE):
            raise
        raise CurvatureError(
            f"the model has an operation without a second derivative ({message.splitlines()[0]}): Hessian products "
            'need one. Load it with attn_implementation="eager" or "sdpa", and without torch.compile.'
        ) from error


def gradient_of(
    outputs: Sequence[Tensor],
    parameters: Sequence[Tensor],
    *,
    weights: Sequence[Tensor] | None = None,
    create_graph: bool = False,
    keep: bool | None = None,
) -> tuple[Tensor, ...]:
    """Gradient of the (weighted) sum of `outputs`, one tensor a parameter, zeros where nothing depends on it."""
    if not any(output.requires_grad for output in outputs):
        return tuple(torch.zeros_like(parameter) for parameter in parameters)
    return torch.autograd.grad(
        list(outputs),
        list(parameters),
        grad_outputs=None if weights is None else list(weights),
        create_graph=create_graph,
        retain_graph=keep,
        allow_unused=True,
        materialize_grads=True,
    )
