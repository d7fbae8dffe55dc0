"""The memory that one optimizer step takes, counted before it is run.

A twin of the model, whose tensors have shapes and no memory (torch's `FakeTensorMode`), computes a micro-batch forwards
and backwards and is updated, while `TensorPeak` counts the bytes that would be alive. So what is counted is what the
code does: its own attention, precision, adapters, recomputation and optimizer. On a CPU it is what `PeakMeter` measures
of the real step. Compiled layers keep less, and are counted as if they were not.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)

from rmcore.config.train import TrainConfig
from rmcore.core.errors import ModelError, RmcoreError
from rmcore.models.layers import recompute_layers
from rmcore.models.lora import hollow_model
from rmcore.models.packing.forward import outputs_of
from rmcore.models.packing.layout import Packing, pack_sides
from rmcore.models.packing.rows import Rows, pad_rows
from rmcore.models.precision import float32_head, precision_context
from rmcore.training.half_weights import HalfWeights, find_half_weights, uses_half_weights
from rmcore.training.optimizers import make_optimizer
from rmcore.training.peak_memory import TensorPeak
from rmcore.training.train_mode import switch_off_dropout

COUNTED_TOKENS = (512, 1536)
"""Sizes of two micro-batches between which, and beyond which, bytes grow by the token."""
LOOKS_AT_NUMBERS = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
"""Errors of a model whose shapes depend on numbers, as a router's of experts do."""


