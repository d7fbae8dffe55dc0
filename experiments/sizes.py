"""Models and data of the shipped experiments, in four sizes, and the two ends of the recipe.

smoke   the synthetic benchmark and the model `tiny`: a matrix in minutes on a laptop; shows that everything is wired
gold    the same at a size that decides: 500 steps, 3,000 test pairs with the chances of their labels known
small   real AlpacaEval preferences and the pretrained 22 M encoder MiniLM, on all of its test pairs
paper   Qwen2.5-0.5B on hub data, for a GPU machine with access to a model hub
"""

import os
from pathlib import Path
from typing import Any, Literal

from rmcore.config.data import DataConfig, GoldConfig
from rmcore.config.evaluate import EvaluateConfig
from rmcore.config.model import ModelConfig
from rmcore.config.pipeline import PipelineConfig, sections
from rmcore.config.train import TrainConfig
from rmcore.core.errors import ConfigError

Size = Literal["smoke", "gold", "small", "paper"]
THREE, EIGHT = tuple(range(3)), tuple(range(8))
SEEDS: dict[Size, tuple[int, ...]] = {"smoke": THREE, "gold": EIGHT, "small": EIGHT, "paper": THREE}
"""Eight seeds of five arms take less than half an hour on two cores (benchmarks/results/cells.md)."""
BUDGET_MINUTES: dict[Size, float] = {"smoke": 30, "gold": 120, "small": 120, "paper": 2880}
ACCURACY: dict[Size, str] = {
    "smoke": "eval/test_pairwise_accuracy",
    "gold": "eval/test_expected_accuracy",
    "small": "eval/test_pairwise_accuracy",
    "paper": "eval/test_pairwise_accuracy",
}
"""Accuracy that claims are about. Where the chance of a label is known its luck is no part of the number, as if as many
annotators as one likes had been asked: the same mean with less noise."""

NOTHING: dict[str, Any] = {
    "train.schedule": "constant",
    "train.warmup_steps": 0,
    "train.label_smoothing": 0.0,
    "train.regularization_lambda": 0.0,
    "train.early_stopping_patience": None,
    "train.best_metric": "last",
}
"""A recipe without any help: constant learning rate, no smoothing, no penalty, the last weights (ablation A1)."""


def base(size: Size) -> PipelineConfig:
    """The config that all arms of a shipped experiment start from: the full recipe.

    Raises:
        ConfigError: the real data of `small` is not there.
    """
    return {"smoke": _smoke, "gold": _gold, "small": _small, "paper": _paper}[size]()


def _smoke() -> PipelineConfig:
    return PipelineConfig(
        data=DataConfig(gold=GoldConfig(num_prompts=80, pairs_per_prompt=2), validation_fraction=0.2),
        model=ModelConfig(name="tiny", max_seq_len=256),
        train=TrainConfig(
            lr=1e-3, steps=20, warmup_steps=1, pairs_per_step=8, eval_every=4, log_every=4, token_budget=8192
        ),
        evaluate=EvaluateConfig(num_resamples=200, train_pairs=60),
        **sections("experiment smoke"),
    )


def _gold() -> PipelineConfig:
    return PipelineConfig(
        # 1,008 prompts are tested on, the same ones in every cell; 54 choose the checkpoint; 738 are trained on.
        data=DataConfig(
            gold=GoldConfig(num_prompts=1800, pairs_per_prompt=3),
            test_seed=0,
            test_fraction=0.56,
            validation_fraction=0.03,
        ),
        model=ModelConfig(name="tiny", max_seq_len=256),
        # 1.8 passes over 2,214 pairs, as many as the validation plan's 500 steps make over its 5,000.
        train=TrainConfig(
            lr=1e-3, steps=500, warmup_steps=25, pairs_per_step=8, eval_every=50, log_every=50, token_budget=8192
        ),
        evaluate=EvaluateConfig(num_resamples=200, train_pairs=300),
        **sections("experiment gold"),
    )


def _small() -> PipelineConfig:
    folder = os.environ.get("RM_OPT_DATA")
    files = [Path(folder or ".") / f"alpacaeval_{part}.parquet" for part in ("train", "test")]
    if folder is None or not all(file.is_file() for file in files):
        raise ConfigError(
            f"size small needs {files[0].name} and {files[1].name}, and they are not in RM_OPT_DATA "
            f"({folder or 'which is not set'}): it compares recipes on real preferences. experiments/README.md says "
            "how to build the files; size smoke needs none."
        )
    return PipelineConfig(
        # Two pairs of each of 495 prompts to train on, 110 of 55 others to choose a checkpoint by (among 26 luck chose,
        # and the recipe that chooses was worse for it), all 2,664 of 137 to test on.
        data=DataConfig(source=str(files[0]), eval_source=str(files[1]), pairs_per_prompt=2, validation_fraction=0.1),
        model=ModelConfig(name="minilm", max_seq_len=64),
        # 48 steps see 384 pairs once: what a minute a cell allows. fp32: without AMX units bf16 takes twice as long.
        train=TrainConfig(
            lr=1e-4, steps=48, pairs_per_step=8, warmup_steps=4, eval_every=8, log_every=8, token_budget=8192
        ),
        evaluate=EvaluateConfig(num_resamples=200, train_pairs=100),
        **sections("experiment small"),
    )


def _paper() -> PipelineConfig:
    return PipelineConfig(
        data=DataConfig(
            source="stanfordnlp/SHP", split="train", limit=5000, eval_split="test", eval_limit=1000, pairs_per_prompt=5
        ),
        model=ModelConfig(name="Qwen/Qwen2.5-0.5B", max_seq_len=1024),
        train=TrainConfig(steps=1000, eval_every=100, token_budget=8192, precision="bf16"),
        **sections("experiment paper"),
    )
