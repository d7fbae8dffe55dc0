"""A head on frozen features is the optimum of a convex problem, so what it must be is known exactly."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rmcore.core.errors import ConfigError, DataError, ModelError
from rmcore.ensembles.linear_probes import bootstrap_heads, fit_head
from rmcore.training.losses import bradley_terry_loss_sum


def pairs(num_pairs=120, num_features=8, *, seed=0):
    """Differences of correlated features of very different scales, labelled by a true head."""
    rng = np.random.default_rng(seed)
    mix = rng.standard_normal((num_features, num_features)) * 10 ** rng.uniform(-2, 2, num_features)
    x = rng.standard_normal((num_pairs, num_features)) @ mix
    margin = x @ (rng.standard_normal(num_features) / np.sqrt((x**2).mean(axis=0)))
    return x * np.where(rng.random(num_pairs) < 1 / (1 + np.exp(-margin)), 1, -1)[:, None]


def objective(head, x, weights, l2):
    """The stated objective, from the training loss of this platform, pair by pair."""
    zero = torch.zeros(1, dtype=torch.float64)
    losses = [bradley_terry_loss_sum((row @ head)[None], zero) for row in x]
    scale = (torch.einsum("p,pd->d", weights, x**2) / weights.sum()).sqrt()
    return torch.stack(losses) @ weights + l2 / 2 * ((scale * head) ** 2).sum()


@pytest.mark.slow
@given(
    seed=st.integers(0, 1000),
    shape=st.sampled_from([(40, 3), (60, 12), (10, 30)]),
    l2=st.sampled_from([1e-3, 1.0, 50.0]),
)
def test_the_gradient_at_the_optimum_is_zero(seed, shape, l2):
    x = pairs(*shape, seed=seed)
    weights = np.random.default_rng(seed).integers(1, 4, len(x))
    found = fit_head(x, l2=l2, weights=weights)
    head = torch.tensor(found, requires_grad=True)
    objective(head, torch.tensor(x), torch.tensor(weights, dtype=torch.float64), l2).backward()
    in_standard_units = head.grad.numpy() / np.sqrt(np.average(x**2, axis=0, weights=weights))
    assert np.abs(in_standard_units).max() < 2e-9 * weights.sum()


def test_separable_pairs_have_an_optimum_and_a_dead_feature_no_weight():
    x = np.abs(pairs())
    x[:, 2] = 0.0
    found = fit_head(x, l2=1e-2)
    assert np.isfinite(found).all()
    assert found[2] == 0
    assert (x @ found > 0).all()


def test_members_draw_whole_prompts_and_differ_as_the_data_do():
    x = pairs(400, 4)
    prompts = [str(number // 4) for number in range(len(x))]
    heads = bootstrap_heads(x, prompts, 40, seed=0)
    assert heads.shape == (40, 4)
    np.testing.assert_array_equal(heads, bootstrap_heads(x, prompts, 40, seed=0))
    assert not np.allclose(heads, bootstrap_heads(x, prompts, 40, seed=1))
    # Copies of every pair within its prompt add no information: members differ no less than without them.
    copied = bootstrap_heads(np.repeat(x, 3, axis=0), list(np.repeat(prompts, 3)), 40, seed=0, l2=12.0)
    np.testing.assert_allclose(copied, heads, rtol=1e-5)
    more = bootstrap_heads(pairs(6400, 4), [str(number // 4) for number in range(6400)], 40, seed=0)
    ratio = (x @ heads.T).std(axis=1).mean() / (x @ more.T).std(axis=1).mean()
    assert 2 < ratio < 8  # 16 times the prompts: a quarter of the spread


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"l2": 0.0}, ConfigError, "l2=0.0"),
        ({"weights": np.zeros(120)}, DataError, "add up to 0"),
        ({"weights": np.ones(3)}, DataError, "weights of shape"),
        ({"start": np.ones(3)}, DataError, "no finite head"),
        ({"steps": 1, "l2": 1e-3}, ModelError, "after 1 Newton steps"),
    ],
)
def test_what_cannot_be_fitted_is_refused(change, error, words):
    with pytest.raises(error, match=words):
        fit_head(pairs(), **change)


def test_features_that_are_not_finite_and_a_single_prompt_are_refused():
    x = pairs()
    x[3, 1] = np.nan
    with pytest.raises(DataError, match="1 have features that are not finite"):
        fit_head(x)
    with pytest.raises(DataError, match="1 different prompts"):
        bootstrap_heads(pairs(), ["a"] * 120, 4, seed=0)
    with pytest.raises(ConfigError, match="num_members=0"):
        bootstrap_heads(pairs(), [str(n) for n in range(120)], 0, seed=0)
