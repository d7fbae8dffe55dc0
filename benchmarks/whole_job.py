"""The whole job, from the command to a saved model: `rm-opt train` and TRL's RewardTrainer as whole processes.

    python benchmarks/whole_job.py --data $RM_OPT_DATA                  # the 6.5 M Qwen2 shape on HH-RLHF harmless-base
    python benchmarks/whole_job.py --data $RM_OPT_DATA --job minilm     # MiniLM on AlpacaEval, texts alone

Sides start from the same folder with the model and read the same pairs, one epoch of --pairs in steps of 16 with AdamW,
in one precision, and write the model. TRL: `load_dataset`, `RewardTrainer`, `train`, `save_model`, as its documentation
has it, no checkpoint on the way; TRL-default with gradient checkpointing, which is its default. Here: `rm-opt train` as
it comes, which also tries whether packing is exact, describes the rewards of some of the pairs trained on, draws the
curves and writes `best/` and the last step. The sides take turns.

Wall seconds of whole processes, from their start to their end: to be measured on an idle machine. The last line has the
CPU seconds of user and system.
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
from pathlib import Path
from statistics import median

SIDES = ("rm-opt", "TRL", "TRL-default")
MAX_SEQ_LEN = {"hh": 500, "minilm": 256}
JOBS = {"hh": ("6.5m", "hh_harmless_base_test.jsonl.gz"), "minilm": ("minilm", "alpacaeval_train.parquet")}
TRL_BATCH = {"hh": 8, "minilm": 16}
PAIRS_PER_STEP = 16


def train_there(model: str, data: str, out: str, given: argparse.Namespace) -> None:
    """Train with TRL in this process."""
    from datasets import disable_caching, load_dataset
    from transformers import AutoTokenizer
    from trl import RewardConfig, RewardTrainer

    disable_caching()
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
    tokenizer = AutoTokenizer.from_pretrained(model)
    if tokenizer.eos_token is None:
        tokenizer.eos_token = tokenizer.sep_token  # MiniLM has none, and RewardTrainer needs one
    pairs = load_dataset("json", data_files=data, split="train")
    trainer = RewardTrainer(model=model, args=arguments, processing_class=tokenizer, train_dataset=pairs)
    trainer.train()
    assert trainer.state.global_step == given.pairs // PAIRS_PER_STEP, "TRL left pairs out"
    trainer.save_model(str(Path(out) / "best"))


def command_of(side: str, folder: Path, given: argparse.Namespace) -> list[str]:
    """The whole process of a side."""
    if side != "rm-opt":
        return [sys.executable, __file__, *sys.argv[1:], "--side", side, "--folder", str(folder)]
    places = {"--model": "model", "--data": "pairs.jsonl", "--output-dir": f"out-{side}"}
    words = [word for option, name in places.items() for word in (option, str(folder / name))]
    words += f"--epochs 1 --device cpu --precision {given.precision} --batch-size {PAIRS_PER_STEP}".split()
    words += ["--max-seq-len", str(MAX_SEQ_LEN[given.job])]
    return [str(Path(sys.executable).with_name("rm-opt")), "train", *words]


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
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        out = given.folder / f"out-{given.side}"
        train_there(str(given.folder / "model"), str(given.folder / "pairs.jsonl"), str(out), given)
        return
    found: dict[str, list[tuple[float, float]]] = {side: [] for side in given.sides}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, given)
        environment = os.environ | {"OMP_NUM_THREADS": str(given.threads), "TOKENIZERS_PARALLELISM": "false"}
        for repeat in range(given.repeats):
            for side in given.sides if repeat % 2 == 0 else given.sides[::-1]:
                shutil.rmtree(folder / f"out-{side}", ignore_errors=True)
                before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
                subprocess.run(command_of(side, folder, given), env=environment, check=True, stdout=sys.stderr)
                wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
                cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
                found[side].append((wall, cpu))
    print("| seconds, medians | " + " | ".join(given.sides) + " |\n| --- |" + " ---: |" * len(given.sides))
    for place, what in enumerate(("whole process", "CPU seconds of it")):
        taken = [sorted(one[place] for one in found[side]) for side in given.sides]
        cells = [f"{median(values):.2f} ({values[0]:.2f}-{values[-1]:.2f})" for values in taken]
        print(f"| {what} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
