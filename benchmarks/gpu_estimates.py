"""What the targets on an H100 should come to, from FLOPs and bytes alone: estimates, none measured.

    python benchmarks/gpu_estimates.py

A step's seconds are a sum, as if nothing overlapped:

    step    = 64 F / e  +  3 T L b / m  +  40 N / m  +  18 W k / m
    scoring = (2 W + a) t / e  +  t L b / m  +  6 W t / (8192 m)        a row of t tokens

F FLOPs a pair and W weights of the layers' matrices as in `train_throughput.py`, a attention's FLOPs a token, T tokens
of a step of 64 pairs, L layers, N all weights, k micro-batches, e rate of matrix products, m 2.5 TB/s of device memory
(a plain copy reached 3.0 there). e is assumed: 540 TFLOP/s for matrices of width 896, 640 for 1536 (a product of width
8192 reached 798 there). b are bytes a token and layer that are moved forward by what is no matrix product, backward
twice as many: each operation of Hugging Face's Qwen2 under autocast reads its inputs and writes its output, 166 h +
10 f (width h, inner width f); compiled, each fused group once, 52 h + 6 f. 40 N: fused AdamW, clipping, gradients.
18 W: casts of the weights and adding up their gradients. TRL is counted alike, on its padded tokens in micro-batches of
8 pairs.
"""

import math
from dataclasses import dataclass

from gpu_throughput import HALF, LARGE, PAIRS_PER_STEP, TRL_BATCH, cell_of
from throughput_sides import QWEN_SHAPES, model_config
from train_throughput import PEAK_TFLOPS, Work, needed_work, num_matrix_weights, padded_work, pairs_for

MEMORY = 2.5e12
RATES = {HALF: 540e12, LARGE: 640e12}
BUDGETS = {HALF: 12_000, LARGE: 8_000}
"""About what `choose_token_budget` gives."""
SCORED = 8192


@dataclass(frozen=True)
class Shape:
    """One model's sizes."""

    name: str

    @property
    def weights(self) -> int:
        """W."""
        return num_matrix_weights(model_config(self.name))

    @property
    def all_weights(self) -> int:
        """N, norms left out."""
        vocabulary, width, *_ = QWEN_SHAPES[self.name]
        return self.weights + vocabulary * width

    def moved(self, *, compiled: bool) -> float:
        """L b / m: seconds of a token forward, beside its matrix products."""
        _, width, inner, layers, _, _ = QWEN_SHAPES[self.name]
        return layers * (52 * width + 6 * inner if compiled else 166 * width + 10 * inner) / MEMORY

    def step(self, work: Work, micro_batches: int, *, compiled: bool) -> float:
        """Seconds of one step."""
        seconds = work.flops(model_config(self.name)) / RATES[self.name]
        seconds += 3 * work.tokens * self.moved(compiled=compiled)
        return seconds + (40 * self.all_weights + 18 * self.weights * micro_batches) / MEMORY

    def scoring(self, work: Work, num_rows: int, *, compiled: bool) -> float:
        """Seconds of a row."""
        seconds = work.flops(model_config(self.name)) / 3 / RATES[self.name]
        seconds += work.tokens * (self.moved(compiled=compiled) + 6 * self.weights / SCORED / MEMORY)
        return seconds / num_rows


def main() -> None:
    """Print both tables."""
    print("| shape | lengths | TRL, pairs/s | packed | times TRL | MFU | compiled | times TRL | MFU |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    rows = []
    for model in (HALF, LARGE):
        for data in ("hh-like", "fixed"):
            shape, cell = Shape(model), cell_of((model, data, "packed", {}), smoke=False)
            pairs = pairs_for(cell)
            needed, padded = needed_work(pairs, causal=True), padded_work(pairs, TRL_BATCH, causal=True)
            count = len(pairs) // PAIRS_PER_STEP
            mean = Work(needed.tokens // count, needed.attended // count)
            trl = shape.step(
                Work(padded.tokens // count, padded.attended // count), PAIRS_PER_STEP // TRL_BATCH, compiled=False
            )
            cells = [f"{PAIRS_PER_STEP / trl:.0f}"]
            for compiled in (False, True):
                seconds = shape.step(mean, math.ceil(mean.tokens / BUDGETS[model]), compiled=compiled)
                mfu = mean.flops(model_config(model)) / seconds / (PEAK_TFLOPS * 1e12)
                cells += [f"{PAIRS_PER_STEP / seconds:.0f}", f"{trl / seconds:.1f}", f"{100 * mfu:.0f} %"]
            print(f"| {model} | {data} | {' | '.join(cells)} |")
            if data == "hh-like":
                speeds = [1 / shape.scoring(needed, 2 * len(pairs), compiled=compiled) for compiled in (False, True)]
                rows.append(f"| {model} | {speeds[0]:,.0f} | {speeds[1]:,.0f} |")
    print("\n| scoring in bf16, hh-like | packed, rows/s | with fused kernels |\n| --- | ---: | ---: |")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
