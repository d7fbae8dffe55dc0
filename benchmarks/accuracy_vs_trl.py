"""Train the same models on the same pairs with this library and with TRL's RewardTrainer; judge both alike.

    PYTHONPATH=<where TRL is> python benchmarks/accuracy_vs_trl.py --out trl_cells

For each model and seed one cell a side, each in a process of its own with as many threads, the side that goes first
alternating. Same on both sides: initial weights of backbone and head (checked), token ids of every pair
(checked), the pairs of every step, learning rate, weight decay, warm-up, cosine schedule, clipping, precision, gradient
checkpointing and no dropout. Each side's own: the defaults of its loss (label smoothing and a reward penalty here,
neither in TRL). No validation pairs here: the last step is what is judged.

A finished cell is a JSON file in --out; an interrupted run continues, and a side is measured again once its cells are
deleted. Times: of the training loop alone; wall and CPU from the pairs to the saved checkpoint (loading, tokenizing and
writing included, imports and scoring not).

Intervals are 95 %, of the difference in pairwise accuracy on the same test pairs, a tie counting half:
    over prompts   bootstrap over prompts of the differences averaged over seeds: other prompts, these trained models
    over seeds     t interval of the seeds' differences: other trainings, these prompts
    over both      the two variances added, t with Satterthwaite's degrees of freedom (both are estimated, the second
                   from few seeds). This one decides: level, if its lower end is above -2 points.
"""

import argparse
import os
import random
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy import stats
from throughput_sides import in_turns, missing, rows_for_trl, run_missing, trained_by_trl, trl_settings

from rmcore.config.model import ModelConfig
from rmcore.config.pipeline import PipelineConfig
from rmcore.config.train import TrainConfig
from rmcore.core.tracking import METRICS_FILE, JsonlTracker
from rmcore.data.pair import PreferencePair
from rmcore.data.readers.sources import load_pairs
from rmcore.data.rendering import RENDERING_FILE
from rmcore.data.table import read_pairs, write_pairs
from rmcore.ensembles.score import score_pairs_table
from rmcore.evaluation.rewards import RewardTable
from rmcore.evaluation.uncertainty import cluster_bootstrap, percentile_interval, t_interval
from rmcore.models.batching import StepOrder
from rmcore.models.device import pick_device
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.stages.order import training_of
from rmcore.stages.train import train_into

MODELS = {"minilm": (5e-5, 1), "tiny": (1e-3, 3)}
"""Learning rate and passes over the pairs. `tiny` is a small causal model that starts from nothing."""
SIDES = ("rm-opt", "TRL")
PAIRS_PER_STEP = 16
MARGIN = 0.02
SAMPLING_SEED = 0
NUM_RESAMPLES = 10_000


@dataclass(frozen=True)
class Cell:
    """One training: everything that its result depends on."""

    model: str
    side: str
    seed: int
    train_pairs: int
    test_pairs: int
    max_seq_len: int
    threads: int

    def file(self, out: Path) -> Path:
        """Where what was measured is kept."""
        return out / f"{self.model}-{self.seed}-{self.side}.json"

    @property
    def settings(self) -> TrainConfig:
        """What both sides train with."""
        lr, epochs = MODELS[self.model]
        steps = epochs * self.train_pairs // PAIRS_PER_STEP
        return TrainConfig(
            steps=steps,
            pairs_per_step=PAIRS_PER_STEP,
            lr=lr,
            warmup_steps=steps // 10,
            schedule="cosine",
            precision="fp32",
            gradient_checkpointing=False,
            early_stopping_patience=None,
        )

    def model_config(self, folder: Path) -> ModelConfig:
        """The model as both sides start with it."""
        return ModelConfig(name=str(folder), max_seq_len=self.max_seq_len)


def train_here(cell: Cell, start: Path, pairs: Sequence[PreferencePair], out: Path) -> tuple[Path, float]:
    """Train with this library; returns the checkpoint and the seconds in optimizer steps."""
    config = PipelineConfig(seed=cell.seed, model=cell.model_config(start), train=cell.settings)
    result = train_into(training_of(config), pairs, [], out, JsonlTracker(out / METRICS_FILE), lambda *_: None)
    assert result.num_steps == cell.settings.steps, result
    return out / "best", result.train_seconds


