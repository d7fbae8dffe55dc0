"""The usual loop's micro-batches: what they hold, and which gradient they give."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rmcore.config.train import TrainConfig
from rmcore.models.batching import MicroBatch, collate, micro_batches, plain_groups, plain_micro_batches
from rmcore.training.losses import make_bradley_terry
from rmcore.training.optimizers import make_optimizer
from rmcore.training.step import StepContext, accumulate_gradient, make_forward

CPU = torch.device("cpu")
NUM_PAIRS = 6
CONFIG = TrainConfig(regularization_lambda=0.01, margin_regularization=0.02)


@given(st.lists(st.integers(1, 60), max_size=40), st.integers(120, 400))
def test_pairs_stay_in_order_within_the_budget_and_no_micro_batch_ends_early(lengths, budget):
    def cost(group):
        return 2 * len(group) * max(lengths[index] for index in group)

    groups = plain_groups(lengths, budget)
    assert list(itertools.chain.from_iterable(groups)) == list(range(len(lengths)))
    assert all(group and cost(group) <= budget for group in groups)
    assert all(cost([*group, after[0]]) > budget for group, after in itertools.pairwise(groups))


@pytest.fixture(scope="module")
def model_and_pairs(tiny_folder, gold_pairs):
    from rmcore.models.reward_model import BradleyTerryRM

    rm = BradleyTerryRM.from_pretrained(tiny_folder, device="cpu", max_seq_len=128)
    return rm.model.double(), rm.renderer.tokenize_pairs(gold_pairs[:NUM_PAIRS]), rm.pad_id


def context(model):
    forward = make_forward(model, make_bradley_terry(CONFIG), "fp32", CPU)
    return StepContext(model, forward, make_optimizer(model, CONFIG), CONFIG.clip, CPU)


def gradient(model, batches: list[MicroBatch], num_pairs: int = NUM_PAIRS):
    """Summed loss, wins and margin, and the gradient as one vector."""
    model.zero_grad()
    sums = accumulate_gradient(context(model), batches, num_terms=num_pairs)
    return sums, torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def uneven_budget(pairs):
    """A budget under which micro-batches hold different numbers of these pairs."""
    lengths = [pair.num_tokens for pair in pairs]
    return next(
        budget
        for budget in range(2 * max(lengths), 2 * sum(lengths))
        if len({len(group) for group in plain_groups(lengths, budget)}) > 1
    )


def test_unequal_micro_batches_count_alike_and_so_their_pairs_do_not(model_and_pairs):
    model, pairs, pad_id = model_and_pairs
    budget = uneven_budget(pairs)
    batches = plain_micro_batches(pairs, token_budget=budget, pad_id=pad_id)
    assert len({batch.num_pairs for batch in batches}) > 1
    sums, grad = gradient(model, batches)
    own_means = [
        gradient(model, [collate(pairs, batch.indices, pad_id=pad_id)], num_pairs=batch.num_pairs)[1]
        for batch in batches
    ]
    torch.testing.assert_close(grad, torch.stack(own_means).mean(0), rtol=1e-4, atol=1e-6)
    pair_sums, pair_grad = gradient(model, micro_batches(pairs, token_budget=budget, pad_id=pad_id))
    assert (grad - pair_grad).norm() > 0.01 * pair_grad.norm()
    torch.testing.assert_close(sums, pair_sums, rtol=1e-5, atol=1e-6)  # what is logged