@dataclass(frozen=True, slots=True)
class StepBytes:
    """Bytes of one step on one process."""

    num_tokens: int
    """Computed in the micro-batch."""
    weights: int
    moments: int
    """Tensors that the optimizer keeps from step to step."""
    micro_batch: int
    """Most alive at once, forwards and backwards, besides weights and moments: gradients, activations, temporaries."""
    update: int
    """Most alive at once in the update, besides weights and moments: gradients, temporaries."""

    @property
    def kept(self) -> int:
        """Alive from step to step."""
        return self.weights + self.moments

    @property
    def peak(self) -> int:
        """Most alive at once."""
        return self.kept + max(self.micro_batch, self.update)


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes of a step as a function of the tokens of its largest micro-batch."""

    smaller: StepBytes
    larger: StepBytes

    @property
    def per_token(self) -> float:
        """Bytes that one more token takes."""
        more = self.larger.micro_batch - self.smaller.micro_batch
        return max(1.0, more / (self.larger.num_tokens - self.smaller.num_tokens))

    def bytes_at(self, num_tokens: int) -> float:
        """Bytes of a micro-batch of so many tokens, besides weights and moments."""
        return self.larger.micro_batch + (num_tokens - self.larger.num_tokens) * self.per_token

    def tokens(self, total: int, share: float) -> int:
        """Tokens of a micro-batch that takes `share` of what weights and moments leave of `total` bytes."""
        room = share * (total - self.larger.kept)
        if self.larger.update > room:
            return 0
        return max(0, int(self.larger.num_tokens + (room - self.larger.micro_batch) / self.per_token))


def count_memory(
    model: nn.Module,
    config: TrainConfig,
    packing: Packing | None,
    *,
    max_seq_len: int,
    recomputed: float,
    device: torch.device,
    world: int = 1,
) -> StepMemory:
    """Count steps of two micro-batches each, of pairs whose sides have `max_seq_len` tokens and share no prompt.

    Raises:
        ModelError: the forward pass looks at numbers, which the twin does not have.
    """
    counted = []
    num_pairs = 0
    for tokens in COUNTED_TOKENS:
        num_pairs = max(num_pairs + 1, tokens // (2 * max_seq_len))
        rows = longest_pairs(num_pairs, max_seq_len, packing)
        counted.append(
            count_step(model, config, rows, recomputed=recomputed, accumulates=True, device=device, world=world)
        )
    return StepMemory(*counted)


def longest_pairs(num_pairs: int, max_seq_len: int, packing: Packing | None) -> Rows:
    """Rows of pairs of which both sides have `max_seq_len` tokens, of which none are shared."""
    sides = [[1 + place % 2] * max_seq_len for place in range(2 * num_pairs)]
    if packing is None:
        return pad_rows(sides, pad_id=0)
    return pack_sides(sides, [[2 * pair, 2 * pair + 1] for pair in range(num_pairs)], packing)


def count_step(
    model: nn.Module,
    config: TrainConfig,
    rows: Rows,
    *,
    recomputed: float,
    accumulates: bool,
    device: torch.device,
    world: int = 1,
) -> StepBytes:
    """Count one step over `rows`.

    Args:
        model: the reward model's, whole or sharded, or on torch's meta device; it is only looked at.
        config: precision, optimizer, dropout.
        rows: of one micro-batch; they are of no use afterwards.
        recomputed: share of the layers that recompute their activations.
        accumulates: whether gradients of an earlier micro-batch are there.
        device: where it would be trained.
        world: processes over which weights and moments are sharded.

    Raises:
        ModelError: the forward pass looks at numbers, which the twin does not have, or does not run on it.
    """
    try:
        with ExitStack() as stack:
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            twin = stack.enter_context(_twin(model, config, device, recomputed=recomputed))
            trained = [parameter for parameter in twin.parameters() if parameter.requires_grad]
            optimizer = make_optimizer(twin, config)  # which may split the weights
            split = optimizer.state_bytes
            half = _half_weights(twin, config, device) if world == 1 else None
            with TensorPeak() as computed:
                for parameter in trained if accumulates else []:
                    parameter.grad = torch.empty_like(parameter)
                with nullcontext() if half is None else half.active():
                    with precision_context(config.chosen_precision, device) if half is None else nullcontext():
                        outputs = outputs_of(twin, rows.to(device))
                    outputs.float().sum().backward()
            with TensorPeak() as updated:
                torch.nn.utils.clip_grad_norm_(trained, config.clip)
                optimizer.step()
            moments = optimizer.state_bytes
            gradients = _num_bytes([parameter.grad for parameter in trained if parameter.grad is not None])
            copies = 0 if half is None else half.num_bytes  # which stay from step to step
            unperturbed = _num_bytes(trained) // world if optimizer.sharpness_aware else 0
            weights = _num_bytes([*twin.parameters(), *twin.buffers()])
    except LOOKS_AT_NUMBERS as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ModelError(f"the forward pass of {type(model).__name__} looks at numbers ({reason})") from error
    except (torch.OutOfMemoryError, RmcoreError):
        raise
    except (RuntimeError, TypeError, ValueError) as error:  # of code that is not ours, such as a tensor's address
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ModelError(f"{type(model).__name__} does not run on tensors without memory ({reason})") from error
    return StepBytes(
        num_tokens=rows.num_tokens,
        weights=weights // world,
        moments=moments // world,
        micro_batch=computed.num_bytes + unperturbed,
        update=(max(0, updated.num_bytes - (moments - split)) + gradients) // world + copies,
    )


def _half_weights(twin: nn.Module, config: TrainConfig, device: torch.device) -> HalfWeights | None:
    if not uses_half_weights(config, device):
        return None
    try:
        find_half_weights(twin, device)
    except ModelError:  # of which the training tells
        return None
    return HalfWeights(twin)  # whose copies are to be made, and counted, in the step


@contextmanager
def _twin(model: nn.Module, config: TrainConfig, device: torch.device, *, recomputed: float) -> Iterator[Any]:
    """A model like `model`, in its training form, with tensors of the mode that is active."""
    twin: Any = hollow_model(model)
    held = dict(model.named_parameters(remove_duplicate=False))
    made: dict[Tensor, Tensor] = {}  # a weight that is used in two places is one
    for place, module in twin.named_modules():
        for tensors in (module._parameters, module._buffers):
            for leaf, tensor in tensors.items():
                if tensor is not None and tensor not in made:
                    like = held.get(f"{place}.{leaf}".lstrip("."), tensor)
                    hollow = torch.empty(tensor.shape, dtype=like.dtype, device=device)
                    is_weight = isinstance(tensor, nn.Parameter)
                    made[tensor] = nn.Parameter(hollow, requires_grad=like.requires_grad) if is_weight else hollow
                if tensor is not None:
                    tensors[leaf] = made[tensor]
    if not config.dropout:
        switch_off_dropout(twin)
    if recomputed:
        recompute_layers(twin, recomputed)
    twin.train()
    with ExitStack() as stack:
        if config.chosen_precision == "bf16":
            stack.enter_context(float32_head(twin))
        yield twin


def _num_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