def train_with_trl(cell: Cell, start: Path, pairs: Sequence[PreferencePair], out: Path) -> tuple[Path, float]:
    """Train with TRL; returns the checkpoint and the seconds in its training loop."""
    from datasets import Dataset
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from trl import RewardConfig, RewardTrainer

    settings = cell.settings
    ours = BradleyTerryRM.new(cell.model_config(start), seed=cell.seed, device=pick_device("cpu"))
    order = StepOrder(len(pairs), settings.pairs_per_step, settings.steps or 0, seed=cell.seed)
    tokenizer = AutoTokenizer.from_pretrained(start)
    rows = rows_for_trl([ours.renderer.tokenize_pairs([pairs[index] for index in step]) for step in order], tokenizer)
    own = {"output_dir": str(out / "trl"), "max_length": cell.max_seq_len}
    own["per_device_train_batch_size"] = settings.pairs_per_step
    arguments = RewardConfig(**trl_settings(settings, cell.seed, **own))
    model = AutoModelForSequenceClassification.from_pretrained(start)
    trainer = RewardTrainer(
        model=model, args=arguments, processing_class=tokenizer, train_dataset=Dataset.from_list(rows)
    )
    theirs = trainer.model.state_dict()
    assert all(torch.equal(theirs[name].cpu(), weight) for name, weight in ours.model.state_dict().items())
    result = trained_by_trl(trainer, rows, settings)
    checkpoint = out / "best"
    trainer.model.save_pretrained(checkpoint)
    for extra in start.iterdir():  # our tokenizer and rendering, unchanged
        if extra.suffix != ".safetensors" and extra.name != "config.json":
            shutil.copy(extra, checkpoint)
    assert (checkpoint / RENDERING_FILE).is_file()
    return checkpoint, result.metrics["train_runtime"]


def run_cell(out: Path, files: tuple[Path, Path], cell: Cell) -> dict:
    """Train and score one cell, in a process of its own."""
    torch.set_num_threads(cell.threads)
    pairs, test = map(read_pairs, files)
    start = out / "start" / f"{cell.model}-{cell.seed}"
    new_model(cell).save(start)
    train = train_here if cell.side == "rm-opt" else train_with_trl
    if cell.side == "TRL":
        import trl.trainer.reward_trainer  # noqa: F401  imports are no part of the time
    with tempfile.TemporaryDirectory() as folder:
        wall, cpu = time.perf_counter(), time.process_time()
        checkpoint, loop = train(cell, start, pairs, Path(folder))
        seconds = {
            "loop_seconds": loop,
            "wall_seconds": time.perf_counter() - wall,
            "cpu_seconds": time.process_time() - cpu,
        }
        table, _ = score_pairs_table(BradleyTerryRM.from_pretrained(checkpoint), test)
    return {"cell": asdict(cell), **seconds, "rewards": table.astype(object).where(table.notna(), None).to_dict("list")}


def sample_train(pairs: Sequence[PreferencePair], cell: Cell, rm: BradleyTerryRM) -> list[PreferencePair]:
    """`train_pairs` pairs at random, without those whose two sides are the same once cut to the limit."""
    shuffled = random.Random(SAMPLING_SEED).sample(list(pairs), len(pairs))  # noqa: S311
    tokenized = zip(shuffled, rm.renderer.tokenize_pairs(shuffled), strict=True)
    kept = [pair for pair, tokens in tokenized if tokens.chosen.ids != tokens.rejected.ids][: cell.train_pairs]
    if len(kept) < cell.train_pairs:
        raise SystemExit(f"--train-pairs {cell.train_pairs}, but the source has {len(kept)}; lower it.")
    return kept


def sample_test(pairs: Sequence[PreferencePair], num: int) -> list[PreferencePair]:
    """`num` pairs spread over all prompts as evenly as they go."""
    by_prompt: dict[str, list[PreferencePair]] = defaultdict(list)
    for pair in random.Random(SAMPLING_SEED).sample(list(pairs), len(pairs)):  # noqa: S311
        by_prompt[pair.prompt_id].append(pair)
    return [pair for pair in chain.from_iterable(zip_longest(*by_prompt.values())) if pair is not None][:num]


def prepare(cell: Cell, sources: tuple[Path, Path], files: tuple[Path, Path]) -> None:
    """Write the pairs that all cells of a model train on and are judged on."""
    write_pairs(sample_train(load_pairs(str(sources[0])).pairs, cell, new_model(cell)), files[0])
    write_pairs(sample_test(load_pairs(str(sources[1])).pairs, cell.test_pairs), files[1])


def new_model(cell: Cell) -> BradleyTerryRM:
    """The weights that both sides of a seed start from."""
    config = ModelConfig(name=cell.model, max_seq_len=cell.max_seq_len)
    return BradleyTerryRM.new(config, seed=cell.seed, device=pick_device("cpu"))


def run_model(first: Cell, seeds: int, sources: tuple[Path, Path], out: Path) -> list[dict]:
    """All cells of one model, those that are there already taken from `out`: TRL and the sources are for the others."""
    cells = [replace(first, side=side, seed=seed) for seed, side in in_turns(SIDES, seeds)]
    files = (out / f"{first.model}-train.parquet", out / "test.parquet")
    if to_run := missing(cells, out):
        if find_spec("trl") is None and any(cell.side == "TRL" for cell in to_run):
            raise SystemExit("TRL is not installed here: pip install trl, or name its folder in PYTHONPATH")
        out.mkdir(parents=True, exist_ok=True)
        prepare(first, sources, files)
    return run_missing(cells, out, partial(run_cell, out, files), "wall_seconds")


