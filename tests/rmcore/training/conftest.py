"""A small training that a test can start, stop and resume."""

import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

TRAIN = {
    "steps": 6, "eval_every": 2, "log_every": 1, "lr": 1e-3, "pairs_per_step": 4, "warmup_steps": 0,
    "token_budget": 384, "resume_every_seconds": 1e9,
}  # fmt: skip
NUM_TRAIN, NUM_HELD_OUT = 20, 10


class Training:
    """One Trainer on the gold world with what a test wants to look at: `trainer`, `rm`, `tracker`, `result`."""

    def __init__(
        self,
        folder: Path,
        pairs,
        held_out,
        *,
        model=None,
        stop=None,
        callbacks=(),
        settings=None,
        ranks=None,
        **changes,
    ):
        """`stop` is called with each step done; it may raise a signal. `changes` are settings of the training."""
        from rmcore.config.model import ModelConfig
        from rmcore.config.train import TrainConfig
        from rmcore.core.progress import silent
        from rmcore.core.tracking import MemoryTracker
        from rmcore.models.reward_model import BradleyTerryRM
        from rmcore.training.loop import Trainer
        from rmcore.training.ranks import ALONE

        self.folder = folder
        config = ModelConfig.model_validate({"name": "tiny-small", "max_seq_len": 96} | (model or {}))
        self.rm = BradleyTerryRM.new(config, seed=0, device=torch.device("cpu"))
        self.tracker = MemoryTracker()
        self.trainer = Trainer(
            self.rm,
            TrainConfig.model_validate(TRAIN | changes),
            train=self.rm.renderer.tokenize_pairs(pairs),
            validation=self.rm.renderer.tokenize_pairs(held_out),
            folder=folder,
            tracker=self.tracker,
            seed=3,
            report=(lambda step, total, text: stop(step)) if stop else silent,
            callbacks=callbacks,
            settings=settings,
            ranks=ranks or ALONE,
        )

    def run(self):
        """Run to the end."""
        self.result = self.trainer.run()
        return self

    def rows(self):
        """What was measured, by step, without what depends on the clock."""
        return {
            step: {name: value for name, value in values.items() if not name.startswith("cost/")}
            for step, values in self.trainer.progress.rows.items()
        }

    def losses(self):
        return [values["train/loss"] for _, values in self.tracker.rows if "train/loss" in values]

    def checkpoints(self):
        """All weights that it left, by place; the states of an unfinished one are no result."""
        files = [path for path in sorted(self.folder.rglob("*.safetensors")) if "resume" not in path.parts]
        return {str(path.relative_to(self.folder)): load_file(path) for path in files}

    def assert_same(self, other):
        """The same weights, measurements, choices and checkpoints, to the last bit."""
        assert same_tensors(self.rm.model.state_dict(), other.rm.model.state_dict())
        assert self.rows() == other.rows()
        assert self.trainer.progress.selection == other.trainer.progress.selection
        np.testing.assert_array_equal(self.trainer.best_rewards, other.trainer.best_rewards)
        for name in ("num_steps", "best_step", "best_value", "kept_steps", "num_pairs", "num_tokens", "stop_reason"):
            assert getattr(self.result, name) == getattr(other.result, name), name
        left, expected = self.checkpoints(), other.checkpoints()
        assert left.keys() == expected.keys()
        assert all(same_tensors(left[place], weights) for place, weights in expected.items())


def same_tensors(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in other)


@pytest.fixture(scope="session")
def start(gold_pairs):
    """Make a Training on 20 gold pairs with 10 held out (or none); it has not run yet."""

    def make(folder, *, pairs=None, held_out=None, **more):
        some = gold_pairs[:NUM_TRAIN] if pairs is None else pairs
        rest = gold_pairs[NUM_TRAIN : NUM_TRAIN + NUM_HELD_OUT] if held_out is None else held_out
        return Training(folder, some, rest, **more)

    return make


@pytest.fixture(scope="session")
def stopped(start):
    """Run a Training until a step is done, and stop it as by Ctrl-C."""

    def run(folder, step, **changes):
        def stop(done):
            if done == step:
                signal.raise_signal(signal.SIGINT)

        with pytest.raises(KeyboardInterrupt):
            start(folder, stop=stop, **changes).run()

    return run


@pytest.fixture(scope="session")
def undisturbed(start, tmp_path_factory):
    """A whole training by the settings above, to compare with: read it, and change nothing."""
    return start(tmp_path_factory.mktemp("undisturbed")).run()


@pytest.fixture(scope="session")
def make_stepper():
    """Make a Stepper of a model on tokenized pairs, and its feed; no step has run. `changes` are settings."""
    from rmcore.config.train import TrainConfig
    from rmcore.training.feed import make_feed
    from rmcore.training.losses import make_bradley_terry
    from rmcore.training.optimizers import make_optimizer
    from rmcore.training.ranks import ALONE
    from rmcore.training.step import StepContext, Stepper, make_forward

    def make(rm, pairs, *, token_budget, num_steps=3, packing=None, **changes):
        config = TrainConfig.model_validate({"lr": 1e-3, "pairs_per_step": 4} | changes)
        feed = make_feed(
            pairs, config, num_steps=num_steps, seed=0, token_budget=token_budget, pad_id=rm.pad_id, ranks=ALONE,
            packing=packing,
        )  # fmt: skip
        forward = make_forward(rm.model, make_bradley_terry(config), config.precision, rm.device)
        return Stepper(StepContext(rm.model, forward, make_optimizer(rm.model, config), config.clip, rm.device), feed)

    return make


@pytest.fixture(autouse=True)
def audible_interruption():
    """Ctrl-C as in a terminal: a shell that starts the tests in the background would have them ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
