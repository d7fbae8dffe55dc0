"""Training on packed rows is training on padded rows: same losses, same gradients' norms, same rewards at the end."""

import numpy as np
import pytest

pytestmark = pytest.mark.slow

ADAPTED = {"lora": {"rank": 4}}
TEN = {"steps": 10, "eval_every": 10, "token_budget": 512}


def trajectory(training):
    """Losses, gradient norms and margins of every step, and the rewards of the held-out pairs at the end."""
    names = ("train/loss", "train/grad_norm", "train/mean_margin")
    rows = training.rows()
    assert len(rows) == 10
    steps = np.array([[rows[step][name] for name in names] for step in sorted(rows)])
    return steps, training.trainer.best_rewards


def assert_same(one, other):
    for found, expected in zip(trajectory(one), trajectory(other), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("model", "checkpointing"),
    [(None, False), (None, True), (ADAPTED, True)],
    ids=["plain", "checkpointing", "lora+checkpointing"],
)
def test_ten_steps_are_the_same_packed_and_padded(model, checkpointing, tmp_path, start):
    settings = TEN | {"gradient_checkpointing": checkpointing}
    packed = start(tmp_path / "packed", model=model, packing=True, **settings).run()
    padded = start(tmp_path / "padded", model=model, packing=False, **settings).run()
    assert packed.trainer.packing is not None
    assert padded.trainer.packing is None
    assert_same(packed, padded)


def test_the_token_budget_changes_nothing_but_the_number_of_micro_batches(tmp_path, start):
    small, large = (start(tmp_path / str(budget), **TEN | {"token_budget": budget}) for budget in (200, 2048))
    cuts = [len(training.trainer.feed[0][1]) for training in (small, large)]
    assert cuts[0] > cuts[1] == 1
    assert_same(small.run(), large.run())
