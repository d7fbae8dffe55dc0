"""What a training step should take on an H100, from FLOPs and bytes alone: estimates, none measured.

    python benchmarks/gpu_estimates.py

A step's seconds are a sum, as if nothing overlapped:

    step    = F P / e  +  A / f  +  T L b / m  +  c N / m  +  (d W + g E) k / m  +  n k u
    scoring = 2 W t / e  +  A / 3 f  +  t L b' / m  +  n' u            rows of t tokens, weights in bf16

F FLOPs a pair of the W weights of the layers' matrices as in `train_throughput.py`, A those of attention, P pairs and T
tokens of a step, L layers, N all weights and E those of the embedding, k micro-batches of the size that the trainer
counts that 79 GiB hold (of 4,096 tokens at 8 B, whose float32 state they do not hold), m bandwidth of device memory.

- e is assumed: 540, 640 and 700 TFLOP/s for widths of 896, 1536 and 4096 (a product of width 8192 reached 797 on an
  H200, of the same peak); so is m, 2.5 TB/s of an H100's 3.35.
- A is what the kernel computes, which is more than needed: whole tiles of 128 queries and 128 keys, without those that
  the causal mask hides whole, once forwards and 2.5 times backwards. f is 346 TFLOP/s, 35 % of the peak, which
  FlashAttention-2, the kernel of torch's varlen attention, reaches on an H100 (Shah et al. 2024, arXiv:2407.08608).
- b are the bytes a token and layer that all operations but matrix products and attention itself read and write, forward
  and backward. They are counted, not assumed: one layer more of Hugging Face's Qwen2 is computed on tensors without
  memory (`FakeTensorMode`), and each operation reads its inputs and writes its outputs. Fused, each group of operations
  between two matrix products moves its inputs and outputs once: 20 h + 6 f forward (width h, inner width f, in bf16),
  twice that backward; b' are the forward ones.
- c: fused AdamW (28), the norm of the gradient (4) and scaling it (8; within the update 4).
- d: with weights cast in each micro-batch 6 for the casts, 12 for gradients that are written, widened and added; with
  bf16 copies that are made once a step 10 for the gradients alone. g: the embedding's gradient is filled with zeros and
  added to, in float32 (4, and 12 where there is another one before it).
- n kernels, those of a layer counted in the same way, fused 40; u, what the end of each leaves the card idle, is
  assumed to be 3 microseconds.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from gpu_training import HALF, LARGE, PAIRS_PER_STEP, WIDE, cell_of
from throughput_sides import QWEN_SHAPES, model_config
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from train_throughput import PEAK_TFLOPS, Work, needed_work, num_matrix_weights, pairs_for
from transformers import AutoModelForSequenceClassification

from rmcore.config.train import TrainConfig
from rmcore.data.rendering import TokenizedPair
from rmcore.models.packing import attention
from rmcore.models.packing.forward import rewards_of
from rmcore.models.packing.layout import PackedRow, Packing, pack_sides, spans_of
from rmcore.models.precision import precision_context
from rmcore.models.reward_model import SCORING_TOKEN_BUDGET
from rmcore.training import half_weights
from rmcore.training.memory import MAX_TOKEN_BUDGET, USABLE_SHARE
from rmcore.training.step_memory import COUNTED_TOKENS, StepCounter

MEMORY = 2.5e12
RATES = {HALF: 540e12, LARGE: 640e12, WIDE: 700e12}
LAYERS = {HALF: 24, LARGE: 28, WIDE: 32}
"""Of the whole models; the shape of the last has four."""
H100_BYTES = 79 * 2**30
"""What torch finds of 80 GB."""
LONGEST = 512
"""Tokens of a side at most."""
VOCABULARY = {WIDE: 128256}
"""Of Llama 3.1 8B, where the shape has a smaller one."""
PARTS = ("matrix products", "attention", "element-wise", "AdamW and clipping", "casts and gradients", "kernel ends")
ATTENTION_RATE, TILE = 346e12, 128
KERNEL_END, FUSED_KERNELS = 3e-6, 40
"""Seconds; kernels of a fused layer: 21 matrix products, 4 of attention, some 15 element-wise ones."""
ON_H200 = "as on the H200: keys and values repeated"
H200_OVER_H100 = 4.8 / 3.35
"""Bandwidth of device memory, from NVIDIA's data sheets."""
PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm")
NOTHING = ("prim.", "aten.empty", "aten.new_empty")
"""What moves nothing."""