def intervals(tables: dict[str, list[pd.DataFrame]]) -> tuple[list[float], dict[str, Any]]:
    """Accuracy difference, here minus TRL, a seed at a time; and the intervals of its mean that can be given."""
    ours, theirs = (np.stack([_scores(RewardTable.from_frame(t)) for t in tables[side]]) for side in SIDES)
    by_seed = (ours - theirs).mean(axis=1)  # (S,)
    reference = RewardTable.from_frame(tables[SIDES[0]][0])
    num_prompts, num_seeds, mean = reference.num_prompts, len(by_seed), float(by_seed.mean())
    sums = np.bincount(reference.prompt, (ours - theirs).mean(axis=0))
    counts = np.bincount(reference.prompt).astype(np.float64)
    drawn = cluster_bootstrap(
        lambda weights: {"difference": weights @ sums / (weights @ counts)},
        num_prompts,
        num_resamples=NUM_RESAMPLES,
        seed=SAMPLING_SEED,
    ).replicates["difference"]
    found: dict[str, Any] = {"over prompts": percentile_interval(drawn, num_prompts)}
    if num_seeds > 1:
        of_seeds = t_interval(by_seed)
        found["over seeds"] = (of_seeds.ci_low, of_seeds.ci_high)
        variances = np.array([drawn.var(ddof=1) * num_prompts / (num_prompts - 1), by_seed.var(ddof=1) / num_seeds])
        freedom = variances.sum() ** 2 / (variances**2 / [num_prompts - 1, num_seeds - 1]).sum()
        half = float(stats.t.ppf(0.975, freedom) * np.sqrt(variances.sum()))
        found["over both"] = (mean - half, mean + half)
    return by_seed.tolist(), found


def _scores(table: RewardTable) -> np.ndarray:
    """(P,) 1 right, 0 wrong, 0.5 tied."""
    return (np.sign(table.margin) + 1) / 2


def report(records: Sequence[dict]) -> str:
    """The markdown of one model's cells."""
    cell = Cell(**records[0]["cell"])
    by_side = {side: [record for record in records if record["cell"]["side"] == side] for side in SIDES}
    tables = {side: [pd.DataFrame(record["rewards"]) for record in found] for side, found in by_side.items()}
    first = RewardTable.from_frame(tables[SIDES[0]][0])
    longer = (np.sign(first.chosen_chars - first.rejected_chars) + 1).mean() / 2
    lines = [
        f"\n{cell.model}: {cell.train_pairs} training pairs, {cell.settings.steps} steps of {PAIRS_PER_STEP}, lr "
        f"{cell.settings.lr:g}, {cell.max_seq_len} tokens a side, fp32, {cell.threads} thread(s); {first.num_pairs} "
        f"test pairs of {first.num_prompts} prompts, of which the longer answer gets {longer:.3f} right.\n",
        "| | accuracy by seed | mean | length-matched | loop, s | wall, s | CPU, s |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for side in SIDES:
        checked = [RewardTable.from_frame(table) for table in tables[side]]
        accuracy = [_scores(table).mean() for table in checked]
        matched = np.mean([_scores(table)[table.length_matched].mean() for table in checked])
        times = [np.mean([record[f"{kind}_seconds"] for record in by_side[side]]) for kind in ("loop", "wall", "cpu")]
        lines.append(
            f"| {side} | {', '.join(f'{one:.3f}' for one in accuracy)} | {np.mean(accuracy):.3f} | {matched:.3f} | "
            f"{' | '.join(f'{one:.0f}' for one in times)} |"
        )
    by_seed, found = intervals(tables)
    shown = ", ".join(f"{100 * one:+.2f}" for one in by_seed)
    lines.append(f"\nrm-opt minus TRL: {100 * np.mean(by_seed):+.2f} points of accuracy (by seed {shown})")
    lines += [f"- {name}: [{100 * low:+.2f}, {100 * high:+.2f}]" for name, (low, high) in found.items()]
    if "over both" in found:
        verdict = "level" if found["over both"][0] > -MARGIN else "not shown to be level"
        lines.append(f"- verdict (lower end over both above -2 points): {verdict}")
    return "\n".join(lines)


def main() -> None:
    """Run what is missing and print the tables."""
    data = Path(os.environ.get("RM_OPT_DATA", "."))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--train-source", type=Path, default=data / "alpacaeval_train.parquet")
    parser.add_argument("--test-source", type=Path, default=data / "alpacaeval_test.parquet")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--train-pairs", type=int, default=1024, help=f"a multiple of {PAIRS_PER_STEP}")
    parser.add_argument("--test-pairs", type=int, default=1200)
    parser.add_argument("--max-seq-len", type=int, default=128)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    if given.train_pairs % PAIRS_PER_STEP:
        parser.error(
            f"--train-pairs {given.train_pairs} is no multiple of {PAIRS_PER_STEP}: the last step would differ"
        )
    os.environ.update(OMP_NUM_THREADS=str(given.threads), TOKENIZERS_PARALLELISM="false")
    for model in given.models:
        first = Cell(model, "", 0, given.train_pairs, given.test_pairs, given.max_seq_len, given.threads)
        records = run_model(first, given.seeds, (given.train_source, given.test_source), given.out)
        print(report(records), flush=True)


if __name__ == "__main__":
    main()
