"""Where the CPU time of a training step goes, with a model's own norms and rotations and with those in fewer passes.

    python benchmarks/step_shares.py

The steps of `train_throughput.py --sides packed` on one thread, both sides in turns in one process, each step once as
it is, whose CPU seconds are compared, and once with a clock around each operation of torch, for the shares. CPU seconds
of the thread, so that what else runs on the machine counts little.
"""

import argparse
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from throughput_sides import MODELS, SEED, Cell, machine, make_rm
from torch.utils._python_dispatch import TorchDispatchMode
from train_throughput import DEFAULTS, pairs_for

from rmcore.core.tracking import MemoryTracker
from rmcore.training.loop import Trainer
from rmcore.training.setup import make_context
from rmcore.training.step import Stepper
from rmcore.training.train_mode import training_form

CPU = torch.device("cpu")
PARTS = {
    "matrix products": ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv"),
    "attention kernel": (
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
    ),
    "multiplications": ("mul", "mul_", "addcmul", "addcmul_", "div", "div_", "pow", "square", "square_"),
    "additions": ("add", "add_", "sub"),
    "sums and norms": ("sum", "mean", "linalg_vector_norm", "rsqrt", "rsqrt_"),
    "silu, softmax": ("silu", "silu_backward", "gelu", "gelu_backward", "_softmax", "_softmax_backward_data"),
    "copies, concatenation": ("copy_", "_to_copy", "clone", "cat", "index_select", "neg"),
    "fills": ("fill_", "zeros", "zeros_like", "new_zeros", "zero_", "full", "ones_like"),
}


class Clock(TorchDispatchMode):
    """CPU seconds of this thread inside each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: dict[str, float] = defaultdict(float)
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        begun = time.thread_time()
        result = func(*args, **(kwargs or {}))
        self.seconds[func.overloadpacket.__name__] += time.thread_time() - begun
        self.calls += 1
        return result


@dataclass
class Side:
    """One training, the steps of which are repeated."""

    stepper: Stepper
    clock: Clock = field(default_factory=Clock)
    seconds: list[float] = field(default_factory=list)

    def step(self, number: int) -> None:
        """Run one step of the training as it is, and one under the clock."""
        batches = self.stepper.feed[number % len(self.stepper.feed)]
        begun = time.process_time()
        self.stepper.run(number + 1, *batches)
        self.seconds.append(time.process_time() - begun)
        with self.clock:
            self.stepper.run(number + 1, *batches)
        list(self.stepper.results())

    def shares(self) -> dict[str, float]:
        """Share of the CPU seconds of steps without the clock that the operations of each part took."""
        whole, seconds = sum(self.seconds), dict(self.clock.seconds)
        shares = {part: sum(seconds.pop(name, 0.0) for name in names) / whole for part, names in PARTS.items()}
        shares["other operations"] = sum(seconds.values()) / whole
        return shares | {"outside of operations": 1.0 - sum(shares.values())}


def main() -> None:
    """Measure in turns and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=DEFAULTS, default="hh")
    parser.add_argument("--model", choices=MODELS)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--turns", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, longest, batch = DEFAULTS[options.data]
    cell = Cell(options.data, options.model or model, "packed", 0, 6, longest, batch, options.precision, False, 1)
    pairs = pairs_for(cell)
    with ExitStack() as stack:
        sides: list[Side] = []
        for replaces in (False, True):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            trainer = Trainer(
                make_rm(cell, CPU),
                cell.settings,
                train=pairs,
                validation=[],
                folder=folder,
                tracker=MemoryTracker(),
                seed=SEED,
            )
            stack.enter_context(training_form(trainer.rm, trainer.config))
            context = make_context(trainer.rm, trainer.config, trainer.ranks)
            sides.append(Side(Stepper(context if replaces else replace(context, fewer=None), trainer.feed)))
        for turn in range(options.turns + 1):
            for side in sides if turn % 2 == 0 else sides[::-1]:
                side.step(turn)
            if turn == 0:  # which warms up
                for side in sides:
                    side.seconds, side.clock = [], Clock()
    ratios = sorted(own / fewer for own, fewer in zip(sides[0].seconds, sides[1].seconds, strict=True))
    quarter = len(ratios) // 4
    print(f"{machine(1)}; {cell.data}, {cell.model}, {cell.precision}, {options.turns} turns\n")
    print("| share of the step's CPU seconds, % | modules' own | in fewer passes |\n| --- | ---: | ---: |")
    shares = [side.shares() for side in sides]
    for name in shares[0]:
        print(f"| {name} | " + " | ".join(f"{100 * share[name]:.1f}" for share in shares) + " |")
    print("| operations a step | " + " | ".join(f"{side.clock.calls / options.turns:.0f}" for side in sides) + " |")
    print("| CPU seconds a step, median | " + " | ".join(f"{median(side.seconds):.3f}" for side in sides) + " |")
    print(
        f"\nTimes as fast, turn by turn: median {median(ratios):.3f}, middle half {ratios[quarter]:.3f} to "
        f"{ratios[-1 - quarter]:.3f}, all {ratios[0]:.3f} to {ratios[-1]:.3f}."
    )


if __name__ == "__main__":
    main()
