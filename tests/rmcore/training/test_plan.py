"""The dry run counts what the training then computes."""

import pytest

from rmcore.training.plan import _computed_tokens

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("changes", [{}, {"packing": False}, {"batching": "plain"}], ids=str)
def test_planned_tokens_are_those_of_the_training(tmp_path, start, changes):
    training = start(tmp_path, held_out=[], **changes)
    planned, _ = _computed_tokens(training.trainer, training.trainer.train)
    assert planned == training.run().result.num_tokens
