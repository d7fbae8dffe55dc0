"""The dry run counts what the training then computes."""

import pytest

from rmcore.training import plan
from rmcore.training.plan import _computed_tokens


@pytest.mark.slow
def test_planned_tokens_are_those_of_the_training(tmp_path, start, monkeypatch):
    training = start(tmp_path, held_out=[])
    planned, _ = _computed_tokens(training.trainer)
    assert planned == training.run().result.num_tokens
    monkeypatch.setattr(plan, "CUT_STEPS", 3)
    assert _computed_tokens(training.trainer)[0] == pytest.approx(planned, rel=0.2)
