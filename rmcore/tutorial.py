"""Names of the RM-Optimizer tutorial that are other names for what the platform has; everything else is its own.

`docs/tutorial-names.md` lists each call of the tutorial with the module that answers it.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from rmcore.config.model import ModelConfig
from rmcore.config.train import TrainConfig
from rmcore.core.tracking import NullTracker
from rmcore.data.integrity import select_training_pairs
from rmcore.data.pair import PreferencePair
from rmcore.data.rendering import TokenizedPair
from rmcore.ensembles.score import readable_pairs
from rmcore.models.batching import pad_pairs
from rmcore.models.device import pick_device
from rmcore.models.packing.rows import PaddedRows
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.policy.sampling.served_policy import ServedPolicy, create_vllm_policy_publisher
from rmcore.serving.client import RewardClient
from rmcore.training.loop import Trainer, TrainResult

BaseRewardModel = BradleyTerryRM
RMTrainerConfig = TrainConfig
create_vllm_publisher = create_vllm_policy_publisher


def create_dataloader(
    pairs: Sequence[PreferencePair],
    model: BradleyTerryRM,
    batch_size: int = 16,
    *,
    shuffle: bool = False,
    seed: int = 0,
) -> list[PaddedRows]:
    """Return micro-batches of at most `batch_size` whole pairs, right-padded, chosen rows first: (2P, L) each.

    `BradleyTerryRM.compute_loss` and `HessianAnalyzer.compute_spectrum` take them. Training does not need them: it cuts
    its own micro-batches under a token budget.

    Raises:
        DataError: the model cannot read a side.
    """
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(seed)) if shuffle else range(len(pairs))
    tokenized = model.renderer.tokenize_pairs([pairs[int(place)] for place in order])
    starts = range(0, len(tokenized), batch_size)
    return [pad_pairs(tokenized[at : at + batch_size], pad_id=model.pad_id) for at in starts]


def train_reward_model(
    model: BradleyTerryRM | str,
    train_pairs: Sequence[PreferencePair],
    eval_pairs: Sequence[PreferencePair] = (),
    config: TrainConfig | None = None,
    *,
    output_dir: str | Path = "checkpoints_rm",
    seed: int = 0,
    device: str = "auto",
) -> TrainResult:
    """Train a reward model on pairs, choosing the best step on `eval_pairs` where there are any.

    A name or folder is loaded as a new reward model on its backbone. Pairs that the model cannot read are left out and
    counted on standard error. The best checkpoint is OUTPUT_DIR/best. `rm-opt train` does the same from files.

    Raises:
        ConfigError, DataError, ModelError, TrainingError: see `rmcore.training.loop.Trainer`.
    """
    chosen = config or TrainConfig()
    if isinstance(model, str):
        model = BradleyTerryRM.new(ModelConfig(name=model), seed=seed, device=pick_device(device))
    train, held_out = (_tokenized(model, pairs, chosen) for pairs in (train_pairs, eval_pairs))
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(model, chosen, train=train, validation=held_out, folder=folder, tracker=NullTracker(), seed=seed)
    return trainer.run()


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


def _tokenized(model: BradleyTerryRM, pairs: Sequence[PreferencePair], config: TrainConfig) -> list[TokenizedPair]:
    if not pairs:
        return []
    read = model.renderer.tokenize_pairs(readable_pairs(model, pairs))
    kept, dropped = select_training_pairs(read, over_length=config.over_length)
    if dropped:
        reason = dropped[0].reason
        print(f"note: {len(dropped)} of {len(pairs)} pairs are left out, the first: {reason}", file=sys.stderr)
    return kept
