"""Training on packed rows is training on padded rows: same losses, same gradients' norms, same rewards at the end."""

import numpy as np
import pytest

pytestmark = pytest.mark.slow


def trajectory(training):
    """Losses, gradient norms and margins of every step, and the rewards of the held-out pairs at the end."""
    names = ("train/loss", "train/grad_norm", "train/mean_margin")
    rows = training.rows()
    assert len(rows) == 10
    steps = np.array([[rows[step][name] for name in names] for step in sorted(rows)])
    return steps, training.trainer.best_rewards


def test_ten_steps_are_the_same_packed_and_padded(tmp_path, start):
    """With adapters and recomputed layers; without, `tests/invariant/test_trajectory.py` shows it."""
    settings = {"steps": 10, "eval_every": 10, "token_budget": 512, "gradient_checkpointing": True}
    packed, padded = (
        start(tmp_path / str(packing), model={"lora": {"rank": 4}}, packing=packing, **settings).run()
        for packing in (True, False)
    )
    assert packed.trainer.packing is not None
    assert padded.trainer.packing is None
    for found, expected in zip(trajectory(packed), trajectory(padded), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)
