"""What a training step should take on an H100, from FLOPs and bytes alone: estimates, none measured.

    python benchmarks/gpu_estimates.py

A step's seconds are a sum, as if nothing overlapped:

    step    = F P / e  +  T L b / m  +  40 N / m  +  c W k / m
    scoring = (2 W + a) t / e  +  t L b' / m                          a row of t tokens, weights in bf16

F FLOPs a pair and W weights of the layers' matrices as in `train_throughput.py`, a attention's FLOPs a token, P pairs
and T tokens of a step, L layers, N all weights, k micro-batches of the size that the trainer counts that 79 GiB hold
(of 4,096 tokens at 8 B, whose float32 state they do not hold), e rate of matrix products, m bandwidth of device memory.
e is assumed: 540, 640 and 700 TFLOP/s for widths of 896, 1536 and 4096 (a product of width 8192 reached 797 on an H200,
of the same peak); so is m, 2.5 TB/s of an H100's 3.35.

b are the bytes a token and layer that all operations but matrix products and attention itself read and write, forward
and backward. They are counted, not assumed: one layer more of Hugging Face's Qwen2 is computed on tensors without
memory (`FakeTensorMode`), and each operation reads its inputs and writes its outputs. Fused, each group of operations
between two matrix products moves its inputs and outputs once: 20 h + 6 f forward (width h, inner width f, in bf16),
twice that backward; b' are the forward ones. 40 N: fused AdamW (28), the norm (4) and scaling (8) of gradients. c W:
with weights cast in each micro-batch 6 for the casts, 12 for gradients that are written, widened and added; with bf16
copies that are made once a step 10 for the gradients alone.
"""

import math
from collections.abc import Sequence
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
from rmcore.models.packing.layout import PackedRow, Packing, pack_sides
from rmcore.models.precision import precision_context
from rmcore.training.memory import MAX_TOKEN_BUDGET, USABLE_SHARE
from rmcore.training.step_memory import count_memory

MEMORY = 2.5e12
RATES = {HALF: 540e12, LARGE: 640e12, WIDE: 700e12}
LAYERS = {HALF: 24, LARGE: 28, WIDE: 32}
"""Of the whole models; the shape of the last has four."""
BUDGETS = {HALF: 65536, LARGE: 50000, WIDE: 16384}
"""Tokens of a micro-batch."""
H100_BYTES = 79 * 2**30
"""What torch finds of 80 GB."""
LONGEST = 512
"""Tokens of a side at most."""
VOCABULARY = {WIDE: 128256}
"""Of Llama 3.1 8B, where the shape has a smaller one."""
PARTS = ("matrix products", "element-wise", "AdamW and clipping", "casts and gradients")
ON_H200 = "as on the H200: keys and values repeated"
H200_OVER_H100 = 4.8 / 3.35
"""Bandwidth of device memory, from NVIDIA's data sheets."""
ELSEWHERE = ("aten.mm", "aten.addmm", "aten.bmm", "prim.", "aten.empty", "aten.new_empty")
"""Matrix products, and what moves nothing."""


class Bytes(TorchDispatchMode):
    """Counts what operations read and write; those that only make a view, or memory, do neither."""

    def __init__(self) -> None:
        super().__init__()
        self.moved = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        read = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        written = [one for one in tree_leaves(out) if isinstance(one, Tensor)]
        if str(func).startswith(ELSEWHERE) or not read:
            return out
        stored = {one.untyped_storage()._cdata for one in read}
        if not func._schema.is_mutable and any(one.untyped_storage()._cdata in stored for one in written):
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
def moved_bytes(size: str, *, grouped: bool, bf16_stream: bool) -> float:
    """b: bytes a token and layer, forward and backward."""
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
        slopes[layers] = (large - small) / (many - few)
    return float(slopes[2] - slopes[1])


def _counted(config: Any, row: PackedRow, bf16_stream: bool) -> int:
    """Bytes that one micro-batch moves."""
    cpu, dtype = torch.device("cpu"), torch.bfloat16 if bf16_stream else torch.float32
    with FakeTensorMode(allow_non_fake_inputs=True), patch.object(attention, "varlen_attn", free_attention):
        model = AutoModelForSequenceClassification.from_config(config, dtype=dtype)
        with Bytes() as counted:
            with precision_context("fp32" if bf16_stream else "bf16", cpu):
                rewards = rewards_of(model, row)
            rewards.float().sum().backward()
    return counted.moved


def free_attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
    """Call `FreeAttention` as the kernel is called."""
    out: Tensor = FreeAttention.apply(query, key, value)
    return out