class Bytes(TorchDispatchMode):
    """Counts what operations read and write; those that only make a view, or memory, do neither."""

    def __init__(self) -> None:
        super().__init__()
        self.moved = self.kernels = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        read = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        written = [one for one in tree_leaves(out) if isinstance(one, Tensor)]
        stored = {one.untyped_storage()._cdata for one in read}
        is_view = not func._schema.is_mutable and any(one.untyped_storage()._cdata in stored for one in written)
        if not read or is_view or str(func).startswith(NOTHING):
            return out
        self.kernels += 1
        if str(func).startswith(PRODUCTS):
            return out
        self.moved += sum(_size(one) for one in [*read, *written])
        return out


def _size(tensor: Tensor) -> int:
    """Bytes of a tensor in memory: an expanded one has fewer than elements."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


class FreeAttention(torch.autograd.Function):
    """Stands for the varlen kernel, whose own bytes are few: outputs and gradients of the right shapes."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Make an output."""
        ctx.save_for_backward(query, key, value)
        return torch.empty_like(query)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Make gradients."""
        return tuple(torch.empty_like(one) for one in ctx.saved_tensors)


@cache
def of_a_layer(size: str, *, grouped: bool, bf16_stream: bool) -> tuple[float, float]:
    """b: bytes a token and layer, forward and backward; and kernels a layer."""
    found = {}
    pairs = pairs_for(cell_of(size, smoke=False, pairs_per_step=8, steps=2))
    for layers in (1, 2):
        for count in (8, 16):
            sides = [list(side.ids) for pair in pairs[:count] for side in (pair.chosen, pair.rejected)]
            groups = [[2 * place, 2 * place + 1] for place in range(count)]
            row = pack_sides(sides, groups, Packing(causal=True, kernel="varlen", grouped=grouped))
            config = model_config(size)
            config.num_hidden_layers, config._attn_implementation = layers, attention.ATTENTION
            found[layers, count] = _counted(config, row, bf16_stream), row.num_tokens
    slopes = {}
    for layers in (1, 2):
        (small, few), (large, many) = found[layers, 8], found[layers, 16]
        slopes[layers] = (large.moved - small.moved) / (many - few)
    return float(slopes[2] - slopes[1]), found[2, 8][0].kernels - found[1, 8][0].kernels


def _counted(config: Any, row: PackedRow, bf16_stream: bool) -> Bytes:
    """What one micro-batch moves."""
    cpu, dtype = torch.device("cpu"), torch.bfloat16 if bf16_stream else torch.float32
    with FakeTensorMode(allow_non_fake_inputs=True), patch.object(attention, "varlen_attn", free_attention):
        model = AutoModelForSequenceClassification.from_config(config, dtype=dtype)
        with Bytes() as counted:
            with precision_context("fp32" if bf16_stream else "bf16", cpu):
                rewards = rewards_of(model, row)
            rewards.float().sum().backward()
    return counted


def free_attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
    """Call `FreeAttention` as the kernel is called."""
    out: Tensor = FreeAttention.apply(query, key, value)
    return out


@dataclass(frozen=True)
class Form:
    """How a step is computed."""

    grouped: bool = True
    """The kernel of attention takes the model's key heads."""
    bf16_stream: bool = True
    """Weights are bf16 copies."""
    fused: bool = False
    """Element-wise operations are fused."""
    clips_within: bool = False
    """Gradients are clipped within the update."""


FORMS = {
    ON_H200: Form(grouped=False, bf16_stream=False),
    "key heads as they are": Form(bf16_stream=False),
    "and a bf16 stream": Form(),
    "and fused": Form(fused=True),
    "and clipping in the update": Form(fused=True, clips_within=True),
}


@cache
def token_budget(size: str, form: Form) -> int:
    """Tokens of a micro-batch that the trainer chooses on an H100, by what it counts itself; 8 B does not fit."""
    if size == WIDE:
        return 4096
    with torch.device("meta"):
        config = model_config(size)
        model = AutoModelForSequenceClassification.from_config(config, attn_implementation=attention.ATTENTION)
    settings = TrainConfig(precision="bf16", compile=form.fused)
    # The kernel and sizes of a GPU on a CPU, where autocast to bf16 can be had without a GPU.
    halves, counted = {"cpu": form.bf16_stream}, {"cpu": COUNTED_TOKENS["cuda"]}
    with patch.dict(half_weights.HALF_BY_DEFAULT, halves), patch.dict(COUNTED_TOKENS, counted):
        packing = Packing(causal=True, kernel="varlen", grouped=form.grouped)
        counter = StepCounter(model, settings, torch.device("cpu"))
        memory = counter.memory(packing, max_seq_len=LONGEST, recomputed=0.0)
    return min(MAX_TOKEN_BUDGET["cuda"], memory.tokens(H100_BYTES, USABLE_SHARE["cuda"]))


