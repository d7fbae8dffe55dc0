import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rmcore.losses import bradley_terry_loss_sum, reward_penalty_sum, split_rewards

REWARDS = st.lists(st.tuples(st.floats(-50, 50), st.floats(-50, 50)), min_size=1, max_size=20)


def sides(rewards):
    table = torch.tensor(rewards, dtype=torch.float64)
    return table[:, 0], table[:, 1]


@given(REWARDS, st.floats(-20, 20))
def test_a_constant_on_both_sides_changes_nothing(rewards, shift):
    chosen, rejected = sides(rewards)
    torch.testing.assert_close(
        bradley_terry_loss_sum(chosen + shift, rejected + shift), bradley_terry_loss_sum(chosen, rejected)
    )


@given(REWARDS, st.floats(0.1, 3), st.floats(0, 0.9))
def test_it_is_the_smoothed_cross_entropy_of_the_preference_probability(rewards, beta, smoothing):
    chosen, rejected = sides(rewards)
    expected = 0.0
    for better, worse in rewards:
        log_p = -math.log1p(math.exp(-beta * (better - worse)))
        log_q = -math.log1p(math.exp(beta * (better - worse)))
        expected -= (1 - smoothing / 2) * log_p + smoothing / 2 * log_q
    loss = bradley_terry_loss_sum(chosen, rejected, beta=beta, label_smoothing=smoothing)
    assert loss.item() == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_a_tie_costs_log_2_whatever_the_smoothing():
    tie = torch.zeros(3)
    assert bradley_terry_loss_sum(tie, tie, label_smoothing=0.3).item() == pytest.approx(3 * math.log(2))


@given(REWARDS)
def test_swapping_sides_swaps_the_label(rewards):
    chosen, rejected = sides(rewards)
    torch.testing.assert_close(
        bradley_terry_loss_sum(chosen, rejected, label_smoothing=1.0 - 1e-12),
        bradley_terry_loss_sum(rejected, chosen, label_smoothing=1.0 - 1e-12),
        rtol=1e-6,
        atol=1e-6,
    )


def test_the_penalty_pulls_both_sides_to_zero():
    chosen, rejected = torch.tensor([2.0], requires_grad=True), torch.tensor([-1.0], requires_grad=True)
    reward_penalty_sum(chosen, rejected).backward()
    assert chosen.grad.item() == 2.0
    assert rejected.grad.item() == -1.0


@pytest.mark.parametrize("shape", [(4, 1), (3,)])
def test_shapes_that_would_broadcast_are_refused(shape):
    with pytest.raises(ValueError, match="both must be"):
        bradley_terry_loss_sum(torch.zeros(4), torch.zeros(shape))


def test_a_pair_cut_in_two_is_refused():
    with pytest.raises(ValueError, match="7 rewards, an odd number"):
        split_rewards(torch.zeros(7, 1))


def test_two_labels_are_refused():
    with pytest.raises(ValueError, match="exactly one label"):
        split_rewards(torch.zeros(4, 2))


def test_rewards_are_split_chosen_first_in_float32():
    chosen, rejected = split_rewards(torch.arange(6, dtype=torch.bfloat16).reshape(6, 1))
    assert chosen.tolist() == [0, 1, 2]
    assert rejected.tolist() == [3, 4, 5]
    assert chosen.dtype == torch.float32
