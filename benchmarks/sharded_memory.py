"""Memory of each of two processes that share one model: to load it, and to write a resumable state.

    python benchmarks/sharded_memory.py

On CPUs with gloo. Either each process loads the whole model before it is sharded, and the first one gathers the state
and writes it, as it was done before; or each reads its slices from the files and writes its part. Memory is the most
that was resident while it was done, above what was before.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import torch
from transformers import AutoModelForSequenceClassification

from rmcore.config.model import ModelConfig
from rmcore.config.train import TrainConfig
from rmcore.core.saving import save_pretrained
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.models.tiny import resized, tiny_config, tiny_tokenizer
from rmcore.training.optimizers import make_optimizer, whole
from rmcore.training.ranks import Ranks
from rmcore.training.resume import publish_state
from rmcore.training.sharding import process_group, shard
from rmcore.training.state import collect_state
from rmcore.training.state_transfer import write_parts

PROCESSES = 2
WAYS = {"whole": "whole, gathered", "parts": "slices, parts"}
RESET_PEAK = "5"
"""Written to clear_refs it makes the peak of a process its present memory (Linux, proc(5))."""


def build(folder: Path, width: float, depth: float) -> int:
    """Write a model of random weights in float32; its bytes."""
    tokenizer = tiny_tokenizer()
    save_pretrained(tokenizer, folder)
    config = resized(tiny_config(tokenizer), width, depth)
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    save_pretrained(model, folder)
    return sum(parameter.nbytes for parameter in model.parameters())


@contextmanager
def peak(found: dict[str, float], name: str) -> Iterator[None]:
    """Note by how many MiB the resident memory of this process rose inside the block."""
    before = psutil.Process().memory_info().rss
    Path("/proc/self/clear_refs").write_text(RESET_PEAK)
    yield
    status = Path("/proc/self/status").read_text()
    [line] = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    found[name] = int(line.split()[1]) / 1024 - before / 2**20


def measure(way: str, model: str, folder: Path) -> None:
    """What one process of two needs; all of them call this."""
    found: dict[str, float] = {}
    device = torch.device("cpu")
    torch.set_num_threads(1)
    with process_group(device) as ranks:
        with peak(found, "load"):
            rm = BradleyTerryRM.new(ModelConfig(name=model), seed=0, device=device, defer=way == "parts")
            shard(rm, ranks)
        found["kept"] = sum(parameter.to_local().nbytes for parameter in rm.model.parameters()) / 2**20
        optimizer = make_optimizer(rm.model, TrainConfig())
        for parameter in rm.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        with peak(found, "state"):
            tensors = collect_state(rm.model, optimizer, [], np.zeros((0, 2), dtype=np.float32))
            write = write_whole if way == "whole" else write_parts
            bound = partial(write, tensors, folder, ranks=ranks)
            if ranks.is_main:
                publish_state(folder, 1, bound, {})
            else:
                bound(None)
            ranks.wait()
    (folder / f"rank{ranks.rank}.json").write_text(json.dumps(found))


def write_whole(tensors: dict[str, torch.Tensor], folder: Path, place: Path | None, ranks: Ranks) -> dict[str, str]:
    """Gather every tensor on the first process, which writes one file."""
    gathered = {name: whole(tensor, keep=ranks.is_main) for name, tensor in tensors.items()}
    if place is not None:
        torch.save(gathered, place / "state.pt")
    return {}


def main() -> None:
    """Measure both ways, and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=float, default=6.4, help="of the model, in times of `tiny`")
    parser.add_argument("--depth", type=float, default=2.0)
    parser.add_argument("--inside", nargs=3, metavar=("WAY", "MODEL", "FOLDER"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.inside:
        way, model, folder = asked.inside
        measure(way, model, Path(folder))
        return
    with tempfile.TemporaryDirectory() as place:
        model_bytes = build(Path(place) / "model", asked.width, asked.depth)
        print(f"model: {model_bytes / 2**20:.0f} MiB in float32, {PROCESSES} processes\n")
        print("| way | process | load, MiB | of it kept | write a state, MiB |\n| --- | ---: | ---: | ---: | ---: |")
        for way, said in WAYS.items():
            folder = Path(place) / way
            folder.mkdir()
            launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={PROCESSES}"]
            inside = ["--inside", way, str(Path(place) / "model"), str(folder)]
            subprocess.run([sys.executable, *launcher, __file__, *inside], check=True)
            for rank in range(PROCESSES):
                found = json.loads((folder / f"rank{rank}.json").read_text())
                print(f"| {said} | {rank} | {found['load']:.0f} | {found['kept']:.0f} | {found['state']:.0f} |")


if __name__ == "__main__":
    main()