FORMS = {
    "as on the H200: keys and values repeated": (False, False, False),
    "key heads as they are": (True, False, False),
    "and a bf16 stream": (True, True, False),
    "and fused": (True, True, True),
}
"""Whether the kernel takes the model's key heads, weights are bf16 copies, element-wise operations are fused."""


@cache
def token_budget(size: str) -> int:
    """Tokens of a micro-batch that the trainer chooses on an H100, by what it counts itself; 8 B does not fit."""
    if size == WIDE:
        return 4096
    with torch.device("meta"):
        config = model_config(size)
        model = AutoModelForSequenceClassification.from_config(config, attn_implementation=attention.ATTENTION)
    memory = count_memory(
        model,
        TrainConfig(precision="bf16"),
        Packing(causal=True, kernel="varlen"),
        max_seq_len=LONGEST,
        recomputed=0.0,
        device=torch.device("cpu"),  # where autocast to bf16 can be had without a GPU
    )
    return min(MAX_TOKEN_BUDGET["cuda"], memory.tokens(H100_BYTES, USABLE_SHARE["cuda"]))


def step(size: str, work: Work, form: tuple[bool, bool, bool], *, scale: float = 1.0) -> dict[str, float]:
    """Milliseconds of one step by what they go into; `scale`: bandwidth over an H100's."""
    grouped, bf16_stream, fused = form
    config = whole_config(size)
    _, width, inner, _, _, _ = QWEN_SHAPES[size]
    weights = num_matrix_weights(config)
    everything = weights + VOCABULARY.get(size, config.vocab_size) * width
    moved = 3 * (20 * width + 6 * inner) if fused else moved_bytes(size, grouped=grouped, bf16_stream=bf16_stream)
    micro_batches = math.ceil(work.tokens / token_budget(size))
    casts = 6 + 10 * micro_batches if bf16_stream else 18 * micro_batches
    memory = MEMORY * scale / 1000
    return {
        "matrix products": 1000 * work.flops(config) / RATES[size],
        "element-wise": work.tokens * config.num_hidden_layers * moved / memory,
        "AdamW and clipping": 40 * everything / memory,
        "casts and gradients": casts * weights / memory,
    }


def scored(size: str, pairs: Sequence[TokenizedPair], *, fused: bool) -> float:
    """Rows a second; forward moves a third of what both passes move."""
    work, config = needed_work(pairs, causal=True), whole_config(size)
    _, width, inner, _, _, _ = QWEN_SHAPES[size]
    moved = 20 * width + 6 * inner if fused else moved_bytes(size, grouped=True, bf16_stream=True) / 3
    seconds = work.flops(config) / 3 / RATES[size] + work.tokens * config.num_hidden_layers * moved / MEMORY
    return 2 * len(pairs) / seconds


def whole_config(size: str) -> Any:
    """The architecture with all of its layers."""
    config = model_config(size)
    config.num_hidden_layers, config.layer_types = LAYERS[size], ["full_attention"] * LAYERS[size]
    return config


def main() -> None:
    """Print the tables."""
    print("| shape | form | " + " | ".join(PARTS) + " | step, ms | pairs/s | MFU |\n| --- | --- |" + " ---: |" * 7)
    for size in RATES:
        pairs = pairs_for(cell_of(size, smoke=False, steps=7))
        total = needed_work(pairs, causal=True)
        work = Work(total.tokens // 7, total.attended // 7)
        ideal = 1000 * work.flops(whole_config(size)) / (PEAK_TFLOPS * 1e12)
        for name, form in FORMS.items():
            found = step(size, work, form)
            whole = sum(found.values())
            cells = [f"{found[part]:.1f}" for part in PARTS]
            rate, mfu = 1000 * PAIRS_PER_STEP / whole, 100 * ideal / whole
            print(f"| {size} | {name} | {' | '.join(cells)} | {whole:.0f} | {rate:.0f} | {mfu:.0f} % |")
        if size == WIDE:
            continue  # was not measured
        h200 = sum(step(size, work, FORMS[ON_H200], scale=H200_OVER_H100).values())
        print(f"| {size} | {ON_H200}, an H200 | | | | | {h200:.0f} | {1000 * PAIRS_PER_STEP / h200:.0f} | |")
    print("\n| scoring in bf16, rows/s | eager | fused |\n| --- | ---: | ---: |")
    for size in RATES:
        pairs = pairs_for(cell_of(size, smoke=False))
        print(f"| {size} | {' | '.join(f'{scored(size, pairs, fused=fused):,.0f}' for fused in (False, True))} |")


if __name__ == "__main__":
    main()
