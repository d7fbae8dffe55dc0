"""How many tokens of a micro-batch fit into the memory of a device: counted before a step is run.

A twin of the model, whose tensors have shapes and no memory (torch's `FakeTensorMode`), computes a micro-batch forwards
and backwards and is updated, while `TensorPeak` counts the bytes that would be alive. So what is counted is what the
code does: its own attention, precision, adapters, recomputation and optimizer. On a CPU it is what `PeakMeter` measures
of the real step. Compiled layers are partitioned as the compiler does it, so what they keep for the backward pass is
counted; inside a layer all of its operations are counted, of which fused ones take less.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)

from rmcore.config.train import TrainConfig
from rmcore.core.errors import ConfigError, ModelError, RmcoreError
from rmcore.models.compiling import COMPILE_ERRORS, CompiledLayers
from rmcore.models.device import total_bytes
from rmcore.models.layers import can_recompute, recompute_layers
from rmcore.models.lora import hollow_model
from rmcore.models.packing.forward import FOREIGN_ERRORS, outputs_of
from rmcore.models.packing.layout import Packing, Rows, pack_sides, pad_rows
from rmcore.models.precision import float32_head, precision_context
from rmcore.training.optimizers import make_optimizer
from rmcore.training.profiling import TensorPeak
from rmcore.training.train_mode import HalfWeights, find_half_weights, switch_off_dropout, uses_half_weights

MAX_TOKEN_BUDGET = {"cpu": 8192, "cuda": 65536}
"""Beyond this a micro-batch no longer gets faster on the device, it only takes memory. A default, not a finding."""
ENOUGH_TOKENS = 4096
"""Tokens of a micro-batch from which activations are kept and not recomputed. Recomputing costs a third of the matrix
products, 2 FLOPs a weight and token; halving a micro-batch moves 18 bytes a weight once more (casts, gradients). At 640
TFLOP/s and 2.5 TB/s the two are level at 2,300 tokens, where matrices are filled badly already."""
USABLE_SHARE = {"cpu": 0.5, "cuda": 0.9}
"""Share of what weights and optimizer state leave that a micro-batch may take. The rest is for all others on a CPU; on
a GPU for its context, kernels' scratch memory and gaps between allocations."""
COUNTED_TOKENS = {"cpu": (1024, 4096), "cuda": (8192, 32768)}
"""Sizes of two micro-batches between which, and beyond which, bytes grow by the token, by device. They are of the size
of those that are chosen: in far smaller ones weights and gradients have the peak, and a token costs next to nothing."""
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


