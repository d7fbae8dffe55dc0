"""Ways from an average to its members: heights as written out, none where convex, one where it is planted."""

import copy

import numpy as np
import pytest
import torch
from torch.nn.functional import softplus

from rmcore.data.rendering import TokenizedPair, TokenizedSide
from rmcore.landscape.paths import DISTANCES, paths_from_average, paths_record
from rmcore.landscape.sample import CurvatureSample


@pytest.fixture
def sample():
    rng = np.random.default_rng(0)

    def side():
        return TokenizedSide(rng.integers(1, 8, int(rng.integers(2, 7))).tolist(), 0)

    pairs = [TokenizedPair(f"p{index}", side(), side()) for index in range(24)]
    return CurvatureSample(pairs, [f"prompt {index % 8}" for index in range(24)], 0)


def moved(model, seed, names=("",)):
    """A copy with those parameters moved whose names hold one of `names`."""
    twin = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            if any(part in name for part in names):
                parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return twin


def mixture(models, shares):
    twin = copy.deepcopy(models[0])
    with torch.no_grad():
        for parameter, *own in zip(twin.parameters(), *(model.parameters() for model in models), strict=True):
            parameter.copy_(sum(share * one for share, one in zip(shares, own, strict=True)))
    return twin


def losses(model, sample):
    """(n,) by pair, in the order of the micro-batches."""
    model.eval()
    with torch.no_grad():
        found = [model(rows.input_ids, rows.attention_mask).logits[:, 0].chunk(2) for rows in sample.batches]
    return torch.cat([softplus(rejected - chosen) for chosen, rejected in found]).numpy()


def measured(models, sample, **settings):
    even = mixture(models, [1 / len(models)] * len(models))
    before = [p.detach().clone() for p in even.parameters()]
    named = ((str(number), model) for number, model in enumerate(models))
    paths = paths_from_average(even, named, sample, num_resamples=200, **settings)
    assert all(torch.equal(p, old) for p, old in zip(even.parameters(), before, strict=True))
    return paths


def test_every_height_is_the_loss_above_the_same_mixture_of_the_members_losses(tiny, sample):
    models = [moved(tiny, seed) for seed in range(3)]
    alone = np.array([losses(model, sample) for model in models])
    for number, path in enumerate(measured(models, sample)):
        for place, distance in enumerate(DISTANCES):
            shares = [(1 - distance) / 3 + distance * (member == number) for member in range(3)]
            here = losses(mixture(models, shares), sample)
            assert path.loss[place].value == pytest.approx(here.mean(), rel=1e-9)
            assert path.height[place].value == pytest.approx((here - np.array(shares) @ alone).mean(), abs=1e-9)
            assert path.height[place].ci_low <= path.height[place].value <= path.height[place].ci_high
        assert path.height[-1].value == path.height[-1].ci_high == 0


def test_where_only_a_linear_head_differs_nothing_lies_above_the_members(tiny, sample):
    paths = measured([moved(tiny, seed, names=("score",)) for seed in range(3)], sample)
    assert all(value.ci_high <= 1e-12 for path in paths for value in path.height)
    assert paths[0].height[0].value < -1e-3


def test_the_same_function_elsewhere_has_a_barrier_before_it(tiny, sample):
    """A hidden tanh unit with all its weights turned round is the same function."""
    twin = copy.deepcopy(tiny)
    with torch.no_grad():
        for parameter in (*twin.hidden.parameters(), twin.score.weight):
            parameter.neg_()
    fitted = copy.deepcopy(tiny)
    np.testing.assert_allclose(losses(twin, sample), losses(fitted, sample))
    # Pairs in the order that the model prefers: it is right everywhere, so the average must be worse.
    turned = [
        pair if loss < np.log(2) else TokenizedPair(pair.pair_id, pair.rejected, pair.chosen)
        for pair, loss in zip(sample.pairs, by_pair(tiny, sample), strict=True)
    ]
    paths = measured([fitted, twin], CurvatureSample(turned, sample.prompts, 0))
    assert all(path.height[0].ci_low > 0.05 for path in paths)
    assert all(path.accuracy[-1].value == 1 for path in paths)
    assert paths_record(paths, sample)["num_prompts"] == 8


def by_pair(model, sample):
    """Losses in the order of the pairs."""
    found = losses(model, sample)
    order = [index for group in sample.order for index in group]
    return [found[order.index(place)] for place in range(len(order))]


def test_weights_whose_rewards_are_not_finite_have_no_height(tiny, sample):
    broken = copy.deepcopy(tiny)
    with torch.no_grad():
        broken.score.weight.fill_(float("inf"))
    paths = paths_from_average(broken, iter([("a", tiny), ("b", moved(tiny, 1))]), sample, num_resamples=100)
    for path in paths:
        assert {value.value for value in (*path.height, *path.loss, *path.accuracy)} == {None}
        assert all("not finite" in value.reason for value in path.height)
