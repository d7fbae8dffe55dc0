"""What a training step takes while other programs use the cores, by how OpenMP's threads wait for one another.

    python benchmarks/busy_machine.py --others 0 2 --repeats 3

`rm-opt` sets OMP_WAIT_POLICY=PASSIVE where it is not set: threads that wait sleep. Here the demo's training runs under
either policy and on one thread, in turns, beside as many processes that only count.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STEPS = 20
WAYS = {"two, OpenMP's default": ("2", ""), "two, PASSIVE": ("2", "PASSIVE"), "one": ("1", "PASSIVE")}


def measure() -> None:
    """Print seconds of the wall and of the cores for `STEPS` steps of the demo's training, as JSON."""
    import torch

    from experiments.presets import PRESETS
    from rmcore.core.tracking import MemoryTracker
    from rmcore.data.gold.world import generate_pairs
    from rmcore.models.reward_model import BradleyTerryRM
    from rmcore.training.loop import Trainer

    demo = PRESETS["demo"]
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    rm = BradleyTerryRM.new(demo.model, seed=0, device=torch.device("cpu"))
    pairs = rm.renderer.tokenize_pairs(generate_pairs(demo.data.gold, seed=0).pairs[:600])
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            rm, demo.train, train=pairs, validation=[], folder=Path(folder), tracker=MemoryTracker(), seed=0
        )
        trainer.probe(3)
        wall, cpu = time.perf_counter(), time.process_time()
        trainer.probe(STEPS)
        print(json.dumps([time.perf_counter() - wall, time.process_time() - cpu]))


def count() -> None:
    """Use a core until ended."""
    while True:
        pass


def main() -> None:
    """Run every way in turns, and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--others", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--repeats", type=int, default=3)
    asked = parser.parse_args()
    print("| other programs | threads | wall s, median | of the cores s, median |\n| ---: | --- | ---: | ---: |")
    for others in asked.others:
        busy = [multiprocessing.Process(target=count, daemon=True) for _ in range(others)]
        for process in busy:
            process.start()
        found: dict[str, list[list[float]]] = {way: [] for way in WAYS}
        for _ in range(asked.repeats):
            for way, (threads, policy) in WAYS.items():
                environment = os.environ | {"OMP_NUM_THREADS": threads}
                environment.pop("OMP_WAIT_POLICY", None)
                environment |= {"OMP_WAIT_POLICY": policy} if policy else {}
                done = subprocess.run(
                    [sys.executable, __file__, "--measure"], env=environment, check=True, capture_output=True, text=True
                )
                found[way].append(json.loads(done.stdout.splitlines()[-1]))
        for process in busy:
            process.terminate()
        for way, times in found.items():
            wall, cpu = (statistics.median(column) for column in zip(*times, strict=True))
            print(f"| {others} | {way} | {wall:.1f} | {cpu:.1f} |", flush=True)


if __name__ == "__main__":
    measure() if sys.argv[1:] == ["--measure"] else main()
