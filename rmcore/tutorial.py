"""Names of the RM-Optimizer tutorial for what the platform has under others.

`docs/tutorial-names.md` lists each call of the tutorial with the module that answers it.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rmcore.config.model import ModelConfig
from rmcore.config.train import TrainConfig
from rmcore.data.pair import PreferencePair
from rmcore.data.rendering import Renderer, Rendering, choose_rendering, count_cut
from rmcore.data.splits import split_by_prompt
from rmcore.frontdoor import load_pairs, train
from rmcore.models.batching import pad_pairs
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.policy.sampling.served_policy import ServedPolicy, create_vllm_policy_publisher
from rmcore.serving.client import RewardClient

BaseRewardModel = BradleyTerryRM
RMTrainerConfig = TrainConfig
create_vllm_publisher = create_vllm_policy_publisher
SPLITS = {"train": 0.9, "validation": 0.1}
"""Shares of the prompts that are trained on, and that the best step is chosen on."""


class PairTensors(NamedTuple):
    """P whole pairs as right-padded rows, (P, L) long each: what `BradleyTerryRM.compute_loss(*tensors)` takes."""

    chosen_ids: Tensor
    chosen_mask: Tensor
    rejected_ids: Tensor
    rejected_mask: Tensor

    @property
    def input_ids(self) -> Tensor:
        """(2P, L), chosen rows first, as `HessianAnalyzer.compute_spectrum` reads them."""
        return torch.cat([self.chosen_ids, self.rejected_ids])

    @property
    def attention_mask(self) -> Tensor:
        """(2P, L), 1 on real tokens."""
        return torch.cat([self.chosen_mask, self.rejected_mask])


def create_dataloader(
    data_path: str | Path | Sequence[PreferencePair],
    tokenizer: PreTrainedTokenizerBase,
    batch_size: int = 16,
    *,
    max_seq_len: int | None = None,
    shuffle: bool = False,
    seed: int = 0,
) -> list[PairTensors]:
    """Return micro-batches of at most `batch_size` whole pairs of a file, or of pairs.

    The tokenizer of a checkpoint renders as that was trained, another one as a new model's. Sides that are cut are
    counted on standard error. Training does not need this: it cuts its own micro-batches under a token budget.

    Args:
        data_path: a source that `rmcore.load_pairs` reads, or pairs.
        tokenizer: `BradleyTerryRM.tokenizer`.
        batch_size: pairs of a micro-batch; the last one may have fewer.
        max_seq_len: most tokens of a side; left out, what the checkpoint was trained with, else `ModelConfig`'s.
        shuffle: put the pairs into an order drawn under `seed`.
        seed: of that order.

    Raises:
        DataError: the source or a pair cannot be read.
        ModelError: the checkpoint was trained with a rendering function.
    """
    pairs = load_pairs(str(data_path)) if isinstance(data_path, str | Path) else data_path
    recorded = Rendering.load(Path(tokenizer.name_or_path)) if tokenizer.name_or_path else None
    limit = max_seq_len or (recorded.max_seq_len if recorded else ModelConfig().max_seq_len)
    rendering = (
        choose_rendering(tokenizer, use_chat_template=True, max_seq_len=limit, render_fn=None)
        if recorded is None
        else Rendering(recorded.format, limit, recorded.render_fn)
    )
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(seed)) if shuffle else range(len(pairs))
    tokenized = Renderer(tokenizer, rendering).tokenize_pairs([pairs[int(place)] for place in order])
    if num_cut := count_cut(tokenized)["num_cut_sides"]:
        print(f"note: {num_cut} of {2 * len(pairs)} sides are cut to {limit} tokens.", file=sys.stderr)
    batches = []
    for at in range(0, len(tokenized), batch_size):
        rows = pad_pairs(tokenized[at : at + batch_size], pad_id=int(tokenizer.pad_token_id))
        (chosen, rejected), (chosen_mask, rejected_mask) = rows.input_ids.chunk(2), rows.attention_mask.chunk(2)
        batches.append(PairTensors(chosen, chosen_mask, rejected, rejected_mask))
    return batches


def train_reward_model(
    model_name: str,
    data_path: str | Path,
    optimizer: str = "adamw",
    epochs: float = 1.0,
    batch_size: int = 16,
    *,
    output_dir: str | Path = "checkpoints",
    seed: int = 0,
    **settings: Any,
) -> Path:
    """Train a reward model on a file of pairs and return the folder of its best step, OUTPUT_DIR/best.

    The best step is chosen on a tenth of the prompts, which are not trained on.

    Args:
        model_name: a folder, a hub name, `minilm` (pretrained, 22 M) or `tiny` (from nothing).
        data_path: a source that `rmcore.load_pairs` reads.
        optimizer: adamw, adam, sgd, muon, lion or sam, with AdamW's learning rate unless `lr` is given: SGD needs a
            larger one, Lion a third.
        epochs: passes over the pairs.
        batch_size: pairs of an optimizer step.
        output_dir: folder of the checkpoint and of metrics.csv.
        seed: of the split, the reward head and the order of pairs.
        settings: further arguments of `rmcore.train`, such as max_seq_len, device, lr.

    Raises:
        ConfigError, DataError, ModelError, TrainingError: see `rmcore.train`.
    """
    splits = split_by_prompt(load_pairs(str(data_path)), fractions=SPLITS, seed=seed)
    settings |= {"optimizer": optimizer, "epochs": epochs, "pairs_per_step": batch_size}
    train(splits["train"], model_name, validation=splits["validation"], output_dir=output_dir, seed=seed, **settings)
    return Path(output_dir) / "best"


def get_reward_model_version(address: str, *, token: str | None = None) -> int:
    """Return the version of the weights that the reward server at `address` answers with; it rises with each update.

    Raises:
        ServingError: the server cannot be reached or refuses the token.
    """
    with RewardClient(address, token=token) as client:
        return client.version().weight_version


def get_policy_version(served: ServedPolicy) -> int:
    """Return how many times the policy's weights were published to the vLLM that draws its samples."""
    return served.version
