import copy
import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rmcore.config.train import TrainConfig
from rmcore.core.errors import TrainingError
from rmcore.models.batching import collate, micro_batches, plain_groups, plain_micro_batches
from rmcore.training.losses import PairLoss, make_bradley_terry
from rmcore.training.optimizers import make_optimizer
from rmcore.training.step import StepContext, accumulate_gradient, make_forward, read_steps, train_step

CPU = torch.device("cpu")
NUM_PAIRS = 6
LOSS = PairLoss(
    beta=1.3, label_smoothing=0.1, regularization_lambda=0.01, margin_regularization=0.02, centering=0.01,
    target_margin_scale=0.5,
)  # fmt: skip


def context(model, config, loss=None):
    forward = make_forward(model, loss or make_bradley_terry(config), config.precision, CPU)
    return StepContext(model, forward, make_optimizer(model, config), config.clip, CPU)


@pytest.fixture(scope="module")
def model_and_pairs(tiny_folder, gold_pairs):
    from rmcore.models.reward_model import BradleyTerryRM

    rm = BradleyTerryRM.from_pretrained(tiny_folder, device="cpu", max_seq_len=128)
    return rm.model.double(), rm.renderer.tokenize_pairs(gold_pairs[:NUM_PAIRS]), rm.pad_id


def gradient(model, batches, num_pairs=NUM_PAIRS):
    """Summed loss, wins and margin, and the gradient as one vector."""
    model.zero_grad()
    sums = accumulate_gradient(context(model, TrainConfig(), LOSS), batches, num_terms=num_pairs)
    return sums, torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


@pytest.mark.slow
@given(st.permutations(range(NUM_PAIRS)), st.sets(st.integers(1, NUM_PAIRS - 1), max_size=4))
@settings(max_examples=8)
def test_loss_and_gradient_do_not_depend_on_cut_or_order(model_and_pairs, order, cuts):
    model, pairs, pad_id = model_and_pairs
    bounds = [0, *sorted(cuts), NUM_PAIRS]
    batches = [collate(pairs, order[start:end], pad_id=pad_id) for start, end in itertools.pairwise(bounds)]
    sums, grad = gradient(model, batches)
    expected_sums, expected = gradient(model, [collate(pairs, range(NUM_PAIRS), pad_id=pad_id)])
    torch.testing.assert_close(sums, expected_sums, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-6)  # float32 inside Qwen2's norms and softmax


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 5, 8])
def test_the_ranks_shares_add_up_to_the_same_gradient(model_and_pairs, world):
    """What the ranks compute apart, idle micro-batches included, is together what one process computes."""
    model, pairs, pad_id = model_and_pairs
    parts = [
        gradient(model, micro_batches(pairs, token_budget=300, pad_id=pad_id, rank=rank, world=world))
        for rank in range(world)
    ]
    expected_sums, expected = gradient(model, [collate(pairs, range(NUM_PAIRS), pad_id=pad_id)])
    torch.testing.assert_close(sum(sums for sums, _ in parts), expected_sums, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(sum(grad for _, grad in parts), expected, rtol=1e-4, atol=1e-6)


def test_unequal_micro_batches_count_alike_and_so_their_pairs_do_not(model_and_pairs):
    model, pairs, pad_id = model_and_pairs
    longest = 2 * max(pair.num_tokens for pair in pairs)
    budgets = range(longest, len(pairs) * longest)
    lengths = [pair.num_tokens for pair in pairs]
    budget = next(one for one in budgets if len({len(group) for group in plain_groups(lengths, one)}) > 1)
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


def test_a_loss_that_is_not_finite_stops_at_once_and_leaves_the_weights(rm, gold_pairs):
    pairs = rm.renderer.tokenize_pairs(gold_pairs[:3])
    batch = collate(pairs, range(3), pad_id=rm.pad_id)
    with torch.no_grad():
        rm.model.score.weight.fill_(float("nan"))
    before = copy.deepcopy(rm.model.state_dict())
    ids = [pair.pair_id for pair in pairs]
    with pytest.raises(TrainingError, match=rf"step 7: loss nan.*{ids[0]}"):
        train_step(context(rm.model, TrainConfig(optimizer="sgd", lr=1.0)), [batch], step=7, pair_ids=ids)
    for name, value in rm.model.state_dict().items():
        assert torch.equal(torch.nan_to_num(value), torch.nan_to_num(before[name])), name


def test_a_step_reports_means_over_its_pairs(rm, gold_pairs):
    pairs = rm.renderer.tokenize_pairs(gold_pairs[:5])
    rewards = torch.from_numpy(rm.score_pairs(gold_pairs[:5]))
    batches = [collate(pairs, [0, 1], pad_id=rm.pad_id), collate(pairs, [2, 3, 4], pad_id=rm.pad_id)]
    config = TrainConfig(label_smoothing=0, regularization_lambda=0, optimizer="sgd")
    [result] = read_steps([train_step(context(rm.model, config), batches, step=1, pair_ids=["a"] * 5)])
    margins = rewards[:, 0] - rewards[:, 1]
    assert result.num_pairs == 5
    assert result.mean_margin == pytest.approx(margins.mean().item(), abs=1e-5)
    assert result.loss == pytest.approx(torch.nn.functional.softplus(-margins).mean().item(), abs=1e-5)
    assert result.pairwise_accuracy == pytest.approx((margins > 0).float().mean().item())
    assert result.num_tokens >= result.num_real_tokens == sum(len(p.chosen.ids) + len(p.rejected.ids) for p in pairs)


def test_annotated_margins_reach_the_loss(rm, gold_pairs):
    annotated = [0.4, 26.0, None, -1.0]
    some = [replace(pair, target_margin=margin) for pair, margin in zip(gold_pairs[:4], annotated, strict=True)]
    pairs = rm.renderer.tokenize_pairs(some)
    batch = collate(pairs, range(4), pad_id=rm.pad_id)
    bare = TrainConfig(label_smoothing=0, regularization_lambda=0, target_margin_scale=1.0)
    with torch.no_grad():
        loss, margins = make_forward(rm.model, make_bradley_terry(bare), "fp32", CPU)(batch.rows, batch.target_margins)
    asked = torch.tensor([0.4, 3.0, 0.0, -1.0])
    torch.testing.assert_close(loss, torch.nn.functional.softplus(asked - margins).sum())


def test_an_update_is_no_longer_than_the_clip_allows(rm, gold_pairs):
    pairs = rm.renderer.tokenize_pairs(gold_pairs[:3])
    before = torch.cat([parameter.detach().flatten() for parameter in rm.model.parameters()])
    sgd = TrainConfig(optimizer="sgd", lr=1.0, weight_decay=0, clip=0.25)
    batch = collate(pairs, range(3), pad_id=rm.pad_id)
    [seen] = read_steps([train_step(context(rm.model, sgd), [batch], step=1, pair_ids=["a"] * 3)])
    moved = torch.cat([parameter.detach().flatten() for parameter in rm.model.parameters()]) - before
    assert seen.grad_norm > 0.25
    assert moved.norm().item() == pytest.approx(0.25, rel=1e-3)


def test_a_tie_is_half_a_win(rm, gold_pairs):
    equal = [replace(pair, rejected=pair.chosen) for pair in rm.renderer.tokenize_pairs(gold_pairs[:2])]
    batch = collate(equal, range(2), pad_id=rm.pad_id)
    [seen] = read_steps([train_step(context(rm.model, TrainConfig()), [batch], step=1, pair_ids=["a"] * 2)])
    assert (seen.mean_margin, seen.pairwise_accuracy) == (0.0, 0.5)
