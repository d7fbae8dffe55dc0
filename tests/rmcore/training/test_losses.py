import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rmcore.config.train import TrainConfig
from rmcore.training.losses import PairLoss, bradley_terry_loss_sum, make_bradley_terry, split_rewards

REWARDS = st.lists(st.tuples(st.floats(-50, 50), st.floats(-50, 50)), min_size=1, max_size=20)
ANNOTATED = st.floats(-30, 30) | st.just(math.nan)
PAIRS = st.lists(st.tuples(st.floats(-20, 20), st.floats(-20, 20), ANNOTATED), min_size=1, max_size=12)
LOSSES = st.builds(
    PairLoss,
    beta=st.floats(0.1, 3),
    label_smoothing=st.floats(0, 0.9),
    regularization_lambda=st.sampled_from([0.0, 0.01, 0.3]),
    margin_regularization=st.sampled_from([0.0, 0.02, 0.5]),
    centering=st.sampled_from([0.0, 0.01, 0.2]),
    target_margin_scale=st.none() | st.floats(0.05, 2),
    target_margin_cap=st.floats(0.5, 5),
)
EVERYTHING = PairLoss(1.5, 0.1, 0.01, 0.02, 0.03, target_margin_scale=0.5, target_margin_cap=2.0)


def sides(rewards):
    table = torch.tensor(rewards, dtype=torch.float64)
    return table[:, 0], table[:, 1]


def columns(pairs):
    return torch.tensor(pairs, dtype=torch.float64).unbind(1)


def written_out(loss, chosen, rejected, annotated):
    """The loss of one pair in plain Python."""
    target = 0.0
    if loss.target_margin_scale is not None and not math.isnan(annotated):
        cap = loss.target_margin_cap
        target = max(-cap, min(cap, loss.target_margin_scale * annotated))
    logit = loss.beta * (chosen - rejected - target)
    entropy = (1 - loss.label_smoothing / 2) * math.log1p(math.exp(-logit))
    entropy += loss.label_smoothing / 2 * math.log1p(math.exp(logit))
    penalty = loss.regularization_lambda * (chosen**2 + rejected**2) / 2
    penalty += loss.margin_regularization * (chosen - rejected) ** 2 + loss.centering * (chosen + rejected) ** 2
    return entropy + penalty


@given(LOSSES, PAIRS)
def test_it_is_the_sum_of_its_terms_written_out(loss, pairs):
    expected = math.fsum(written_out(loss, *pair) for pair in pairs)
    assert loss(*columns(pairs)).item() == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.slow
@given(LOSSES, PAIRS, st.data())
def test_sums_add_up_over_any_cut_of_the_pairs(loss, pairs, data):
    order = data.draw(st.permutations(range(len(pairs))))
    cut = data.draw(st.integers(0, len(pairs)))
    whole = columns(pairs)
    parts = [loss(*(column[list(part)] for column in whole)) for part in (order[:cut], order[cut:])]
    assert sum(parts).item() == pytest.approx(loss(*whole).item(), rel=1e-12)


@given(REWARDS)
def test_a_pair_without_annotation_asks_for_no_margin(rewards):
    chosen, rejected = (side.requires_grad_() for side in sides(rewards))
    loss = EVERYTHING(chosen, rejected, torch.full_like(chosen, math.nan))
    without = dataclasses.replace(EVERYTHING, target_margin_scale=None)(chosen, rejected)
    assert loss.item() == without.item()
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(loss, (chosen, rejected)))


def test_margins_that_are_asked_for_and_missing_are_an_error():
    with pytest.raises(ValueError, match=r"target_margin_scale=0\.5.*leave the scale out"):
        EVERYTHING(torch.zeros(2), torch.zeros(2))


def test_the_builder_passes_every_loss_setting_on():
    fields = {field.name for field in dataclasses.fields(PairLoss)} - {"target_margin_cap"}  # a constant
    settings = {
        name: value for name, value in dataclasses.asdict(EVERYTHING).items() if name in TrainConfig.model_fields
    }
    assert settings.keys() == fields
    assert not [name for name in fields if getattr(EVERYTHING, name) == getattr(PairLoss(), name)]  # else unseen
    assert make_bradley_terry(TrainConfig(**settings)) == dataclasses.replace(EVERYTHING, target_margin_cap=3.0)


@pytest.mark.parametrize("shape", [(4, 1), (3,)])
def test_shapes_that_would_broadcast_are_refused(shape):
    with pytest.raises(ValueError, match="both must be"):
        bradley_terry_loss_sum(torch.zeros(4), torch.zeros(shape))
    with pytest.raises(ValueError, match="one number per pair"):
        EVERYTHING(torch.zeros(4), torch.zeros(4), torch.zeros(shape))


def test_rewards_are_split_chosen_first_in_float32():
    chosen, rejected = split_rewards(torch.arange(6, dtype=torch.bfloat16).reshape(6, 1))
    assert chosen.tolist() == [0, 1, 2]
    assert rejected.tolist() == [3, 4, 5]
    assert chosen.dtype == torch.float32
