import copy
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rmcore.batching import collate
from rmcore.config import TrainConfig
from rmcore.errors import TrainingError
from rmcore.trainer.step import accumulate_gradient, train_step

CPU = torch.device("cpu")
NUM_PAIRS = 6


@pytest.fixture(scope="module")
def model_and_pairs(tiny_folder, gold_pairs):
    from rmcore.model import BradleyTerryRM

    rm = BradleyTerryRM.from_pretrained(tiny_folder, device="cpu", max_seq_len=128)
    return rm.model.double(), rm.renderer.tokenize_pairs(gold_pairs[:NUM_PAIRS]), rm.pad_id


def gradient(model, batches, config):
    model.zero_grad()
    sums = accumulate_gradient(model, batches, config, num_pairs=NUM_PAIRS, device=CPU)
    return sums, torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


@given(st.permutations(range(NUM_PAIRS)), st.sets(st.integers(1, NUM_PAIRS - 1), max_size=4))
@settings(max_examples=8)
def test_loss_and_gradient_do_not_depend_on_cut_or_order(model_and_pairs, order, cuts):
    model, pairs, pad_id = model_and_pairs
    config = TrainConfig(label_smoothing=0.1, regularization_lambda=0.01, beta=1.3)
    bounds = [0, *sorted(cuts), NUM_PAIRS]
    batches = [collate(pairs, order[start:end], pad_id=pad_id) for start, end in itertools.pairwise(bounds)]
    sums, grad = gradient(model, batches, config)
    expected_sums, expected = gradient(model, [collate(pairs, range(NUM_PAIRS), pad_id=pad_id)], config)
    torch.testing.assert_close(sums, expected_sums, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-6)  # float32 inside Qwen2's norms and softmax


def test_a_loss_that_is_not_finite_stops_at_once_and_leaves_the_weights(rm, gold_pairs):
    pairs = rm.renderer.tokenize_pairs(gold_pairs[:3])
    batch = collate(pairs, range(3), pad_id=rm.pad_id)
    with torch.no_grad():
        rm.model.score.weight.fill_(float("nan"))
    before = copy.deepcopy(rm.model.state_dict())
    optimizer = torch.optim.SGD(rm.model.parameters(), lr=1.0)
    ids = [pair.pair_id for pair in pairs]
    with pytest.raises(TrainingError, match=rf"step 7: loss nan.*{ids[0]}"):
        train_step(rm.model, optimizer, [batch], TrainConfig(), step=7, pair_ids=ids, device=CPU)
    for name, value in rm.model.state_dict().items():
        assert torch.equal(torch.nan_to_num(value), torch.nan_to_num(before[name])), name


def test_a_step_reports_means_over_its_pairs(rm, gold_pairs):
    pairs = rm.renderer.tokenize_pairs(gold_pairs[:5])
    rewards = torch.from_numpy(rm.score_pairs(gold_pairs[:5]))
    batches = [collate(pairs, [0, 1], pad_id=rm.pad_id), collate(pairs, [2, 3, 4], pad_id=rm.pad_id)]
    config = TrainConfig(label_smoothing=0, regularization_lambda=0)
    optimizer = torch.optim.SGD(rm.model.parameters(), lr=0.0)
    result = train_step(rm.model, optimizer, batches, config, step=1, pair_ids=["a"] * 5, device=CPU)
    margins = rewards[:, 0] - rewards[:, 1]
    assert result.num_pairs == 5
    assert result.mean_margin == pytest.approx(margins.mean().item(), abs=1e-5)
    assert result.loss == pytest.approx(torch.nn.functional.softplus(-margins).mean().item(), abs=1e-5)
    assert result.pairwise_accuracy == pytest.approx((margins > 0).float().mean().item())
    assert result.num_tokens >= result.num_real_tokens == sum(len(p.chosen.ids) + len(p.rejected.ids) for p in pairs)