def tiled(pairs: Sequence[TokenizedPair]) -> int:
    """Pairs of a query and a key that the kernel computes: whole tiles, but for those that no query sees."""
    sides = [list(side.ids) for pair in pairs for side in (pair.chosen, pair.rejected)]
    groups = [[2 * place, 2 * place + 1] for place in range(len(pairs))]
    area = 0
    for span in spans_of(pack_sides(sides, groups, Packing(causal=True, kernel="varlen")).plan.groups):
        for start in range(0, span.length, TILE):
            seen = span.prefix + min(start + TILE, span.length)
            area += TILE * TILE * math.ceil(seen / TILE)
    return area


def step(size: str, work: Work, tiles: int, form: Form, *, scale: float = 1.0) -> dict[str, float]:
    """Milliseconds of one step by what they go into; `scale`: bandwidth over an H100's."""
    config = whole_config(size)
    _, width, inner, _, _, _ = QWEN_SHAPES[size]
    layers, weights = config.num_hidden_layers, num_matrix_weights(config)
    embedding = VOCABULARY.get(size, config.vocab_size) * width
    moved, kernels = of_a_layer(size, grouped=form.grouped, bf16_stream=form.bf16_stream)
    if form.fused:
        moved, kernels = 3 * (20 * width + 6 * inner), FUSED_KERNELS
    micro_batches = math.ceil(work.tokens / token_budget(size, form))
    casts = 6 + 10 * micro_batches if form.bf16_stream else 18 * micro_batches
    memory = MEMORY * scale / 1000
    return {
        "matrix products": 6000 * weights * work.tokens / RATES[size],
        "attention": 1000 * layers * _attention(width, tiles) * 3.5 / ATTENTION_RATE,
        "element-wise": work.tokens * layers * moved / memory,
        "AdamW and clipping": (36 if form.clips_within else 40) * (weights + embedding) / memory,
        "casts and gradients": (casts * weights + (16 * micro_batches - 12) * embedding) / memory,
        "kernel ends": 1000 * micro_batches * layers * kernels * KERNEL_END,
    }


def _attention(width: int, tiles: int) -> float:
    """FLOPs of a layer's forward pass: of each query and key the product of both, and with the value."""
    return 4.0 * width * tiles


def scored(size: str, pairs: Sequence[TokenizedPair], *, fused: bool) -> float:
    """Rows a second; forward moves a third of what both passes move."""
    work, config = needed_work(pairs, causal=True), whole_config(size)
    _, width, inner, _, _, _ = QWEN_SHAPES[size]
    moved, kernels = (one / 3 for one in of_a_layer(size, grouped=True, bf16_stream=True))
    if fused:
        moved, kernels = 20 * width + 6 * inner, FUSED_KERNELS / 3
    layers = config.num_hidden_layers
    seconds = 2 * num_matrix_weights(config) * work.tokens / RATES[size]
    seconds += layers * (_attention(width, tiled(pairs)) / ATTENTION_RATE + work.tokens * moved / MEMORY)
    seconds += math.ceil(work.tokens / SCORING_TOKEN_BUDGET["cuda"]) * layers * kernels * KERNEL_END
    return 2 * len(pairs) / seconds


def whole_config(size: str) -> Any:
    """The architecture with all of its layers."""
    config = model_config(size)
    config.num_hidden_layers, config.layer_types = LAYERS[size], ["full_attention"] * LAYERS[size]
    return config


def main() -> None:
    """Print the tables."""
    print("| shape | form | " + " | ".join(PARTS) + " | step, ms | pairs/s | MFU | on an H200: pairs/s | MFU |")
    print("| --- | --- |" + " ---: |" * (len(PARTS) + 5))
    for size in RATES:
        pairs = pairs_for(cell_of(size, smoke=False, steps=7))
        total, tiles = needed_work(pairs, causal=True), tiled(pairs)
        work = Work(total.tokens // 7, total.attended // 7)
        needed = 1000 * work.flops(whole_config(size)) / (PEAK_TFLOPS * 1e12)
        for name, form in FORMS.items():
            cells = []
            for scale in (1.0, H200_OVER_H100):
                found = step(size, work, tiles // 7, form, scale=scale)
                whole = sum(found.values())
                if scale == 1.0:
                    cells += [*(f"{found[part]:.1f}" for part in PARTS), f"{whole:.0f}"]
                cells += [f"{1000 * PAIRS_PER_STEP / whole:.0f}", f"{100 * needed / whole:.0f} %"]
            print(f"| {size} | {name} | {' | '.join(cells)} |", flush=True)
        print(f"{size}: {tiles / total.attended:.2f} times the needed area of attention", file=sys.stderr)
    print("\n| scoring in bf16, rows/s | eager | fused |\n| --- | ---: | ---: |")
    for size in RATES:
        pairs = pairs_for(cell_of(size, smoke=False))
        print(f"| {size} | {' | '.join(f'{scored(size, pairs, fused=fused):,.0f}' for fused in (False, True))} |")


if __name__ == "__main__":
    main()
