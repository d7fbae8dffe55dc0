"""Products with the loss Hessian: equal to the dense truth, indifferent to the cut, and leaving no trace."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from exact_models import draw_rows, make_model
from rmcore.core.errors import ConfigError, CurvatureError, DataError, ModelError
from rmcore.landscape.operators import LossHessian

reuse_fixtures = settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)


def random_vector(size: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def partitions(total: int) -> st.SearchStrategy[list[int]]:
    cuts = st.sets(st.integers(1, total - 1))
    return cuts.map(lambda chosen: [b - a for a, b in zip([0, *sorted(chosen)], [*sorted(chosen), total], strict=True)])


@pytest.mark.slow
@reuse_fixtures
@given(sizes=partitions(9), seed=st.integers(0, 1000))
def test_any_cut_into_micro_batches_gives_the_true_product(tiny, rows, truth, world, sizes, seed):
    """Of a model in training mode, whose dropout is off in a product."""
    operator = LossHessian(tiny, world.cut_rows(rows, sizes))
    vector = random_vector(operator.num_parameters, seed)
    assert operator.num_pairs == 9
    product = operator.product(vector)
    assert torch.allclose(product, truth @ vector, rtol=0, atol=1e-12)
    assert tiny.training
    assert torch.equal(operator.products(torch.stack([vector, vector])), torch.stack([product, product]))


@pytest.mark.parametrize("parameters", ["all", "head"])
@pytest.mark.parametrize("broken", [False, True])
def test_the_model_is_left_as_it_was_found(tiny, rows, parameters, broken):
    tiny.train()
    tiny.hidden.eval()
    tiny.hidden.bias.grad = torch.full_like(tiny.hidden.bias, 7.0)
    weights = {name: value.clone() for name, value in tiny.state_dict().items()}
    if broken:
        rows = rows | {"input_ids": rows["input_ids"] + 100}
    operator = LossHessian(tiny, [rows], parameters=parameters)
    if broken:
        with pytest.raises(IndexError):
            operator.product(random_vector(operator.num_parameters))
    else:
        operator.product(random_vector(operator.num_parameters))
    assert (tiny.training, tiny.hidden.training, tiny.dropout.training) == (True, False, True)
    assert all(p.requires_grad for p in tiny.parameters())
    assert all((p.grad is None) == (p is not tiny.hidden.bias) for p in tiny.parameters())
    assert bool((tiny.hidden.bias.grad == 7.0).all())
    assert all(torch.equal(value, weights[name]) for name, value in tiny.state_dict().items())


def test_a_hugging_face_model_is_differentiated_whole_and_a_wrapper_unwrapped(rows):
    qwen = make_model("qwen2", attention="sdpa")  # has a `.model` of its own: the backbone
    assert LossHessian(qwen, [rows]).num_parameters == sum(p.numel() for p in qwen.parameters())
    assert LossHessian(SimpleNamespace(model=qwen), [rows]).module is qwen
    with pytest.raises(ModelError, match="without a torch module"):
        LossHessian(SimpleNamespace(model="name"), [rows])


@pytest.mark.parametrize(
    "damage",
    [
        lambda rows: {"input_ids": rows["input_ids"]},
        lambda rows: {name: tensor[:-1] for name, tensor in rows.items()},
        lambda rows: {name: tensor[:0] for name, tensor in rows.items()},
        lambda rows: rows | {"attention_mask": rows["attention_mask"][:, :-1]},
    ],
    ids=["no mask", "half a pair", "no row", "shapes differ"],
)
def test_a_micro_batch_that_is_not_of_whole_pairs_is_refused(tiny, rows, damage):
    with pytest.raises(DataError, match=r"rmcore\.models\.batching"):
        LossHessian(tiny, [damage(rows)])


def test_unusable_models_and_vectors_are_refused(tiny, rows, world):
    with pytest.raises(DataError, match="no micro-batch"):
        LossHessian(tiny, [])
    with pytest.raises(ModelError, match="one label"):
        LossHessian(world.TinyReward(num_labels=2), [rows]).loss()
    with pytest.raises(ConfigError, match="a flat one"):
        LossHessian(tiny, [rows]).product(torch.ones(3))


def test_weights_that_are_not_finite_are_reported(tiny, rows):
    operator = LossHessian(tiny, [rows])
    vector = random_vector(operator.num_parameters)
    tiny.score.weight.data[0, 0] = float("nan")
    with pytest.raises(CurvatureError, match="go back to an earlier one"):
        operator.product(vector)
    with pytest.raises(CurvatureError, match="mean loss over 9 pairs is nan"):
        LossHessian.from_loader(tiny, [rows])


class Changed(nn.Module):
    """The tiny model with its reward passed through one more function."""

    def __init__(self, inner: nn.Module, change) -> None:
        super().__init__()
        self.inner, self.change = inner, change

    def forward(self, **rows):
        return SimpleNamespace(logits=self.change(self.inner(**rows).logits))


def test_an_operation_without_second_derivative_is_named_as_the_cause(tiny, rows):
    def flash(rewards: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            heads = rewards.view(1, 1, -1, 1)
            return functional.scaled_dot_product_attention(heads, heads, heads).view_as(rewards)

    operator = LossHessian(Changed(tiny, flash), [rows])
    with pytest.raises(CurvatureError, match="attn_implementation"):
        operator.product(random_vector(operator.num_parameters))


class Loader:
    """Gives `draw()` at each pass."""

    def __init__(self, draw) -> None:
        self.draw = draw

    def __iter__(self):
        return iter(self.draw())


@pytest.mark.parametrize("change", ["other", "swapped", "none"])
def test_data_that_change_between_passes_are_refused(tiny, rows, change):
    """A head at zero gives each pair the margin 0, but not the same gradient."""
    nn.init.zeros_(tiny.score.weight)
    swapped = {name: tensor.roll(9, 0) for name, tensor in rows.items()}
    passes = iter([[rows], {"other": [draw_rows(9, seed=1)], "swapped": [swapped], "none": []}[change]])
    with pytest.raises(CurvatureError, match="two passes over the loader"):
        LossHessian.from_loader(tiny, Loader(lambda: next(passes)))


def test_a_model_that_stays_random_in_evaluation_mode_is_refused(tiny, rows):
    with pytest.raises(CurvatureError, match="randomness is off"):
        LossHessian.from_loader(Changed(tiny, lambda rewards: functional.dropout(rewards, 0.5)), [rows])


def test_reordered_data_and_one_pass_iterators_are_fine(world, rows):
    model, batches = world.TinyReward(), world.cut_rows(rows, [3, 1, 2, 3])
    order = itertools.cycle([batches, batches[::-1]])
    shuffled = LossHessian.from_loader(model, Loader(lambda: next(order)))
    once = LossHessian.from_loader(model, iter(batches))
    vector = random_vector(once.num_parameters, dtype=torch.float32)
    assert torch.equal(once.product(vector), LossHessian(model, batches).product(vector))
    assert torch.allclose(shuffled.product(vector), once.product(vector), atol=1e-6)
