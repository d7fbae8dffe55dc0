"""The whole job, from the command to a saved model: `rm-opt train` and TRL's RewardTrainer as whole processes.

    python benchmarks/whole_job.py --data $RM_OPT_DATA                  # the 6.5 M Qwen2 shape on HH-RLHF harmless-base
    python benchmarks/whole_job.py --data $RM_OPT_DATA --job minilm     # MiniLM on AlpacaEval, texts alone

Sides start from the same folder with the model and read the same pairs, one epoch of --pairs in steps of 16 with AdamW,
in one precision, and write the model. TRL: `load_dataset`, `RewardTrainer`, `train`, `save_model`, as its documentation
has it, no checkpoint on the way; TRL-default with gradient checkpointing, which is its default. Here: `rm-opt train` as
it comes, which also tries whether packing is exact, describes the rewards of some of the pairs trained on, draws the
curves and writes `best/` and the last step. The sides take turns.

Wall seconds of whole processes, from their start to their end: to be measured on an idle machine. A step is its forward
and backward passes and the update. The last line has the CPU seconds of user and system.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

SIDES = ("rm-opt", "TRL", "TRL-default")
MAX_SEQ_LEN = {"hh": 500, "minilm": 256}
JOBS = {"hh": ("6.5m", "hh_harmless_base_test.jsonl.gz"), "minilm": ("minilm", "alpacaeval_train.parquet")}
WHOLE, CPU = "whole process", "CPU seconds of it"
TRL_BATCH = {"hh": 8, "minilm": 16}
PAIRS_PER_STEP = 16


class Clock:
    """Seconds of this process by phase; one phase inside another counts for itself alone."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._open: list[str] = []
        self._since = time.perf_counter()

    def _turn(self) -> None:
        now = time.perf_counter()
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
        from rmcore.training import loop, material, step
    clock.watch(command, "_load", "reading")
    clock.watch(material, "write_tokenized", "tokenization")
    clock.watch(stage.BradleyTerryRM, "new", "model")
    clock.watch(loop, "choose_packing", "trial of packing")
    clock.watch(step.Stepper, "run", "steps")
    clock.watch(loop.Trainer, "_score", "rewards of training pairs")
    clock.watch(loop.CheckpointWriter, "finished", "writing the model")
    clock.watch(stage, "_write_outcome", "curves and tables")
    sys.argv = ["rm-opt", "train", *words]
    try:
        main()
    except SystemExit as ended:
        if ended.code:
            raise


def train_there(clock: Clock, model: str, data: str, out: str, given: argparse.Namespace) -> None:
    """Train with TRL in this process."""
    with clock.phase("imports"):
        from datasets import disable_caching, load_dataset
        from transformers import AutoTokenizer, TrainerCallback
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
        per_device_train_batch_size=TRL_BATCH[given.job],
        gradient_accumulation_steps=PAIRS_PER_STEP // TRL_BATCH[given.job],
        num_train_epochs=1,
        max_length=MAX_SEQ_LEN[given.job],
        bf16=given.precision == "bf16",
        gradient_checkpointing=given.side == "TRL-default",
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    clock.watch(RewardTrainer, "_prepare_dataset", "tokenization")
    with clock.phase("model"):
        tokenizer = AutoTokenizer.from_pretrained(model)
        if tokenizer.eos_token is None:
            tokenizer.eos_token = tokenizer.sep_token  # MiniLM has none, and RewardTrainer needs one
        trainer = RewardTrainer(
            model=model, args=arguments, processing_class=tokenizer, train_dataset=pairs, callbacks=[Watching()]
        )
    trainer.train()
    assert trainer.state.global_step == given.pairs // PAIRS_PER_STEP, "TRL left pairs out"
    with clock.phase("writing the model"):
        trainer.save_model(str(Path(out) / "best"))


def run_side(given: argparse.Namespace) -> None:
    """Run one side in this process and write down what its phases took."""
    clock = Clock()
    folder = Path(given.folder)
    model, data, out = (str(folder / name) for name in ("model", "pairs.jsonl", f"out-{given.side}"))
    if given.side == "rm-opt":
        words = (
            f"--model {model} --data {data} --output-dir {out} --epochs 1 --device cpu --precision {given.precision}"
        )
        words += f" --batch-size {PAIRS_PER_STEP} --max-seq-len {MAX_SEQ_LEN[given.job]}"
        train_here(clock, words.split())
    else:
        train_there(clock, model, data, out, given)
    (folder / "seconds.json").write_text(json.dumps(clock.seconds))


def prepare(folder: Path, given: argparse.Namespace) -> None:
    """Write the model and the pairs that all sides start from: pairs that no side cuts or leaves out."""
    import pandas as pd
    import torch
    from throughput_sides import Cell, make_rm

    name, file = JOBS[given.job]
    limit = MAX_SEQ_LEN[given.job]
    cell = Cell(given.job, name, "packed", 0, 1, limit, 8, "fp32", gradient_checkpointing=False, threads=1)
    rm = make_rm(cell, torch.device("cpu"))
    rm.model.save_pretrained(folder / "model")
    rm.tokenizer.save_pretrained(folder / "model")
    file = given.data / file
    table = pd.read_parquet(file) if file.suffix == ".parquet" else pd.read_json(file, lines=True)
    rows: list[dict[str, str]] = []
    for row in table[[name for name in ("prompt", "chosen", "rejected") if name in table]].to_dict("records"):
        prompt = row.get("prompt", "")
        lengths = [len(rm.tokenizer(prompt + row[side]).input_ids) for side in ("chosen", "rejected")]
        if max(lengths) <= limit - 40 and row["chosen"] != row["rejected"]:  # with room for the marks of turns
            rows.append(row)
        if len(rows) == given.pairs:
            break
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("RM_OPT_DATA", ".")))
    parser.add_argument("--job", choices=JOBS, default="hh")
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--pairs", type=int, default=960)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        run_side(given)
        return
    found: dict[str, list[dict[str, float]]] = {side: [] for side in given.sides}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, given)
        for repeat in range(given.repeats):
            for side in given.sides if repeat % 2 == 0 else given.sides[::-1]:
                again = [sys.executable, __file__, *sys.argv[1:], "--side", side, "--folder", name]
                environment = os.environ | {"OMP_NUM_THREADS": str(given.threads), "TOKENIZERS_PARALLELISM": "false"}
                shutil.rmtree(folder / f"out-{side}", ignore_errors=True)
                before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
                subprocess.run(again, env=environment, check=True, stdout=sys.stderr)
                wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
                seconds = json.loads((folder / "seconds.json").read_text())
                other = wall - sum(seconds.values())
                cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
                found[side].append(seconds | {"other": seconds["other"] + other, WHOLE: wall, CPU: cpu})
    phases = dict.fromkeys(phase for side in given.sides for one in found[side] for phase in one)
    last = ("steps", WHOLE, CPU)
    print("| seconds, medians | " + " | ".join(given.sides) + " |\n| --- |" + " ---: |" * len(given.sides))
    for phase in [*(one for one in phases if one not in last), *last]:
        cells = []
        for side in given.sides:
            values = sorted(one.get(phase, 0.0) for one in found[side])
            cells.append(f"{median(values):.2f}" + (f" ({values[0]:.2f}-{values[-1]:.2f})" if phase in last else ""))
        print(f"| {phase} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
