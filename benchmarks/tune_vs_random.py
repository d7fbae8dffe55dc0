"""Search for settings with `rm-opt tune`'s search, and at random with the same compute; judge both winners alike.

    python benchmarks/tune_vs_random.py --repeats 10 --out tune_cells
    python benchmarks/tune_vs_random.py --data pairs.parquet --model minilm --budget 60m --out tune_cells

A repeat is a gold world of its own and a pair of searches over the same space with the same budget, counted in training
pairs, so that it does not depend on the clock: ours (TPE, halving, Wilcoxon's test over prompts), and random settings
that are all trained to their end. Both begin with the defaults. Each winner and the defaults are trained anew with two
fresh seeds and judged on fresh pairs by the probability that the true reward gives to the side that they prefer, so
label noise is not in it. The searches themselves are interruptible, and a finished repeat is one JSON file in --out.

With --data both defaults are measured against the winner on the test pairs of a file: ours, and those of TRL 1.16's
RewardTrainer in our trainer (learning rate 1e-4, 8 pairs a step, 3 epochs, linear schedule, no smoothing, no penalty).
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from scipy import stats

from experiments.presets import PRESETS
from rmcore.config.changes import change_config
from rmcore.config.data import DataConfig, GoldConfig
from rmcore.config.model import ModelConfig
from rmcore.config.pipeline import PipelineConfig
from rmcore.config.train import TrainConfig
from rmcore.core.errors import TrainingError
from rmcore.core.files import write_json
from rmcore.core.progress import silent
from rmcore.core.tracking import METRICS_FILE, JsonlTracker
from rmcore.data.gold.world import generate_pairs
from rmcore.data.pair import PreferencePair
from rmcore.ensembles.score import score_pairs_table
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.stages.interface import VALIDATION_REWARDS
from rmcore.stages.prepare import load_splits
from rmcore.stages.settings import TrainSettings
from rmcore.stages.train import train_into
from rmcore.study.objectives import score
from rmcore.study.rungs import Rungs, hand_over
from rmcore.study.search import Search, Trial, TrialError, open_search
from rmcore.study.search_space import default_space
from rmcore.training.resume import rewind

SIDES = ("ours", "random")
FRESH_SEEDS = (1001, 1002)
TRL_DEFAULTS = yaml.safe_load(Path(__file__).with_name("trl_defaults.yaml").read_text())["factors"][0]["levels"]["trl"]
"""Settings of TRL 1.16's RewardTrainer, as the experiment has them that compares them with ours."""


