"""Pairs of one prompt drawn together: tokens saved, gradient noise, and accuracy at equal tokens.

    python benchmarks/group_prompts.py --model tiny --out groups --seeds 5 --train-prompts 110
    python benchmarks/group_prompts.py --model minilm --out groups --seeds 3 --train-prompts 60

AlpacaEval pairs (the folder `RM_OPT_DATA`): 19 pairs a prompt, whose answers stand in 1.5 of them each. With sizes of
1, 2, 4 and 8: tokens that a pair takes in training; the variance of a step's gradient, summed over all weights, at
the untrained and at the trained model; and the accuracy on prompts of their own when every size may compute as many
tokens as size 1 does in its epochs. A finished training is a file in --out and is not run again.
"""

import argparse
import os
from pathlib import Path

import pandas as pd
import torch

from rmcore.config.model import ModelConfig
from rmcore.config.train import TrainConfig
from rmcore.core.tracking import METRICS_FILE, JsonlTracker
from rmcore.data.pair import PreferencePair
from rmcore.data.readers.sources import load_pairs
from rmcore.data.rendering import TokenizedPair
from rmcore.models.device import pick_device
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.policy.grpo.rlhf_record import value_over_seeds
from rmcore.stages.settings import TrainSettings
from rmcore.stages.train import train_into
from rmcore.training.feed import StepFeed, make_feed
from rmcore.training.ranks import ALONE
from rmcore.training.setup import make_context
from rmcore.training.step import accumulate_gradient

SIZES = (1, 2, 4, 8)
MODELS = {"minilm": (5e-5, 1.0), "tiny": (1e-3, 3.0)}
"""Learning rate, and epochs of size 1."""
NOISE_STEPS = 24
BUDGET = 8192


def settings_of(model: str, size: int, steps: int) -> TrainConfig:
    return TrainConfig(
        steps=steps,
        lr=MODELS[model][0],
        warmup_steps=steps // 10,
        group_prompts=size,
        token_budget=BUDGET,
        early_stopping_patience=None,
        precision="fp32",
        callbacks=(),
    )


