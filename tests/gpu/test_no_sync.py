"""Between logged steps the host does not wait for the GPU; skipped where there is none."""

import math

import pytest
import torch

from rmcore.config.model import ModelConfig
from rmcore.config.train import TrainConfig
from rmcore.core.errors import TrainingError
from rmcore.core.progress import silent
from rmcore.core.tracking import MemoryTracker
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.training.loop import Trainer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]

STEPS, LOG_EVERY = 9, 4


def make_trainer(folder, gold_pairs, optimizer, report=silent):
    rm = BradleyTerryRM.new(ModelConfig(name="tiny", max_seq_len=96), seed=0, device=torch.device("cuda"))
    shape = {"steps": STEPS, "log_every": LOG_EVERY, "pairs_per_step": 4, "lr": 1e-3, "warmup_steps": 0}
    config = TrainConfig(**shape, precision="bf16", optimizer=optimizer)
    pairs = rm.renderer.tokenize_pairs(gold_pairs[:32])
    trainer = Trainer(
        rm, config, train=pairs, validation=[], folder=folder, tracker=MemoryTracker(), seed=0, report=report
    )
    assert trainer.packing is not None, "padded rows make Hugging Face look at the mask on the host"
    return trainer


def forbid_waiting(step, total, text):
    """After each step but the last before a logged one; the first has things to set up."""
    is_logged = (step + 1) % LOG_EVERY == 0 or step + 1 >= total
    torch.cuda.set_sync_debug_mode("default" if is_logged else "error")


@pytest.fixture
def waiting_allowed_after():
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd"])
def test_nothing_between_logged_steps_waits(tmp_path, gold_pairs, waiting_allowed_after, optimizer):
    trainer = make_trainer(tmp_path, gold_pairs, optimizer, forbid_waiting)
    result = trainer.run()
    assert result.num_steps == STEPS
    assert list(trainer.progress.rows) == [4, 8, 9]


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd"])
def test_a_bad_step_between_logged_ones_leaves_the_weights_before_it(tmp_path, gold_pairs, optimizer):
    weights = []

    def keep(step, total, text):
        if step == 2:
            weights.extend(value.clone() for value in trainer.rm.model.state_dict().values())

    trainer = make_trainer(tmp_path, gold_pairs, optimizer, keep)
    seen = []

    def spoil(gradient):
        seen.append(1)
        return gradient * math.nan if len(seen) == 3 else gradient  # one micro-batch a step

    trainer.rm.model.score.weight.register_hook(spoil)
    with pytest.raises(TrainingError, match=r"^step 3: .*not applied"):
        trainer.run()
    assert trainer.progress.step == 2
    assert all(torch.equal(a, b) for a, b in zip(trainer.rm.model.state_dict().values(), weights, strict=True))
