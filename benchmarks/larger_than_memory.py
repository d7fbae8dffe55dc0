"""Memory and time of preparing and training on up to ten million pairs.

A synthetic file of plain pairs (JSON Lines, 550 bytes each, half of them a column that is kept and not trained on) is
prepared and trained on for a few steps, stage by stage,
each in a process of its own; its memory is read from the kernel as it runs. "Own" memory is what the process itself
holds (RssAnon). "Mapped" are pages of files that it has read (RssFile), which the kernel takes back when it needs them.

    python benchmarks/larger_than_memory.py --pairs 100000 1000000 --folder /somewhere/large
"""

import argparse
import json
import multiprocessing
import random
import time
from collections.abc import Callable
from pathlib import Path
from shutil import rmtree

from rmcore.config.data import DataConfig, GoldConfig
from rmcore.config.model import ModelConfig
from rmcore.config.pipeline import PipelineConfig
from rmcore.config.train import TrainConfig
from rmcore.core.progress import progress_bar
from rmcore.core.store import ArtifactRef
from rmcore.core.tracking import METRICS_FILE, JsonlTracker
from rmcore.data.gold.world import generate_pairs
from rmcore.stages import prepare, train
from rmcore.stages.order import stage_of

PAIRS_A_PROMPT = 2
STEPS = 10
HELD_OUT_SHARE = 0.001
"""For validation and for the test each: more would only take longer."""
LOOK_SECONDS = 0.2


def write_source(path: Path, num_pairs: int) -> None:
    """Write so many different pairs, of the gold world's words, drawn at random."""
    draw = random.Random(0)  # noqa: S311
    words = sorted(
        {word for pair in generate_pairs(GoldConfig(num_prompts=50), 0).pairs for word in pair.chosen.split()}
    )
    phrases = [" ".join(draw.choices(words, k=9)) for _ in range(5000)]
    with path.open("w") as file:
        for number in range(num_pairs):
            if number % PAIRS_A_PROMPT == 0:
                prompt = draw.choice(phrases)
            chosen, rejected, note = (" ".join(draw.choices(phrases, k=count)) for count in (2, 1, 5))
            row = {"prompt": prompt, "chosen": f"{number} {chosen}", "rejected": rejected, "annotators_note": note}
            file.write(json.dumps(row) + "\n")


def run_prepare(config: PipelineConfig, folder: Path) -> None:
    out = folder / "prepared"
    out.mkdir()
    with progress_bar("prepare") as report:
        prepare.run(stage_of("prepare", config), out, JsonlTracker(out / METRICS_FILE), report)


def run_train(config: PipelineConfig, folder: Path) -> None:
    out = folder / "trained"
    out.mkdir()
    with progress_bar("train") as report:
        prepared = ArtifactRef("prepare", "", str(folder / "prepared"), "")
        train.run(stage_of("train", config, {"prepare": prepared}), out, JsonlTracker(out / METRICS_FILE), report)


def watched(work: Callable[[PipelineConfig, Path], None], config: PipelineConfig, folder: Path) -> dict[str, float]:
    """Run it in a process of its own: seconds, and the most MiB of its own memory and of mapped files."""
    process = multiprocessing.get_context("spawn").Process(target=work, args=(config, folder))
    started = time.perf_counter()
    process.start()
    own = mapped = 0
    while process.is_alive():
        process.join(LOOK_SECONDS)
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
        except FileNotFoundError:
            break
        kib = {line.split(":")[0]: int(line.split()[1]) for line in status.splitlines() if line.startswith("Rss")}
        own, mapped = max(own, kib.get("RssAnon", 0)), max(mapped, kib.get("RssFile", 0))
    process.join()
    if process.exitcode:
        raise SystemExit(f"{work.__name__} ended with {process.exitcode}")
    return {"seconds": time.perf_counter() - started, "own_mib": own / 1024, "mapped_mib": mapped / 1024}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--folder", type=Path, required=True, help="where the files lie: 2.5 KB a pair")
    given = parser.parse_args()
    print("| pairs | file, GB | stage | seconds | pairs/s | own memory, MiB | mapped files, MiB |")
    print("| ---: | ---: | --- | ---: | ---: | ---: | ---: |")
    for num_pairs in given.pairs:
        folder = given.folder / f"{num_pairs}-pairs"
        folder.mkdir(parents=True)
        source = folder / "pairs.jsonl"
        write_source(source, num_pairs)
        size = source.stat().st_size / 1e9
        config = PipelineConfig(
            data=DataConfig(source=str(source), validation_fraction=HELD_OUT_SHARE, test_fraction=HELD_OUT_SHARE),
            model=ModelConfig(name="tiny", max_seq_len=256, use_chat_template=False),
            train=TrainConfig(steps=STEPS, pairs_per_step=8, eval_every=STEPS, token_budget=8192),
            device="cpu",
        )
        for name, work in (("prepare", run_prepare), (f"train, {STEPS} steps", run_train)):
            found = watched(work, config, folder)
            print(
                f"| {num_pairs:,} | {size:.2f} | {name} | {found['seconds']:.0f} | {num_pairs / found['seconds']:,.0f} "
                f"| {found['own_mib']:,.0f} | {found['mapped_mib']:,.0f} |",
                flush=True,
            )
        rmtree(folder)


if __name__ == "__main__":
    main()