def feed_of(rm: BradleyTerryRM, pairs: list[TokenizedPair], config: TrainConfig, seed: int) -> StepFeed:
    steps = -(-len(pairs) // config.pairs_per_step)  # an epoch
    return make_feed(
        pairs, config, num_steps=steps, seed=seed, token_budget=BUDGET, pad_id=rm.pad_id, ranks=ALONE,
        packing=rm.packing(),
    )  # fmt: skip


def tokens_a_pair(rm: BradleyTerryRM, pairs: list[TokenizedPair], model: str, size: int) -> float:
    feed = feed_of(rm, pairs, settings_of(model, size, 1), seed=0)
    return sum(batch.rows.num_tokens for step in range(len(feed)) for batch in feed[step][1]) / len(pairs)


def noise(rm: BradleyTerryRM, pairs: list[TokenizedPair], model: str, size: int) -> float:
    """Variance of a step's mean gradient, summed over the weights."""
    config = settings_of(model, size, NOISE_STEPS)
    feed, context = feed_of(rm, pairs, config, seed=1), make_context(rm, config, ALONE)
    weights = [one for one in rm.model.parameters() if one.requires_grad]
    total, squares, count = [torch.zeros_like(one, dtype=torch.float64) for one in weights], 0.0, 0
    for indices, batches in (feed[step] for step in range(min(NOISE_STEPS, len(feed)))):
        context.optimizer.zero_grad()
        accumulate_gradient(context, batches, num_terms=len(indices))
        for sums, one in zip(total, weights, strict=True):
            found = torch.zeros_like(sums) if one.grad is None else one.grad.double()
            sums.add_(found)
            squares += float((found**2).sum())
        count += 1
    mean = sum(float(((one / count) ** 2).sum()) for one in total)
    return (squares / count - mean) * count / (count - 1)


def trained(given: argparse.Namespace, size: int, seed: int, steps: int, data: dict[str, list[PreferencePair]]) -> Path:
    """A training's checkpoint and the share of right test pairs by prompt; trained now, unless they are there."""
    place = given.out / f"{given.model}-{size}-{seed}"
    if not (place / "right.parquet").is_file():
        settings = TrainSettings(
            seed=seed,
            device="cpu",
            model=ModelConfig(name=given.model, max_seq_len=given.max_seq_len),
            train=settings_of(given.model, size, steps),
        )
        train_into(settings, data["train"], [], place, JsonlTracker(place / METRICS_FILE), lambda *_: None)
        rewards = BradleyTerryRM.from_pretrained(place / "best").score_pairs(data["test"])
        margin = rewards[:, 0] - rewards[:, 1]
        rows = {"prompt": [pair.prompt_id for pair in data["test"]], "right": (margin > 0) + (margin == 0) / 2}
        pd.DataFrame(rows).groupby("prompt", as_index=False).mean().to_parquet(place / "right.parquet")
    return place


def shown(value: dict | None, digits: int = 1) -> str:
    if value is None or value["ci_low"] is None:
        return "-"
    return " to ".join(f"{100 * value[end]:+.{digits}f}" for end in ("ci_low", "ci_high"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(MODELS), default="tiny")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="1 among them, the first")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--train-prompts", type=int, default=110)
    parser.add_argument("--max-seq-len", type=int, default=256)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    folder = Path(os.environ["RM_OPT_DATA"])
    data = {part: load_pairs(str(folder / f"alpacaeval_{part}.parquet")).pairs for part in ("train", "test")}
    first = list(dict.fromkeys(pair.prompt_id for pair in data["train"]))[: given.train_prompts]
    data["train"] = [pair for pair in data["train"] if pair.prompt_id in set(first)]
    epochs = MODELS[given.model][1]
    rm = BradleyTerryRM.new(
        ModelConfig(name=given.model, max_seq_len=given.max_seq_len), seed=0, device=pick_device("cpu")
    )
    pairs = rm.renderer.tokenize_pairs(data["train"])
    costs = {size: tokens_a_pair(rm, pairs, given.model, size) for size in given.sizes}
    an_epoch = len(pairs) / TrainConfig().pairs_per_step
    steps = {size: round(epochs * an_epoch * costs[1] / costs[size]) for size in given.sizes}
    places = {
        size: [trained(given, size, seed, steps[size], data) for seed in range(given.seeds)] for size in given.sizes
    }
    after = BradleyTerryRM.from_pretrained(places[1][0] / "best")
    print(f"{given.model}, {len(pairs)} pairs of {len(first)} prompts, {given.seeds} seeds\n")
    print(
        "| group_prompts | tokens a pair | steps | gradient noise at the start | trained | accuracy | less that of 1 |"
    )
    print("| ---: | ---: | ---: | ---: | ---: | ---: | --- |")
    base = [noise(one, pairs, given.model, 1) for one in (rm, after)]
    right = {
        size: pd.concat(
            [pd.read_parquet(one / "right.parquet").assign(seed=seed) for seed, one in enumerate(places[size])]
        )
        for size in given.sizes
    }
    for size in given.sizes:
        both = right[size].merge(right[1], on=["seed", "prompt"], suffixes=("", "_alone"))
        less = value_over_seeds(both.assign(less=both["right"] - both["right_alone"]), "less", 2000, 0)
        ratios = [noise(one, pairs, given.model, size) / alone for one, alone in zip((rm, after), base, strict=True)]
        print(
            f"| {size} | {costs[size]:.0f} ({costs[size] / costs[1]:.2f}) | {steps[size]} | {ratios[0]:.2f} | "
            f"{ratios[1]:.2f} | {100 * right[size]['right'].mean():.1f} % | {shown(less) if size > 1 else ''} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
