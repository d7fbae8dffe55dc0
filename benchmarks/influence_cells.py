"""Trainings of benchmarks/influence.py, with all pairs and without those of a set, and kernels of their gradients."""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus

from rmcore.config.data import GoldConfig
from rmcore.config.model import ModelConfig
from rmcore.config.train import TrainConfig
from rmcore.core.arrays import FloatArray, IntArray
from rmcore.data.gold.world import generate_pairs
from rmcore.data.pair import PreferencePair, prompt_text
from rmcore.data.rendering import TokenizedPair
from rmcore.ensembles.features import pair_features
from rmcore.ensembles.linear_probes import fit_head
from rmcore.landscape.autograd import gradient_of
from rmcore.models.batching import pad_pairs
from rmcore.models.packing.forward import rewards_of
from rmcore.models.packing.rows import Rows
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.training.feed import make_feed
from rmcore.training.losses import split_rewards
from rmcore.training.optimizers import set_learning_rate
from rmcore.training.ranks import ALONE
from rmcore.training.setup import make_context
from rmcore.training.step import train_step

MODEL = "tiny-small"
NUM_TRAIN, NUM_HELD_OUT, NUM_TARGETS = 1000, 150, 60
NUM_BEFORE = 3600
"""Other pairs that the backbone is trained on before."""
SIZES, KINDS, REPEATS = (100, 10, 1), ("random", "similar"), 3
EPSILON = 0.05
COMMON = {
    "pairs_per_step": 32,
    "warmup_steps": 6,
    "token_budget": 2048,
    "label_smoothing": EPSILON,
    "precision": "fp32",
}
REGIMES: dict[str, TrainConfig] = {
    "adamw": TrainConfig(optimizer="adamw", lr=3e-4, **COMMON),
    "sgd": TrainConfig(optimizer="sgd", lr=0.01, clip=100.0, **COMMON),
    "sgd-slow": TrainConfig(optimizer="sgd", lr=0.002, clip=100.0, **COMMON),
    "scratch": TrainConfig(optimizer="adamw", lr=1e-3, **COMMON),
}
EPOCHS = 2
HEAD = "head"


def new_model(seed: int) -> BradleyTerryRM:
    return BradleyTerryRM.new(ModelConfig(name=MODEL, max_seq_len=256), seed=seed, device=torch.device("cpu"))


def fit(
    rm: BradleyTerryRM, pairs: Sequence[TokenizedPair], weights: FloatArray, config: TrainConfig, seed: int, steps: int
) -> dict[str, Tensor]:
    """Train in place with the trainer's own step; a pair's loss counts by its weight. Adam's second moments by name."""

    def forward(rows: Rows, labels: Tensor) -> tuple[Tensor, Tensor]:
        chosen, rejected = split_rewards(rewards_of(rm.model, rows))
        margin, half = chosen - rejected, config.label_smoothing / 2
        loss = (1 - half) * softplus(-margin) + half * softplus(margin)
        loss = loss + config.regularization_lambda * (chosen.square() + rejected.square()) / 2
        return (labels * loss).sum(), margin

    context = replace(make_context(rm, config, ALONE), forward=forward)
    feed = make_feed(
        pairs, config, num_steps=steps, seed=seed, token_budget=config.token_budget or 2048, pad_id=rm.pad_id,
        ranks=ALONE, packing=rm.packing("fp32"),
    )  # fmt: skip
    rm.model.train()
    for step in range(steps):
        positions, batches = feed[step]
        set_learning_rate(context.optimizer, config, step, steps)
        weighted = [
            replace(one, target_margins=torch.tensor(weights[np.take(positions, one.indices)], dtype=torch.float32))
            for one in batches
        ]
        train_step(context, weighted, step=step + 1, pair_ids=[str(position) for position in positions])
    rm.model.eval()
    state = context.optimizer.named_state()
    return {name: one["exp_avg_sq"] for name, one in state.items() if "exp_avg_sq" in one}