class StepCounter:
    """Counts steps of one model with one set of settings. Its twin is made, and its update counted, once.

    Args:
        model: the reward model's, whole or sharded, or on torch's meta device; it is only looked at.
        config: precision, optimizer, dropout, compilation.
        device: where it would be trained.
        world: processes over which weights and moments are sharded.
    """

    def __init__(self, model: nn.Module, config: TrainConfig, device: torch.device, world: int = 1) -> None:
        self._model, self._config, self._device, self._world = model, config, device, world
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._twin: Any = None
        self._compiled: CompiledLayers | None = None
        self._update = 0

    def memory(self, packing: Packing | None, *, max_seq_len: int, recomputed: float) -> StepMemory:
        """Count steps of two micro-batches each, of pairs whose sides have `max_seq_len` tokens and share no prompt.

        Raises:
            ModelError: see `step`.
        """
        counted = []
        num_pairs = 0
        for tokens in COUNTED_TOKENS[self._device.type]:
            num_pairs = max(num_pairs + 1, tokens // (2 * max_seq_len))
            rows = longest_pairs(num_pairs, max_seq_len, packing)
            counted.append(self.step(rows, recomputed=recomputed, accumulates=True))
        return StepMemory(*counted)

    def step(self, rows: Rows, *, recomputed: float, accumulates: bool) -> StepBytes:
        """Count one step.

        Args:
            rows: of one micro-batch; they are of no use afterwards.
            recomputed: share of the layers that recompute their activations.
            accumulates: whether gradients of an earlier micro-batch are there.

        Raises:
            ModelError: the forward pass looks at numbers, which the twin does not have, or does not run on it.
        """
        name = type(self._model).__name__
        try:
            with self._mode:
                if self._twin is None:
                    self._make_twin()
                return self._count(rows, recomputed, accumulates)
        except LOOKS_AT_NUMBERS as error:
            raise ModelError(f"the forward pass of {name} looks at numbers ({_reason(error)})") from error
        except (torch.OutOfMemoryError, RmcoreError):
            raise
        except (RuntimeError, TypeError, ValueError) as error:  # of code that is not ours, such as a tensor's address
            raise ModelError(f"{name} does not run on tensors without memory ({_reason(error)})") from error

    def _make_twin(self) -> None:
        config = self._config
        twin = _twin_of(self._model, config, self._device)
        self._optimizer = make_optimizer(twin, config)  # which may split the weights
        self._trained = [parameter for parameter in twin.parameters() if parameter.requires_grad]
        self._weights = _num_bytes([*twin.parameters(), *twin.buffers()])
        self._halves = self._finds_half_weights(twin)
        self._twin = twin

    def _count(self, rows: Rows, recomputed: float, accumulates: bool) -> StepBytes:
        recompute_layers(self._twin, recomputed)
        if self._config.compile and self._compiled is None:
            self._compile(rows)
        self._optimizer.zero_grad()
        half = self._half_weights()  # whose copies are to be made, and counted, in the step
        with TensorPeak() as computed:
            for parameter in self._trained if accumulates else []:
                parameter.grad = torch.empty_like(parameter)
            self._compute(rows, half)
        gradients = _num_bytes([parameter.grad for parameter in self._trained if parameter.grad is not None])
        self._update = self._update or self._count_update()
        copies = 0 if half is None else half.num_bytes  # which stay from step to step
        unperturbed = _num_bytes(self._trained) // self._world if self._optimizer.sharpness_aware else 0
        return StepBytes(
            num_tokens=rows.num_tokens,
            weights=self._weights // self._world,
            moments=self._optimizer.state_bytes // self._world,
            micro_batch=computed.num_bytes + unperturbed,
            update=(self._update + gradients) // self._world + copies,
        )

    def _compile(self, rows: Rows) -> None:
        """Compile the layers, which is not to be counted, in a first pass; plain ones, which take more, if it fails."""
        self._compiled = CompiledLayers(self._twin, backend=_as_partitioned)
        try:
            self._compute(rows, self._half_weights())
        except (*COMPILE_ERRORS, *FOREIGN_ERRORS) as error:
            print(
                f"note: the memory of compiled layers cannot be counted ({_reason(error)}); that of plain ones is, "
                "which take more.",
                file=sys.stderr,
            )
            self._compiled, self._config = None, self._config.model_copy(update={"compile": False})

    def _half_weights(self) -> HalfWeights | None:
        return HalfWeights(self._twin) if self._halves else None

    def _compute(self, rows: Rows, half: HalfWeights | None) -> None:
        with ExitStack() as stack:
            for part in (half, self._compiled):
                if part is not None:
                    stack.enter_context(part.active())
            if self._config.chosen_precision == "bf16":
                stack.enter_context(float32_head(self._twin))
            with precision_context(self._config.chosen_precision, self._device) if half is None else nullcontext():
                outputs = outputs_of(self._twin, rows.to(self._device))
            outputs.float().sum().backward()  # in here: recomputed layers are run again, with the same weights

    def _count_update(self) -> int:
        """Most bytes of temporaries."""
        before = self._optimizer.state_bytes  # split weights have theirs already
        with TensorPeak() as updated:
            torch.nn.utils.clip_grad_norm_(self._trained, self._config.clip)
            self._optimizer.keep_costliest_gradients()
            self._optimizer.step()
        return max(0, updated.num_bytes - (self._optimizer.state_bytes - before))

    def _finds_half_weights(self, twin: nn.Module) -> bool:
        if self._world > 1 or not uses_half_weights(self._config, self._device):
            return False
        try:
            find_half_weights(twin, self._device)
        except ModelError:  # of which the training tells
            return False
        return True


def longest_pairs(num_pairs: int, max_seq_len: int, packing: Packing | None) -> Rows:
    """Rows of pairs of which both sides have `max_seq_len` tokens, of which none are shared."""
    sides = [[1 + place % 2] * max_seq_len for place in range(2 * num_pairs)]
    if packing is None:
        return pad_rows(sides, pad_id=0)
    return pack_sides(sides, [[2 * pair, 2 * pair + 1] for pair in range(num_pairs)], packing)


def _reason(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _as_partitioned(graph: fx.GraphModule, inputs: list[Tensor]) -> Any:
    """Compile as training does, up to what is kept for the backward pass; operations are called one by one."""
    from torch._dynamo.backends.debugging import boxed_nop  # both take a second
    from torch._inductor.compile_fx import compile_fx

    # "Boxed": what is kept for the backward pass is freed after its last use there, as in compiled code.
    compiled: Any = lambda inner, given, **_: boxed_nop(inner, given)  # noqa: E731 - of no type that inductor names
    return compile_fx(graph, inputs, inner_compile=compiled)


def _twin_of(model: nn.Module, config: TrainConfig, device: torch.device) -> Any:
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
    return twin.train()


def _num_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def choose_memory(
    model: nn.Module,
    config: TrainConfig,
    packing: Packing | None,
    *,
    max_seq_len: int,
    device: torch.device,
    world: int = 1,
    total: int | None = None,
) -> tuple[int, float]:
    """Choose the token budget of training micro-batches, and which share of the layers is recomputed, where left out.

    Both from the memory that the device has, and not from what happens to be free: the cut decides how a step rounds
    and what dropout draws, and a busy machine must not train other weights under the same key. As few layers are
    recomputed as leave room for `ENOUGH_TOKENS`, or for a named budget; on a CPU a named one is taken to fit.

    Args:
        model: the reward model's, whole or sharded; it is only looked at.
        config: settings of the training.
        packing: how its rows are packed.
        max_seq_len: most tokens of a side.
        device: where it is trained.
        world: processes that share it.
        total: bytes of the device's memory; left out: those of `device`.

    Raises:
        ConfigError: not even one pair of two longest sides fits, in one process.
    """
    named, recomputes = config.token_budget, config.gradient_checkpointing
    if named is not None and (recomputes is not None or device.type == "cpu"):
        return named, float(bool(recomputes))
    total = total_bytes(device) if total is None else total
    least, most, usable = 2 * max_seq_len, MAX_TOKEN_BUDGET[device.type], USABLE_SHARE[device.type]
    enough = max(ENOUGH_TOKENS, least) if named is None else named
    counter = StepCounter(model, config, device, world)

    def count(share: float) -> StepMemory:
        return counter.memory(packing, max_seq_len=max_seq_len, recomputed=share)

    try:
        share = 1.0 if recomputes else 0.0
        memory = count(share)
        if recomputes is None and can_recompute(model) and memory.tokens(total, usable) < enough:
            share, memory = _fewest_recomputed(count, memory, enough, total, usable)
    except ModelError as reason:
        budget = named or least
        print(
            f"note: micro-batches of {budget} tokens, because the memory that one takes cannot be counted: {reason}; "
            "train.token_budget and train.gradient_checkpointing decide.",
            file=sys.stderr,
        )
        return budget, float(bool(recomputes))
    fitting = memory.tokens(total, usable)
    if named is not None:
        return named, share
    if fitting < least and world > 1:  # whole gradients and gathered weights are counted, of which a part is there
        print(
            f"note: micro-batches of {least} tokens, the fewest: with the whole model gathered on a process about "
            f"{fitting} fit. It is gathered layer by layer; set train.token_budget if memory is left.",
            file=sys.stderr,
        )
        return least, share
    if fitting < least:
        raise ConfigError(
            f"the memory of the device ({total / 2**30:.0f} GiB) holds micro-batches of about {fitting} tokens besides "
            f"weights and optimizer state, and one pair of 2 x {max_seq_len} tokens needs {least}; lower max_seq_len, "
            "use bf16, gradient_checkpointing or LoRA, or set a token_budget."
        )
    return min(most, fitting), share


def _fewest_recomputed(
    count: Callable[[float], StepMemory], kept: StepMemory, enough: int, total: int, usable: float
) -> tuple[float, StepMemory]:
    """The smallest share of layers to recompute that leaves room for `enough` tokens, all of them where none does.

    Bytes are about linear in the share, which is looked for between none, `kept`, and all.
    """
    every = count(1.0)
    more = kept.bytes_at(enough) - usable * (total - kept.larger.kept)
    share = more / max(1.0, kept.bytes_at(enough) - every.bytes_at(enough))
    if share < 1:
        some = count(share)
        if some.tokens(total, usable) >= enough:
            return share, some
    return 1.0, every
