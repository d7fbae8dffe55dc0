"""For how long a training waits while a resumable state is saved, and what the saving costs in all.

The tensors are those of AdamW in float32 over a model of `--parameters`: weights and two moments, 12 bytes a parameter.
Both sides save them in turns, each to a state that is digested, synced and renamed:

- between steps: torch's distributed checkpoint, then a digest of the files, read again, as sharded trainings do;
- in a thread: the product's way in one process (`rmcore.training.saving`). The first one makes room for the copy. Until
  it is on disk, steps continue (matrix products on all threads), and what they take longer than before is counted.

    python benchmarks/saving.py --parameters 125 --rounds 5 --folder /somewhere
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageWriter

from rmcore.training.ranks import ALONE
from rmcore.training.resume import RESUME_FOLDER, new_state, tensor_digests
from rmcore.training.saving import StateSaver
from rmcore.training.state import number_files

LAYERS, EVERY_SECONDS, SIDE, ALONE_STEPS = 24, 300.0, 1024, 20


def make_state(millions: int) -> dict[str, Tensor]:
    """Random weights and moments of `millions` parameters, in matrices."""
    side = int((millions * 1e6 / LAYERS) ** 0.5)
    kinds = ("model.{}.weight", "optimizer.{}.weight.exp_avg", "optimizer.{}.weight.exp_avg_sq")
    return {kind.format(layer): torch.randn(side, side) for layer in range(LAYERS) for kind in kinds}


def save_between_steps(tensors: dict[str, Tensor], folder: Path, step: int) -> None:
    """Write and read again, while nothing else happens."""
    with new_state(folder, step, {}) as (place, digests):
        writer = HuggingFaceStorageWriter(str(place), number_files(tensors, 1), save_distributed=True)
        dcp.save(dict(tensors), storage_writer=writer, no_dist=True)
        digests.update(tensor_digests(place))


def train(until: Callable[[int], bool]) -> tuple[int, float]:
    """Number and seconds of steps that are done until `until(their number)` holds."""
    one, other, count, started = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE), 0, time.perf_counter()
    while not until(count):
        torch.mm(one, other)
        count += 1
    return count, time.perf_counter() - started


def main() -> None:
    """Measure both sides in turns, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=125, help="millions")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where states are written")
    given = parser.parse_args()
    tensors = make_state(given.parameters)
    size = sum(tensor.nbytes for tensor in tensors.values())
    between, waits, ends, slower = list[float](), list[float](), list[float](), list[float]()
    with tempfile.TemporaryDirectory(dir=given.folder) as place, StateSaver(Path(place, "b"), 0.0, ALONE) as saver:
        for step in range(1, given.rounds + 2):  # the first is not counted
            started = time.perf_counter()
            save_between_steps(tensors, Path(place, "a"), step)
            between.append(time.perf_counter() - started)
            alone, seconds = train(lambda count: count == ALONE_STEPS)
            started, last = time.perf_counter(), Path(place, "b", RESUME_FOLDER, f"step_{step}")
            saver.save(step, tensors, {}, [], last=False)
            waits.append(time.perf_counter() - started)
            count, taken = train(lambda _, last=last: last.exists())
            slower.append(taken - count * seconds / alone)
            ends.append(time.perf_counter() - started)
            saver.wait()
            for side in "ab":
                state = Path(place, side, RESUME_FOLDER, f"step_{step}")
                saved = {
                    name: tensor for file in state.glob("*.safetensors") for name, tensor in load_file(file).items()
                }
                assert saved.keys() == tensors.keys()
                assert all(torch.equal(saved[name], tensor) for name, tensor in tensors.items())
    print(f"{given.parameters} M parameters, {size / 1e9:.2f} GB, {torch.get_num_threads()} threads of torch, medians")
    print("| side | steps wait, s | GB/s | steps are slower by, s | of 300 s | on disk after, s | GB/s |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for name, waited, slowed, ended in (
        ("between steps", between[1:], [0.0], between[1:]),
        ("in a thread", waits[1:], slower[1:], ends[1:]),
        ("in a thread, first", waits[:1], slower[:1], ends[:1]),
    ):
        wait, slow, end = (statistics.median(seconds) for seconds in (waited, slowed, ended))
        rates = [f"{size / seconds / 1e9:.2f}" for seconds in (wait, end)]
        share = f"{100 * (wait + slow) / (EVERY_SECONDS + wait + slow):.2f} %"
        print(f"| {name} | {wait:.2f} | {rates[0]} | {slow:.2f} | {share} | {end:.2f} | {rates[1]} |")


if __name__ == "__main__":
    main()
