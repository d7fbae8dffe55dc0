"""The model and the pairs that all sides of benchmarks/landscape.py share: the same weights in every process."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from throughput_sides import QWEN_SHAPES, model_config
from torch import Tensor, nn
from torch.nn.functional import softplus
from transformers import AutoModelForSequenceClassification

from rmcore.config.model import ModelConfig
from rmcore.data.pair import prompt_text
from rmcore.data.readers.sources import load_pairs
from rmcore.data.rendering import Rendering, TokenizedPair
from rmcore.landscape.pair_rows import Rows, checked_rows, margins
from rmcore.landscape.sample import CurvatureSample
from rmcore.models.batching import pad_pairs
from rmcore.models.device import pick_device
from rmcore.models.packing.rows import PaddedRows
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.models.tiny import tiny_tokenizer

MODELS = {"tiny": 1e-3, "minilm": 5e-5, "qwen2.5-0.5b": 1e-4}
"""Learning rate of the training steps before the measurement. The last starts from random weights."""
FILE = "alpacaeval_train.parquet"
SEED = 0
PAIRS_PER_STEP = 16


@dataclass(frozen=True)
class Subject:
    """What is measured: the model and the pairs."""

    rm: BradleyTerryRM
    sample: CurvatureSample

    @property
    def batch(self) -> PaddedRows:
        """All pairs as one micro-batch, the only form in which PyHessian keeps its graph."""
        return pad_pairs(self.sample.pairs, pad_id=self.sample.pad_id)

    @property
    def rows(self) -> Rows:
        """The same on the model's device."""
        return Rows(*(tensor.to(self.rm.device) for tensor in checked_rows(self.batch)))

    def start(self, size: int) -> Tensor:
        """The vector that every Lanczos starts from: as hessian-eigenthings draws it."""
        return torch.randn(size, generator=torch.Generator().manual_seed(SEED)).to(self.rm.device)


def prepare(model: str, num_pairs: int, max_seq_len: int, train_steps: int, out: Path) -> Subject:
    """The model after its training steps, and the pairs to measure on, which are others than it was trained on."""
    found = load_pairs(str(Path(os.environ.get("RM_OPT_DATA", ".")) / FILE)).pairs
    order = np.random.default_rng(SEED).permutation(len(found))
    measured = [found[index] for index in order[:num_pairs]]
    rm = make_rm(model, max_seq_len, pick_device("auto"))
    weights = out / f"weights-{model}-{max_seq_len}-{train_steps}.pt"
    if train_steps and weights.is_file():
        rm.model.load_state_dict(torch.load(weights, map_location=rm.device))
    elif train_steps:
        # From the end, so that they are the same ones for any number of measured pairs.
        trained = [found[index] for index in order[::-1][: train_steps * PAIRS_PER_STEP]]
        train(rm, rm.renderer.tokenize_pairs(trained), MODELS[model])
        torch.save(rm.model.state_dict(), weights)
    prompts = [prompt_text(pair.prompt) for pair in measured]
    sample = CurvatureSample(rm.renderer.tokenize_pairs(measured), prompts, rm.pad_id)
    return Subject(rm, sample)


def make_rm(model: str, max_seq_len: int, device: torch.device) -> BradleyTerryRM:
    """The model as it starts: the same weights in every process."""
    if model not in QWEN_SHAPES:
        return BradleyTerryRM.new(ModelConfig(name=model, max_seq_len=max_seq_len), seed=SEED, device=device)
    torch.manual_seed(SEED)
    with device:  # drawing half a billion weights on a CPU takes minutes
        shape = AutoModelForSequenceClassification.from_config(model_config(model), dtype=torch.float32)
    return BradleyTerryRM(shape, tiny_tokenizer(), Rendering("plain", max_seq_len))


def train(rm: BradleyTerryRM, pairs: Sequence[TokenizedPair], learning_rate: float) -> None:
    """Plain steps: at initialisation both ends of the spectrum mirror each other, which is a case of its own."""
    rm.model.eval()
    optimizer = torch.optim.AdamW(rm.model.parameters(), lr=learning_rate)
    for start in range(0, len(pairs), PAIRS_PER_STEP):
        mean_loss(rm.model, checked_rows(pad_pairs(pairs[start : start + PAIRS_PER_STEP], pad_id=rm.pad_id))).backward()
        optimizer.step()
        optimizer.zero_grad()


def mean_loss(module: nn.Module, rows: Rows) -> Tensor:
    """The loss whose curvature is measured."""
    return softplus(-margins(module, rows, next(module.parameters()).device)).mean()
