"""Rankings of K answers trained as rankings, and expanded into their pairs: speed, and accuracy at equal labels.

    python benchmarks/objectives_rankings.py --seeds 5

Gold-world prompts with K answers each, ranked without ties by Plackett-Luce on the gold rewards. One side trains on the
rankings, the other on the K (K - 1) / 2 pairs of each (`train.objective=pairs`), with as many rankings in a step, the
same steps, model, seed and token budget. Speed is measured in turns on the same rankings, in one process; accuracy is
that of whole trainings on fresh pairs, by the true probability of the side that is preferred.
"""

import argparse
import math
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
import torch

from rmcore.config.data import GoldConfig
from rmcore.config.model import ModelConfig
from rmcore.config.train import TrainConfig
from rmcore.core.progress import silent
from rmcore.core.tracking import NullTracker
from rmcore.data.gold.prompts import draw_prompt
from rmcore.data.gold.world import generate_pairs, gold_reward, sample_response
from rmcore.data.observation import Observation
from rmcore.data.pair import PreferencePair, prompt_text
from rmcore.evaluation.uncertainty import t_interval
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.training.loop import Trainer
from rmcore.training.material import Material, tokens_of

SIDES = ("ranking", "pairs")


def draw_rankings(number: int, answers: int, seed: int) -> list[Observation]:
    """Draw rankings of different prompts: Gumbel noise on the gold rewards, which is Plackett-Luce (Yellott 1977)."""
    rng = random.Random(f"rankings {seed}")  # noqa: S311 - data
    found: dict[str, Observation] = {}
    while len(found) < number:
        prompt = draw_prompt(rng, ood=False)
        given: dict[str, float] = {}
        while len(given) < answers:
            answer = sample_response(prompt, rng)
            given[answer] = gold_reward(prompt, answer) - math.log(-math.log(rng.random()))
        order = sorted(given, key=given.__getitem__, reverse=True)
        ranks = tuple(order.index(answer) + 1 for answer in given)
        found.setdefault(prompt, Observation(prompt, tuple(given), ranks=ranks))
    return list(found.values())


def expand(rankings: Sequence[Observation]) -> list[PreferencePair]:
    """All pairs of each ranking."""
    pairs = []
    for one in rankings:
        for i, j in combinations(range(len(one.answers)), 2):
            better, worse = (i, j) if (one.ranks or ())[i] < (one.ranks or ())[j] else (j, i)
            pairs.append(PreferencePair(one.prompt, one.answers[better], one.answers[worse]))
    return pairs


def make_trainer(side: str, rankings: list[Observation], args: argparse.Namespace, seed: int, folder: Path) -> Trainer:
    """A training of one epoch of one side."""
    each = 1 if side == "ranking" else args.answers * (args.answers - 1) // 2
    config = TrainConfig(
        objective="auto" if side == "ranking" else "pairs",
        epochs=args.epochs,
        pairs_per_step=args.rankings_per_step * each,
        lr=1e-3,
        label_smoothing=0,
        precision="fp32",
        token_budget=args.token_budget,
        best_metric="last",
        early_stopping_patience=None,
    )
    material = Material.choose(config, expand(rankings), rankings, None)
    rm = BradleyTerryRM.new(ModelConfig(name=args.model, max_seq_len=256), seed=seed, device=torch.device("cpu"))
    material.attach_to(rm)
    material.write(rm.renderer, folder / "tokens", config)
    return Trainer(
        rm,
        config,
        train=tokens_of(material.open(folder / "tokens")),
        validation=[],
        folder=folder / "out",
        tracker=NullTracker(),
        seed=seed,
        report=silent,
    )


def speeds(args: argparse.Namespace) -> dict[str, list[float]]:
    """Rankings a second of each side, in turns."""
    found: dict[str, list[float]] = {side: [] for side in SIDES}
    rankings = draw_rankings(3 * args.rankings_per_step, args.answers, seed=0)
    for _ in range(args.repeats):
        for side in SIDES:
            with tempfile.TemporaryDirectory() as folder:
                trainer = make_trainer(side, rankings, args, 0, Path(folder))
                trainer.probe(1)
                started = time.perf_counter()
                trainer.probe(2)
                found[side].append(2 * args.rankings_per_step / (time.perf_counter() - started))
    return found


def accuracy(side: str, args: argparse.Namespace, seed: int) -> float:
    """Of a whole training, on fresh pairs."""
    rankings = draw_rankings(args.rankings, args.answers, seed)
    fresh = generate_pairs(GoldConfig(num_prompts=400, pairs_per_prompt=3, shortcut="none"), 10_000 + seed).pairs
    with tempfile.TemporaryDirectory() as folder:
        make_trainer(side, rankings, args, seed, Path(folder)).run()
        rm = BradleyTerryRM.from_pretrained(Path(folder) / "out" / "best", device="cpu")
        rewards = rm.score_pairs(fresh)
    texts = [(prompt_text(pair.prompt), pair.chosen, pair.rejected) for pair in fresh]
    gaps = np.array([gold_reward(prompt, a) - gold_reward(prompt, b) for prompt, a, b in texts])
    chance = 1 / (1 + np.exp(-gaps))
    return float(np.where(rewards[:, 0] > rewards[:, 1], chance, 1 - chance).mean())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=8)
    parser.add_argument("--rankings", type=int, default=400, help="of a whole training")
    parser.add_argument("--rankings-per-step", type=int, default=4)
    parser.add_argument("--epochs", type=float, default=3.0)
    parser.add_argument("--token-budget", type=int, default=4096)
    parser.add_argument("--model", default="tiny-small")
    parser.add_argument("--repeats", type=int, default=3, help="turns of the speed")
    parser.add_argument("--seeds", type=int, default=5, help="whole trainings; 0: the speed alone")
    args = parser.parse_args()
    measured = speeds(args)
    print("| side | rankings/s, median (range) | times the expanded |\n| --- | --- | --- |")
    ratios = [one / other for one, other in zip(measured["ranking"], measured["pairs"], strict=True)]
    for side in SIDES:
        low, middle, high = np.quantile(measured[side], [0, 0.5, 1])
        times = f"{np.median(ratios):.1f} ({min(ratios):.1f}–{max(ratios):.1f})" if side == "ranking" else "1"
        print(f"| {side} | {middle:.2f} ({low:.2f}–{high:.2f}) | {times} |")
    if args.seeds:
        found = {side: [accuracy(side, args, seed) for seed in range(args.seeds)] for side in SIDES}
        for side in SIDES:
            print(f"accuracy of {side}: {np.mean(found[side]):.4f}")
        change = t_interval([one - other for one, other in zip(found["ranking"], found["pairs"], strict=True)])
        print(f"ranking - pairs over seeds: {change.value:+.4f} [{change.ci_low}, {change.ci_high}]")
    return 0


if __name__ == "__main__":
    sys.exit(main())
