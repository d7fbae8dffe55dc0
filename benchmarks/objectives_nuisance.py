"""Is a planted preference for length taken out of the reward? The same training with and without `train.nuisance`.

    python benchmarks/objectives_nuisance.py --seeds 5 --out cells

Half of the labels of the training pairs name the longer answer, whatever it says; in them length goes with the gold
reward a little besides, and with --shortcut none not at all. Each training is judged by accuracy on fresh pairs in
which length says nothing (by the true probability of the side that is preferred, so label noise is not in it) and by
the gold reward that the best of 64 answers gains over their mean; answers are those of the gold world's own writer, one
in five from its tail, where length costs gold. A finished cell is a JSON file in --out.
"""

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from rmcore.config.data import GoldConfig
from rmcore.config.model import ModelConfig
from rmcore.config.train import TrainConfig
from rmcore.core.files import write_json
from rmcore.core.progress import silent
from rmcore.core.tracking import NullTracker
from rmcore.data.gold.world import TAIL_SHARE, generate_pairs, gold_reward, sample_response
from rmcore.data.pair import PreferencePair, prompt_text
from rmcore.evaluation.uncertainty import t_interval
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.training.likelihood.attached import read_likelihood
from rmcore.training.loop import Trainer
from rmcore.training.material import Material, tokens_of

ARMS = {"plain": (), "nuisance": ("length",)}
NUM_PROMPTS, NUM_ANSWERS = 200, 64


def train(
    pairs: Sequence[PreferencePair], config: TrainConfig, args: argparse.Namespace, seed: int, folder: Path
) -> BradleyTerryRM:
    """Train from scratch; the last checkpoint."""
    material = Material.choose(config, pairs, None, None)
    rm = BradleyTerryRM.new(ModelConfig(name=args.model, max_seq_len=256), seed=seed, device=torch.device("cpu"))
    material.attach_to(rm)
    material.write(rm.renderer, folder / "tokens", config)
    read = material.open(folder / "tokens")
    Trainer(
        rm,
        config,
        train=tokens_of(read),
        validation=[],
        folder=folder / "out",
        tracker=NullTracker(),
        seed=seed,
        report=silent,
    ).run()
    return BradleyTerryRM.from_pretrained(folder / "out" / "best", device="cpu")


def judge(rm: BradleyTerryRM, fresh: Sequence[PreferencePair], seed: int) -> dict[str, float]:
    """Accuracy, and what the best of 64 gains; how long it is, and how margins go with length."""
    rewards = rm.score_pairs(fresh)
    margins = rewards[:, 0] - rewards[:, 1]
    gaps = np.array(
        [gold_reward(prompt_text(p.prompt), p.chosen) - gold_reward(prompt_text(p.prompt), p.rejected) for p in fresh]
    )
    chance = 1 / (1 + np.exp(-gaps))
    accuracy = np.where(margins > 0, chance, 1 - chance)
    lengths = np.array([np.log1p(len(p.chosen)) - np.log1p(len(p.rejected)) for p in fresh])
    rng = random.Random(f"best of 64 {seed}")  # noqa: S311 - data
    prompts = list(dict.fromkeys(prompt_text(pair.prompt) for pair in fresh))[:NUM_PROMPTS]
    gains, longer = [], []
    for prompt in prompts:
        answers = [
            sample_response(prompt, rng, shortcut="length", ood=rng.random() < TAIL_SHARE) for _ in range(NUM_ANSWERS)
        ]
        gold = np.array([gold_reward(prompt, answer) for answer in answers])
        best = int(np.argmax(rm.score([prompt] * NUM_ANSWERS, answers)))
        gains.append(gold[best] - gold.mean())
        longer.append(len(answers[best]) / np.mean([len(answer) for answer in answers]))
    return {
        "accuracy": float(accuracy.mean()),
        "gain": float(np.mean(gains)),
        "length_ratio": float(np.mean(longer)),
        "length_correlation": float(np.corrcoef(margins, lengths)[0, 1]),
    }


def cell(arm: str, seed: int, args: argparse.Namespace) -> dict[str, float]:
    """One training, judged; read where it is there."""
    place = args.out / f"{arm}_{seed}_{args.bias}_{args.shortcut}_{args.model}_{args.steps}.json"
    if place.is_file():
        return json.loads(place.read_text())
    biased = GoldConfig(num_prompts=args.prompts, pairs_per_prompt=3, length_bias=args.bias, shortcut=args.shortcut)
    pairs = generate_pairs(biased, seed).pairs
    fresh = generate_pairs(GoldConfig(num_prompts=400, pairs_per_prompt=3, shortcut="none"), 10_000 + seed).pairs
    config = TrainConfig(
        steps=args.steps,
        lr=1e-3,
        label_smoothing=0,
        precision="fp32",
        nuisance=ARMS[arm],
        early_stopping_patience=None,
        best_metric="last",
    )
    folder = args.out / f".{place.stem}"
    rm = train(pairs, config, args, seed, folder)
    likelihood = read_likelihood(folder / "out" / "best")
    found = judge(rm, fresh, seed)
    if likelihood is not None:
        found["gamma"] = float(likelihood.gamma[0].detach())
    write_json(place, found)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("nuisance_cells"), help="finished cells")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--model", default="tiny-small")
    parser.add_argument("--shortcut", choices=("length", "none"), default="length")
    parser.add_argument("--prompts", type=int, default=1200)
    parser.add_argument("--bias", type=float, default=0.5, help="share of labels that name the longer answer")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    found = {arm: [cell(arm, seed, args) for seed in range(args.seeds)] for arm in ARMS}
    print(
        "| arm | accuracy, unbiased pairs | gold gain, best of 64 | its length, of the mean | r(margin, log length) |"
    )
    print("| --- | ---: | ---: | ---: | ---: |")
    for arm, cells in found.items():
        shown = [
            np.mean([one[name] for one in cells]) for name in ("accuracy", "gain", "length_ratio", "length_correlation")
        ]
        print(f"| {arm} | " + " | ".join(f"{value:.3f}" for value in shown) + " |")
    for name in ("accuracy", "gain"):
        changes = [new[name] - old[name] for old, new in zip(found["plain"], found["nuisance"], strict=True)]
        value = t_interval(changes)
        print(f"{name}, nuisance - plain, over seeds: {value.value:+.3f} [{value.ci_low}, {value.ci_high}]")
    return 0


if __name__ == "__main__":
    sys.exit(main())
