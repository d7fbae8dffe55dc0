"""The whole job, from the command to a saved model, without its training steps: `rm-opt train` and TRL's RewardTrainer.

    PYTHONPATH=<where TRL is> python benchmarks/whole_job.py --data $RM_OPT_DATA --repeats 3

Both sides start from the same folder (the 6.5 M Qwen2 shape with random weights), read the first --limit pairs of
HH-RLHF's harmless-base test file themselves, train --steps steps of 16 pairs in float32 with AdamW and write the model.
TRL: `load_dataset`, `RewardTrainer`, `train`, `save_model`, as its documentation has it, no checkpoint on the way.
Here: `rm-opt train` as it comes, which also tries whether packing is exact, describes the rewards of up to 500 of the
pairs trained on, draws the curves and writes `best/` and the last step. The sides take turns.

CPU seconds of user and system of the whole process with --threads threads, which say more than the clock where other
programs run too. A step is its forward and backward passes and the update.
"""

import argparse
import gzip
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

FILE = "hh_harmless_base_test.jsonl.gz"
SIDES = ("rm-opt", "TRL")
MAX_SEQ_LEN = 500
PAIRS_PER_STEP = 16


class Clock:
    """CPU seconds of this process by phase; one phase inside another counts for itself alone."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._open: list[str] = []
        self._since = 0.0  # so that the first phase has the start of Python, too

    def _turn(self) -> None:
        used = os.times()
        now = used.user + used.system
        self.seconds[self._open[-1] if self._open else "other"] += now - self._since
        self._since = now

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what is done inside as `name`."""
        if self._open or self.seconds:
            self._turn()
        self._open.append(name)
        try:
            yield
        finally:
            self._turn()
            self._open.pop()

    def watch(self, owner: Any, name: str, phase: str) -> None:
        """Count each call of a function or method of `owner` as a phase."""
        inner: Callable[..., Any] = getattr(owner, name)

        def timed(*given: Any, **named: Any) -> Any:
            with self.phase(phase):
                return inner(*given, **named)

        setattr(owner, name, timed)


def train_here(clock: Clock, words: list[str]) -> None:
    """Run `rm-opt train` in this process."""
    with clock.phase("imports"):
        from transformers import Qwen2ForSequenceClassification  # noqa: F401 - as the model does

        from flows.cli import main
        from rmcore.cli import train as command
        from rmcore.stages import train as stage
        from rmcore.training import loop, material
    clock.watch(command, "_load", "reading")
    clock.watch(material, "write_tokenized", "tokenization")
    clock.watch(stage.BradleyTerryRM, "new", "model")
    clock.watch(loop, "choose_packing", "trial of packing")
    clock.watch(loop.Trainer, "_step", "steps")
    clock.watch(loop.Trainer, "_score", "rewards of training pairs")
    clock.watch(loop.CheckpointWriter, "finished", "writing the model")
    clock.watch(stage, "_write_outcome", "curves and tables")
    sys.argv = ["rm-opt", "train", *words]
    try:
        main()
    except SystemExit as ended:
        if ended.code:
            raise


def train_there(clock: Clock, model: str, data: str, out: str, steps: int) -> None:
    """Train with TRL in this process."""
    with clock.phase("imports"):
        from datasets import disable_caching, load_dataset
        from transformers import TrainerCallback
        from trl import RewardConfig, RewardTrainer
    disable_caching()

    class Watching(TrainerCallback):
        """Counts the steps for themselves."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.step = clock.phase("steps")
            self.step.__enter__()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.step.__exit__(None, None, None)

    with clock.phase("reading"):
        pairs = load_dataset("json", data_files=data, split="train")
    arguments = RewardConfig(
        output_dir=out,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=PAIRS_PER_STEP // 8,
        max_steps=steps,
        max_length=MAX_SEQ_LEN,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    clock.watch(RewardTrainer, "_prepare_dataset", "tokenization")
    with clock.phase("model"):
        trainer = RewardTrainer(model=model, args=arguments, train_dataset=pairs, callbacks=[Watching()])
    trainer.train()
    with clock.phase("writing the model"):
        trainer.save_model(str(Path(out) / "best"))


def run_side(given: argparse.Namespace) -> None:
    """Run one side in this process and write down what its phases took."""
    clock = Clock()
    folder = Path(given.folder)
    model, data, out = (str(folder / name) for name in ("model", "pairs.jsonl", f"out-{given.side}"))
    if given.side == "TRL":
        train_there(clock, model, data, out, given.steps)
    else:
        words = f"--model {model} --data {data} --output-dir {out} --steps {given.steps} --device cpu --precision fp32"
        train_here(clock, [*words.split(), "--batch-size", str(PAIRS_PER_STEP), "--max-seq-len", str(MAX_SEQ_LEN)])
    used = os.times()
    clock.seconds["other"] += used.user + used.system - sum(clock.seconds.values())
    (folder / "seconds.json").write_text(json.dumps(clock.seconds))


def prepare(folder: Path, data: Path, limit: int) -> None:
    """Write the model and the pairs that both sides start from."""
    import torch
    from throughput_sides import Cell, make_rm

    cell = Cell("hh", "6.5m", "packed", 0, 1, MAX_SEQ_LEN, 8, "fp32", gradient_checkpointing=False, threads=1)
    rm = make_rm(cell, torch.device("cpu"))
    rm.model.save_pretrained(folder / "model")
    rm.tokenizer.save_pretrained(folder / "model")
    with gzip.open(data / FILE, "rt", encoding="utf-8") as lines:
        (folder / "pairs.jsonl").write_text("".join(line for line, _ in zip(lines, range(limit), strict=False)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("RM_OPT_DATA", ".")))
    parser.add_argument("--limit", type=int, default=1500)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        run_side(given)
        return
    found: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, given.data, given.limit)
        for repeat in range(given.repeats):
            for side in SIDES if repeat % 2 == 0 else SIDES[::-1]:
                again = [sys.executable, __file__, "--side", side, "--folder", name, "--steps", str(given.steps)]
                environment = os.environ | {"OMP_NUM_THREADS": str(given.threads), "TOKENIZERS_PARALLELISM": "false"}
                shutil.rmtree(folder / f"out-{side}", ignore_errors=True)
                subprocess.run(again, env=environment, check=True, stdout=sys.stderr)
                found[side].append(json.loads((folder / "seconds.json").read_text()))
    phases = list(dict.fromkeys(phase for side in SIDES for one in found[side] for phase in one if phase != "steps"))
    print("| CPU seconds, medians | " + " | ".join(SIDES) + " |\n| --- |" + " ---: |" * len(SIDES))
    for phase in [*phases, "without the steps", "steps"]:
        cells = []
        for side in SIDES:
            values = sorted(
                sum(one.values()) - one["steps"] if phase == "without the steps" else one.get(phase, 0.0)
                for one in found[side]
            )
            cells.append(f"{median(values):.2f}" + (f" ({values[0]:.2f}-{values[-1]:.2f})" if "steps" in phase else ""))
        print(f"| {phase} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