def tiny_base(repeat: int, steps: int, validation_prompts: int) -> PipelineConfig:
    """The defaults of a repeat in the gold world: pairs of some 280 prompts to train on."""
    num_prompts = 353 + validation_prompts
    data = DataConfig(
        gold=GoldConfig(num_prompts=num_prompts, pairs_per_prompt=2),
        validation_fraction=validation_prompts / num_prompts,
        test_fraction=72 / num_prompts,
    )
    return PipelineConfig(
        study="bench",
        seed=repeat,
        data=data,
        model=ModelConfig(name="tiny-small", max_seq_len=128),
        train=TrainConfig(steps=steps, lr=1e-3, warmup_steps=5, eval_every=steps // 3, token_budget=8192, callbacks=()),
    )


class Bench:
    """Trains and measures trials of one repeat in this process, counting the pairs that were trained on."""

    def __init__(self, base: PipelineConfig, folder: Path) -> None:
        self.base, self.folder = base, folder
        splits, _ = load_splits(base.data, seed=base.seed)
        self.train, self.validation = splits["train"], splits["validation"]

    def rung(self, trial: Trial, whole: PipelineConfig, earlier: Path | None) -> Path:
        """Train the next rung of a trial, or the `whole` of it where it has one; its folder."""
        out = self.folder / f"trial_{trial.number}" / f"rung_{trial.done}"
        if not (out / "training.json").is_file():
            if earlier is not None:
                hand_over(earlier, out)
            self.fit(trial.rung_config() if len(trial.rungs.ends) > 1 else whole, out)
        return out

    def fit(self, config: PipelineConfig, out: Path) -> Path:
        """Train a config on the repeat's pairs into `out`."""
        out.mkdir(parents=True, exist_ok=True)
        rewind(out)
        tracker = JsonlTracker(out / METRICS_FILE)
        train_into(TrainSettings.of(config), self.train, self.validation, out, tracker, silent)
        tracker.close()
        return out


def search(bench: Bench, side: str, budget_pairs: int) -> tuple[PipelineConfig, dict[str, Any]]:
    """Search with one side until so many pairs are trained on; the winner's config and what it took."""
    base, space = bench.base, default_space(bench.base)
    folder = bench.folder / side
    own = Bench(base, folder / "trainings")
    frozen = {"base": base.model_dump(mode="json"), "side": side}
    given = {"num_pairs": len(own.train), "random": side == "random"}
    with open_search(folder / "search", base, space, "accuracy", frozen, **given) as found:
        spent = sum(one.train_seconds for one in found.records())
        for trial in trials(found):
            if side == "random":
                trial.rungs = Rungs(trial.rungs.ends[-1:])
            spent += follow(own, found, trial)
            if spent >= budget_pairs:
                break
        best = found.best()
        record = {"trials": len(found.records()), "pairs": spent, "selected": best.value}
        return found.whole_config(best.number), record


def trials(found: Search) -> Iterator[Trial]:
    """Trials that were left, then new ones."""
    yield from found.take_up()
    while True:
        try:
            yield found.ask()
        except TrialError:
            continue


def follow(bench: Bench, found: Search, trial: Trial) -> int:
    """Run a trial until it is over; pairs that it was trained on, which the search stores in place of seconds."""
    before, earlier = 0, None
    for place in count(trial.done):
        if place and found.decide(trial) != "promoted":
            return before
        try:
            out = bench.rung(trial, found.whole_config(trial.number), earlier)
        except TrainingError as error:
            found.fail(trial, str(error))
            return before
        earlier = out
        pairs = json.loads((out / "training.json").read_text())["num_pairs"]
        scores = score("accuracy", pd.read_parquet(out / VALIDATION_REWARDS))
        found.report(trial, scores, seconds=pairs - before, train_seconds=pairs)
        before = pairs
    raise AssertionError


def true_accuracy(bench: Bench, config: PipelineConfig, name: str, pairs: Sequence[PreferencePair]) -> list[float]:
    """Mean over fresh pairs of the probability that the side which is preferred is the better one, by fresh seed."""
    found = []
    for seed in FRESH_SEEDS:
        out = bench.folder / f"{name}_{seed}"
        if not (out / "training.json").is_file():
            bench.fit(config.model_copy(update={"seed": seed}), out)
        rm = BradleyTerryRM.from_pretrained(out / "best", device="cpu", max_seq_len=config.model.max_seq_len)
        table, _ = score_pairs_table(rm, pairs)
        p = np.array([float(pair.metadata["gold_win_probability"]) for pair in pairs])
        right = (np.sign(table["reward_chosen"] - table["reward_rejected"]).to_numpy() + 1) / 2
        found.append(float((right * p + (1 - right) * (1 - p)).mean()))
    return found


def repeat(number: int, args: argparse.Namespace) -> dict[str, Any]:
    """One pair of searches; read where it was finished before."""
    place = args.out / f"repeat_{number}_{args.steps}_{args.trainings}_{args.validation_prompts}.json"
    if place.is_file():
        return dict(json.loads(place.read_text()))
    base = tiny_base(number, args.steps, args.validation_prompts)
    bench = Bench(base, args.out / place.stem)
    fresh = generate_pairs(GoldConfig(num_prompts=args.fresh_prompts, pairs_per_prompt=2), 10_000 + number).pairs
    budget = args.trainings * args.steps * base.train.pairs_per_step
    row: dict[str, Any] = {"repeat": number, "budget_pairs": budget, "fresh_pairs": len(fresh)}
    row |= {"train_pairs": len(bench.train), "validation_pairs": len(bench.validation)}
    for side in SIDES:
        config, record = search(bench, side, budget)
        row[side] = record | {"accuracy": true_accuracy(bench, config, f"winner_{side}", fresh)}
    row["defaults"] = {"accuracy": true_accuracy(bench, base, "defaults", fresh)}
    write_json(place, row)
    return row


def report(rows: Sequence[dict[str, Any]]) -> None:
    """Print the table and the paired differences."""
    print("| repeat | ours | random | defaults | trials of ours, random |\n| ---: | ---: | ---: | ---: | --- |")
    mean = {name: np.array([np.mean(row[name]["accuracy"]) for row in rows]) for name in (*SIDES, "defaults")}
    for place, row in enumerate(rows):
        shown = " | ".join(f"{mean[name][place]:.4f}" for name in mean)
        print(f"| {row['repeat']} | {shown} | {row['ours']['trials']}, {row['random']['trials']} |")
    for other in ("random", "defaults"):
        difference = mean["ours"] - mean[other]
        wins = int((difference > 0).sum())
        interval = "no interval of one repeat"
        if len(rows) > 1:
            half = stats.t.ppf(0.975, len(rows) - 1) * difference.std(ddof=1) / np.sqrt(len(rows))
            interval = f"[{100 * (difference.mean() - half):+.2f}, {100 * (difference.mean() + half):+.2f}]"
        print(f"ours - {other}: {100 * difference.mean():+.2f} points {interval}, better in {wins} of {len(rows)}")


def on_a_file(args: argparse.Namespace) -> None:
    """Tune on a file, then measure TRL's defaults under the same fresh seeds on the same test pairs."""
    from flows.cli_common import prepare_terminal

    prepare_terminal()
    from flows.prefect_api import choose_api

    choose_api()
    from flows.console import quiet_prefect
    from flows.pipeline import pipeline
    from flows.settings import changes_of
    from flows.tune import tune
    from flows.tune_plan import tuned_base

    quiet_prefect()
    own = {"data.source": args.data, "model.name": args.model, "skip": ("landscape",)}
    own |= {"data.pairs_per_prompt": args.pairs_per_prompt, "data.eval_source": args.test}
    given = changes_of("minilm", change_config(PRESETS["minilm"], own))
    outcome = tune(preset="minilm", overrides=given, budget=args.budget, seeds=args.seeds)
    results = outcome["results"]
    base = change_config(PRESETS["minilm"], own)
    theirs = change_config(tuned_base(base), TRL_DEFAULTS)
    accuracies = []
    for seed in results["seeds"]:
        config = theirs.model_copy(update={"seed": seed, "study": "trl-defaults"})
        found = pipeline(preset="minilm", overrides=changes_of("minilm", config))
        accuracies.append(found["results"]["metrics"]["pairwise_accuracy"]["value"])
    print(results["headline"])
    print("| settings | test accuracy by seed |\n| --- | --- |")
    for name, values in (
        ("winner", results["winner"]["test_values"]),
        ("our defaults", results["defaults"]["test_values"]),
        ("TRL's defaults", accuracies),
    ):
        print(f"| {name} | {', '.join(f'{value:.4f}' for value in values)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("tune_cells"), help="finished repeats and their trainings")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--steps", type=int, default=90, help="of the defaults")
    parser.add_argument("--trainings", type=int, default=12, help="budget of a search, in trainings of the defaults")
    parser.add_argument("--validation-prompts", type=int, default=500, help="prompts, two pairs each, to choose by")
    parser.add_argument("--fresh-prompts", type=int, default=1500, help="prompts that winners are judged on")
    parser.add_argument("--data", help="a file of pairs: compare with our and TRL's defaults on it, instead")
    parser.add_argument("--test", help="test pairs of --data; otherwise a part of it is held out")
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--pairs-per-prompt", type=int, help="use at most so many pairs of a prompt of --data")
    parser.add_argument("--budget", default="60m")
    parser.add_argument("--seeds", type=int, default=8)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.data is not None:
        on_a_file(args)
        return
    report([repeat(number, args) for number in range(args.repeats)])


if __name__ == "__main__":
    main()