@dataclass(frozen=True)
class Cell:
    """One regime under one seed, which draws the pairs, their order and the left-out sets."""

    regime: str
    seed: int
    out: Path

    @property
    def folder(self) -> Path:
        """Where its retrainings are."""
        return self.out / f"{self.regime}-{self.seed}"

    @cached_property
    def pairs(self) -> tuple[list[PreferencePair], list[PreferencePair], list[PreferencePair]]:
        """Training pairs, held-out pairs, targets; no prompt is in two of them."""
        total = NUM_TRAIN + NUM_HELD_OUT + NUM_TARGETS
        drawn = generate_pairs(GoldConfig(num_prompts=total // 2, pairs_per_prompt=2), self.seed).pairs
        cut = NUM_TRAIN + NUM_HELD_OUT
        return drawn[:NUM_TRAIN], drawn[NUM_TRAIN:cut], drawn[cut:total]

    @cached_property
    def sets(self) -> dict[str, IntArray]:
        """Positions of the left-out pairs by name."""
        train, _, targets = self.pairs
        words = [set(re.findall(r"\w+", prompt_text(pair.prompt).lower())) for pair in train]
        rng, found = np.random.default_rng(self.seed), {}
        for repeat in range(REPEATS):
            for size in SIZES:
                target = targets[int(rng.integers(len(targets)))]
                own = set(re.findall(r"\w+", prompt_text(target.prompt).lower()))
                shared = np.array([len(own & other) / len(own | other) for other in words])
                found[f"random-{size}-{repeat}"] = rng.choice(len(train), size, replace=False)
                found[f"similar-{size}-{repeat}"] = np.argsort(-shared, kind="stable")[:size]
        return found

    def start(self) -> BradleyTerryRM:
        """The model before its training."""
        rm = new_model(self.seed)
        if self.regime != "scratch":
            rm.model.load_state_dict(torch.load(self.out / "backbone.pt", weights_only=True))
            with torch.no_grad():
                rm.model.score.weight.zero_()
        return rm

    def retrain(self) -> None:
        """Train once with all pairs, once with the same pairs in other micro-batches, and once without each set."""
        self.folder.mkdir(parents=True, exist_ok=True)
        rm = self.start()
        tokens = [rm.renderer.tokenize_pairs(one) for one in self.pairs]
        for name, left_out in {"base": [], **self.sets, "again": [], "regrouped": []}.items():
            file = self.folder / f"{name}.npz"
            if file.is_file() or (name == "again" and self.seed):
                continue
            rm, began = self.start(), time.monotonic()
            weights = np.ones(NUM_TRAIN)
            weights[np.asarray(left_out, dtype=np.int64)] = 0
            config = REGIMES[self.regime]
            if name == "regrouped":
                config = config.model_copy(update={"token_budget": 1024})
            steps = EPOCHS * -(-NUM_TRAIN // config.pairs_per_step)
            moments = fit(rm, tokens[0], weights, config, self.seed, steps)
            if name == "base":
                torch.save({"model": rm.model.state_dict(), "moments": moments}, self.folder / "base.pt")
            np.savez(file, targets=margins_of(rm, tokens[2]), held_out=margins_of(rm, tokens[1]))
            print(f"{self.regime} {self.seed} {name}: {time.monotonic() - began:.0f} s", flush=True)


def margins_of(rm: BradleyTerryRM, pairs: Sequence[TokenizedPair]) -> FloatArray:
    rewards = rm.score_sides([side for pair in pairs for side in (pair.chosen, pair.rejected)])
    return (rewards[::2] - rewards[1::2]).astype(np.float64)


def backbone(out: Path) -> None:
    """Train the backbone of the fine-tuned regimes on other pairs, once."""
    if (out / "backbone.pt").is_file():
        return
    out.mkdir(parents=True, exist_ok=True)
    pairs = generate_pairs(GoldConfig(num_prompts=NUM_BEFORE // 2, pairs_per_prompt=2), 12345).pairs[:NUM_BEFORE]
    rm = new_model(0)
    config = TrainConfig(optimizer="muon", lr=2e-3, **{**COMMON, "warmup_steps": 20})
    fit(rm, rm.renderer.tokenize_pairs(pairs), np.ones(len(pairs)), config, 0, 2 * -(-len(pairs) // 32))
    torch.save(rm.model.state_dict(), out / "backbone.pt")


def refit_heads(cell: Cell) -> None:
    """The head alone, to the optimum of its penalised loss, on features of the backbone; and without each set."""
    cell.folder.mkdir(parents=True, exist_ok=True)
    if (cell.folder / "features.npz").is_file():
        return
    rm = cell.start()
    chosen, rejected = pair_features(rm, [pair for part in cell.pairs for pair in part])
    differences = chosen - rejected
    np.savez(cell.folder / "features.npz", differences=differences)
    own, targets = differences[:NUM_TRAIN], differences[NUM_TRAIN + NUM_HELD_OUT :]
    held_out = differences[NUM_TRAIN : NUM_TRAIN + NUM_HELD_OUT]
    for name, left_out in {"base": [], **cell.sets}.items():
        weights = np.ones(NUM_TRAIN)
        weights[np.asarray(left_out, dtype=np.int64)] = 0
        head = fit_head(own, weights=weights, label_smoothing=EPSILON)
        np.savez(cell.folder / f"{name}.npz", targets=targets @ head, held_out=held_out @ head, train=own @ head)


def jacobian(rm: BradleyTerryRM, pairs: Sequence[PreferencePair]) -> tuple[Tensor, FloatArray, list[str]]:
    """Gradients of the margins, (P, N) float32; the margins; names of the parameters."""
    named = dict(rm.model.named_parameters())
    rows = torch.empty(len(pairs), sum(one.numel() for one in named.values()))
    margins = np.zeros(len(pairs))
    for place, pair in enumerate(rm.renderer.tokenize_pairs(pairs)):
        padded = pad_pairs([pair], pad_id=rm.pad_id)
        chosen, rejected = split_rewards(rm.model(padded.input_ids, attention_mask=padded.attention_mask).logits)
        margins[place] = float((chosen - rejected).detach()[0])
        torch.cat([part.reshape(-1) for part in gradient_of([chosen - rejected], [*named.values()])], out=rows[place])
    return rows, margins, list(named)


def kernels(cell: Cell) -> dict[str, FloatArray]:
    """Inner products of all pairs with the training pairs, in the plain metric and in Adam's; margins; features."""
    file = cell.folder / "kernels.npz"
    if not file.is_file():
        if cell.regime == HEAD:
            differences = np.load(cell.folder / "features.npz")["differences"]
            margins = np.concatenate(
                [np.load(cell.folder / "base.npz")[one] for one in ("train", "held_out", "targets")]
            )
            np.savez(file, plain=differences @ differences[:NUM_TRAIN].T, margins=margins, differences=differences)
        else:
            rm, saved = new_model(0), torch.load(cell.folder / "base.pt", weights_only=True)
            rm.model.load_state_dict(saved["model"])
            everything = [pair for part in cell.pairs for pair in part]
            rows, margins, names = jacobian(rm, everything)
            chosen, rejected = pair_features(rm, everything)
            found = {"plain": (rows @ rows[:NUM_TRAIN].T).double().numpy(), "differences": chosen - rejected}
            if saved["moments"]:
                scale = torch.cat([saved["moments"][name].reshape(-1) for name in names]).sqrt() + 1e-8
                found["adam"] = ((rows / scale) @ rows[:NUM_TRAIN].T).double().numpy()
            np.savez(file, margins=margins, **found)
    return dict(np.load(file))


def start_kernels(cell: Cell) -> dict[str, FloatArray]:
    """`kernels` at the weights before the training; Adam's metric is still that of its last moments."""
    file = cell.folder / "start.npz"
    if not file.is_file():
        rows, _, names = jacobian(cell.start(), [pair for part in cell.pairs for pair in part])
        found = {"plain": (rows @ rows[:NUM_TRAIN].T).double().numpy()}
        moments = torch.load(cell.folder / "base.pt", weights_only=True)["moments"]
        if moments:
            scale = torch.cat([moments[name].reshape(-1) for name in names]).sqrt() + 1e-8
            found["adam"] = ((rows / scale) @ rows[:NUM_TRAIN].T).double().numpy()
        np.savez(file, **found)
    return dict(np.load(file))
