"""The Gram spectrum: equal to the dense truth however it is cut."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from rmcore.core.errors import CurvatureError, DataError
from rmcore.landscape.eigensolvers import lanczos, lanczos_eigenvalues
from rmcore.landscape.gram import gauss_newton_spectrum
from rmcore.landscape.margin_gram import MarginRows, RowPlan
from rmcore.landscape.operators import LossGaussNewton, gauss_newton_weights
from rmcore.landscape.parameters import measuring, parameter_blocks
from rmcore.landscape.vectors import inner_products

PROMPTS = list("aabbccdde")  # of the 9 pairs of `rows`

reuse_fixtures = settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)


def margin_gradients(model: nn.Module, rows: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """J (n, N) and the margins (n,), from one forward pass over the whole padded micro-batch."""
    model.eval()
    parameters = list(model.parameters())
    chosen, rejected = model(**rows).logits[:, 0].chunk(2)
    margins = chosen - rejected
    gradients = [
        torch.autograd.grad(margin, parameters, retain_graph=True, materialize_grads=True) for margin in margins
    ]
    return torch.stack([torch.cat([part.reshape(-1) for part in row]) for row in gradients]).double(), margins.detach()


def dense_gauss_newton(model: nn.Module, rows: dict[str, Tensor], temperature: float = 1.0) -> Tensor:
    """(1/n) J^T D J, (N, N)."""
    jacobian, margins = margin_gradients(model, rows)
    probability = torch.sigmoid(margins.double() / temperature)
    weights = probability * (1 - probability) / temperature**2
    return jacobian.T @ (weights[:, None] * jacobian) / len(jacobian)


def largest_first(matrix: Tensor, count: int) -> np.ndarray:
    values = torch.linalg.eigvalsh(matrix).flip(0).numpy()
    return np.pad(values, (0, max(0, count - len(values))))[:count]


def same(spectrum, other, tolerance: float = 1e-12) -> bool:
    scale = tolerance * other.lambda_max
    return (
        np.allclose(spectrum.eigenvalues, other.eigenvalues, rtol=0, atol=scale)
        and np.isclose(spectrum.trace, other.trace, rtol=tolerance)
        and np.isclose(spectrum.effective_rank_ci_high, other.effective_rank_ci_high, rtol=1e3 * tolerance)
    )


@pytest.fixture
def with_lookup(world):
    """The tiny model, which now says which module is its input embedding; drawn as `tiny` is."""

    class Lookup(world.TinyReward):
        def get_input_embeddings(self) -> nn.Module:
            return self.embedding

    torch.manual_seed(1)
    model = Lookup().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.5)
    return model


@pytest.mark.parametrize("temperature", [1.0, 0.3, 4.0])
def test_the_spectrum_is_that_of_the_dense_matrix(tiny, rows, temperature):
    spectrum = gauss_newton_spectrum(tiny, [rows], prompts=PROMPTS, temperature=temperature)
    dense = dense_gauss_newton(tiny, rows, temperature)
    expected = largest_first(dense, 9)
    assert np.allclose(spectrum.eigenvalues, expected, rtol=1e-9, atol=1e-12 * expected[0])
    assert spectrum.lambda_max == spectrum.eigenvalues[0]
    assert spectrum.trace == pytest.approx(float(dense.trace()), rel=1e-12)
    assert spectrum.effective_rank == pytest.approx(expected.sum() ** 2 / (expected**2).sum(), rel=1e-9)
    assert (spectrum.num_pairs, spectrum.num_parameters, spectrum.num_gradients) == (9, len(dense), 9)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_qwen_has_the_spectrum_of_its_dense_matrix_and_of_lanczos(make_qwen, rows, attention):
    qwen = make_qwen(attention).double()
    spectrum = gauss_newton_spectrum(qwen, [rows], prompts=PROMPTS)
    expected = largest_first(dense_gauss_newton(qwen, rows), 9)
    assert np.allclose(spectrum.eigenvalues, expected, rtol=0, atol=1e-6 * expected[0])
    operator = LossGaussNewton(qwen, [rows])
    start = torch.randn(operator.num_parameters, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = lanczos_eigenvalues(lanczos(operator.product, start, 12), operator.product).values
    assert np.allclose(spectrum.eigenvalues[:5], found[:5], rtol=0, atol=1e-6 * expected[0])


def test_float32_rows_are_enough_for_a_millionth_of_the_largest(make_qwen, rows):
    exact = gauss_newton_spectrum(make_qwen("eager").double(), [rows], prompts=PROMPTS)
    single = gauss_newton_spectrum(make_qwen("eager"), [rows], prompts=PROMPTS)
    assert np.allclose(single.eigenvalues, exact.eigenvalues, rtol=0, atol=1e-5 * exact.lambda_max)


@pytest.mark.parametrize("num_columns", [0, 5, 2**13, 3 * 2**13 + 1, 2**21])
@pytest.mark.parametrize(("num_rows", "num_others"), [(1, 1), (2, 7)])
def test_long_float32_rows_are_multiplied_to_a_millionth(num_columns, num_rows, num_others):
    """One float32 sum over two million columns would be wrong by a hundred times that."""
    others = torch.randn((num_others, num_columns), generator=torch.Generator().manual_seed(0))
    rows = others[:num_rows]
    exact = rows.double() @ others.double().T
    found = inner_products(rows, others)
    assert found.dtype == torch.float64
    assert (found - exact).abs().max() <= 1e-6 * num_columns


@pytest.mark.slow
@reuse_fixtures
@given(extra=st.integers(0, 12), partial=st.integers(0, 503))
def test_the_memory_changes_the_number_of_gradients_and_nothing_else(tiny, rows, extra, partial):
    needed = 8 * 9**2 * 3  # the results of three blocks
    memory = needed + (2 + extra) * 63 * 8 + partial
    spectrum = gauss_newton_spectrum(tiny, [rows], prompts=PROMPTS, memory_bytes=memory)
    held = 9 if extra >= 7 else 1 + extra  # one row of the room is for the streamed rows
    assert spectrum.num_gradients == sum(9 - start for start in range(0, 9, held))
    assert same(spectrum, gauss_newton_spectrum(tiny, [rows], prompts=PROMPTS))


@given(num_pairs=st.integers(1, 3000), room=st.integers(2, 4000), row_bytes=st.integers(1, 1000))
def test_a_plan_fits_and_uses_its_memory(num_pairs, room, row_bytes):
    plan = RowPlan.fitting(num_pairs, row_bytes, room * row_bytes)
    assert plan.held >= 1
    assert plan.chunk >= 1
    if room >= num_pairs:
        assert plan.num_gradients(num_pairs) == num_pairs
    else:
        assert plan.held + plan.chunk == room
        assert plan.held >= room / 2
    blocks = -(-num_pairs // plan.held)
    assert num_pairs <= plan.num_gradients(num_pairs) <= num_pairs * blocks


def cuts(total: int) -> st.SearchStrategy[list[int]]:
    return st.sets(st.integers(1, total - 1)).map(
        lambda at: [b - a for a, b in zip([0, *sorted(at)], [*sorted(at), total], strict=True)]
    )


@pytest.mark.slow
@reuse_fixtures
@given(sizes=cuts(9), padding=st.integers(0, 3))
def test_neither_the_cut_into_micro_batches_nor_padding_matters(tiny, rows, world, sizes, padding):
    padded = {name: nn.functional.pad(tensor, (0, padding)) for name, tensor in rows.items()}
    spectrum = gauss_newton_spectrum(tiny, world.cut_rows(padded, sizes), prompts=PROMPTS)
    assert same(spectrum, gauss_newton_spectrum(tiny, [rows], prompts=PROMPTS))


def test_padding_on_both_sides_of_a_pair_is_not_computed(tiny, rows):
    operator = LossGaussNewton(tiny, [{name: nn.functional.pad(tensor, (0, 5)) for name, tensor in rows.items()}])
    lengths = rows["attention_mask"].sum(1).view(2, 9).amax(0)
    assert [pair.input_ids.shape[1] for pair in MarginRows(operator).pairs] == lengths.tolist()


def test_left_padded_rows_are_whole(tiny, rows):
    flipped = {name: tensor.flip(1) for name, tensor in rows.items()}
    spectrum = gauss_newton_spectrum(tiny, [flipped], prompts=PROMPTS)
    assert same(spectrum, gauss_newton_spectrum(tiny, [rows], prompts=PROMPTS))  # a mean over tokens has no order


@pytest.mark.parametrize("build", ["tiny", "qwen"])
def test_blocks_are_the_diagonal_blocks_and_add_up(tiny, make_qwen, rows, build):
    model = tiny if build == "tiny" else make_qwen("eager").double()
    spectrum = gauss_newton_spectrum(model, [rows], prompts=PROMPTS)
    dense = dense_gauss_newton(model, rows)
    names = [name for name, _ in model.named_parameters()]
    ends = np.cumsum([p.numel() for p in model.parameters()])
    columns = dict(zip(names, np.split(np.arange(len(dense)), ends[:-1]), strict=True))
    blocks = parameter_blocks(names)
    assert list(spectrum.blocks) == list(blocks)
    for block, members in blocks.items():
        own = np.concatenate([columns[name] for name in members])
        expected = dense[own][:, own]
        found = spectrum.blocks[block]
        assert found["num_parameters"] == len(own)
        assert found["lambda_max"] == pytest.approx(largest_first(expected, 1)[0], abs=1e-6 * spectrum.lambda_max)
        assert found["trace"] == pytest.approx(float(expected.trace()), abs=1e-6 * spectrum.trace)
        assert found["lambda_max"] <= spectrum.lambda_max
    assert sum(found["trace"] for found in spectrum.blocks.values()) == pytest.approx(spectrum.trace, rel=1e-12)


def test_the_head_alone_is_the_heads_block(tiny, rows):
    everything = gauss_newton_spectrum(tiny, [rows], prompts=PROMPTS)
    head = gauss_newton_spectrum(tiny, [rows], prompts=PROMPTS, parameters="head")
    assert head.lambda_max == pytest.approx(everything.blocks["head"]["lambda_max"], rel=1e-12)
    assert head.trace == pytest.approx(everything.blocks["head"]["trace"], rel=1e-12)
    assert head.num_parameters == everything.blocks["head"]["num_parameters"] == 6
    assert list(head.blocks) == ["head"]


def test_no_eigenvalue_is_negative_even_where_gradients_repeat(tiny, world):
    twice = {
        name: torch.cat([tensor.chunk(2)[0]] * 2 + [tensor.chunk(2)[1]] * 2)
        for name, tensor in world.draw_rows(9).items()
    }
    spectrum = gauss_newton_spectrum(tiny, [twice], prompts=PROMPTS * 2)
    values = np.array(spectrum.eigenvalues)
    assert (np.diff(values) <= 0).all()
    assert (values >= 0).all()
    assert spectrum.rounding <= 1e-14 * spectrum.lambda_max
    assert values[9:].max() <= 1e-14 * spectrum.lambda_max  # 18 pairs, 9 directions
    once = gauss_newton_spectrum(tiny, [world.draw_rows(9)], prompts=PROMPTS)
    assert np.allclose(values[:9], once.eigenvalues, rtol=0, atol=1e-13 * once.lambda_max)


class Scaled(nn.Embedding):
    """Gives the rows of its matrix times 3, as some models do."""

    def forward(self, ids: Tensor) -> Tensor:
        return 3 * super().forward(ids)


def plain(model: nn.Module) -> None:
    pass


def padded(model: nn.Module) -> None:
    model.embedding.padding_idx = 3


def scaled(model: nn.Module) -> None:
    weight = model.embedding.weight
    model.embedding = Scaled(*weight.shape)
    model.embedding.weight = weight


def tied(model: nn.Module) -> None:
    """The matrix also acts outside of the lookup."""
    inner = model.forward

    def forward(input_ids: Tensor, attention_mask: Tensor) -> SimpleNamespace:
        rewards = inner(input_ids, attention_mask).logits
        return SimpleNamespace(logits=rewards * model.embedding.weight[-1].square().sum())

    model.forward = forward


@pytest.mark.parametrize(("change", "kept_apart"), [(plain, True), (padded, True), (scaled, False), (tied, False)])
@pytest.mark.parametrize("memory", [None, 4500])
def test_the_embedding_loses_nothing(with_lookup, rows, change, kept_apart, memory):
    change(with_lookup)
    rows["input_ids"].clamp_(max=5)  # tokens 6 and 7 do not occur
    operator = LossGaussNewton(with_lookup, [rows])
    with measuring(operator.module, operator.parameters):
        margin_rows = MarginRows(operator)
    assert (margin_rows.tokens is not None) == kept_apart
    assert margin_rows.num_columns == (63 - 32 if kept_apart else 63)
    spectrum = gauss_newton_spectrum(with_lookup, [rows], prompts=PROMPTS, memory_bytes=memory)
    dense = dense_gauss_newton(with_lookup, rows)
    expected = largest_first(dense, 9)
    assert np.allclose(spectrum.eigenvalues, expected, rtol=0, atol=1e-12 * expected[0])
    assert spectrum.blocks["embeddings"]["trace"] == pytest.approx(float(dense[:32, :32].trace()), rel=1e-10)
    assert spectrum.blocks["embeddings"]["num_parameters"] == 32


def test_the_embedding_alone(with_lookup, rows):
    spectrum = gauss_newton_spectrum(with_lookup, [rows], prompts=PROMPTS, parameters="embedding")
    expected = largest_first(dense_gauss_newton(with_lookup, rows)[:32, :32], 9)
    assert np.allclose(spectrum.eigenvalues, expected, rtol=0, atol=1e-12 * expected[0])


def test_a_frozen_embedding_is_no_parameter(with_lookup, rows):
    with_lookup.embedding.weight.requires_grad_(False)
    spectrum = gauss_newton_spectrum(with_lookup, [rows], prompts=PROMPTS)
    assert list(spectrum.blocks) == ["hidden", "head"]
    assert spectrum.num_parameters == 31


def test_the_record_is_json(tiny, rows):
    record = gauss_newton_spectrum(tiny, [rows], prompts=PROMPTS).to_dict()
    again = json.loads(json.dumps(record, allow_nan=False))
    assert again == record
    assert len(again["eigenvalues"]) == 9


def test_progress_counts_gradients(tiny, rows):
    seen = []
    memory = 8 * 9**2 * 3 + 4 * 63 * 8
    spectrum = gauss_newton_spectrum(
        tiny, [rows], prompts=PROMPTS, memory_bytes=memory, report=lambda *told: seen.append(told[:2])
    )
    assert spectrum.num_gradients > 9
    assert seen == [(done, spectrum.num_gradients) for done in range(1, spectrum.num_gradients + 1)]


@pytest.mark.parametrize("broken", [False, True])
def test_the_model_is_left_as_it_was_found(with_lookup, rows, broken):
    with_lookup.train()
    with_lookup.hidden.eval()
    with_lookup.hidden.bias.grad = torch.full_like(with_lookup.hidden.bias, 7.0)
    with_lookup.score.bias.requires_grad_(False)
    weights = {name: value.clone() for name, value in with_lookup.state_dict().items()}
    if broken:
        rows = rows | {"input_ids": rows["input_ids"] + 100}
        with pytest.raises(IndexError):
            gauss_newton_spectrum(with_lookup, [rows], prompts=PROMPTS)
    else:
        gauss_newton_spectrum(with_lookup, [rows], prompts=PROMPTS)
    assert (with_lookup.training, with_lookup.hidden.training, with_lookup.dropout.training) == (True, False, True)
    assert [name for name, p in with_lookup.named_parameters() if not p.requires_grad] == ["score.bias"]
    assert [name for name, p in with_lookup.named_parameters() if p.grad is not None] == ["hidden.bias"]
    assert bool((with_lookup.hidden.bias.grad == 7.0).all())
    assert all(torch.equal(value, weights[name]) for name, value in with_lookup.state_dict().items())
    assert not with_lookup.embedding._forward_hooks


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_the_callers_autograd_mode_does_not_matter(world, rows, mode):
    model = world.TinyReward()
    expected = gauss_newton_spectrum(model, [rows], prompts=PROMPTS)
    with mode():
        assert gauss_newton_spectrum(model, [rows], prompts=PROMPTS) == expected


@pytest.mark.parametrize("name", ["embedding.weight", "score.weight"])
def test_weights_that_are_not_finite_are_refused(with_lookup, rows, name):
    with torch.no_grad():
        with_lookup.get_parameter(name)[1 if name == "embedding.weight" else 0, 0] = float("nan")
    with pytest.raises(CurvatureError, match="go back to an earlier one"):
        gauss_newton_spectrum(with_lookup, [rows], prompts=PROMPTS)


def test_gradients_that_overflow_are_refused(world, rows):
    model = world.TinyReward()
    with torch.no_grad():
        model.score.weight.mul_(1e30)
        model.hidden.weight.mul_(1e-30)
        model.hidden.bias.zero_()
    with pytest.raises(CurvatureError, match="overflow"):
        gauss_newton_spectrum(model, [rows], prompts=PROMPTS)


@pytest.mark.parametrize("prompts", [PROMPTS[:-1], [*PROMPTS, "f"], []])
def test_prompts_of_another_number_are_refused(tiny, rows, prompts):
    with pytest.raises(DataError, match=f"got {len(prompts)} prompts for 9 pairs"):
        gauss_newton_spectrum(tiny, [rows], prompts=prompts)


@pytest.mark.parametrize("memory", [0, 8 * 9**2 * 3 + 2 * 63 * 8 - 1])
def test_memory_for_less_than_two_gradients_is_refused(tiny, rows, memory):
    with pytest.raises(CurvatureError, match="Raise memory_bytes"):
        gauss_newton_spectrum(tiny, [rows], prompts=PROMPTS, memory_bytes=memory)


def test_weights_are_the_second_derivative_of_the_loss():
    margins = torch.linspace(-5, 5, 21, dtype=torch.float64, requires_grad=True)
    slope = torch.autograd.grad(nn.functional.softplus(-margins / 1.7).sum(), margins, create_graph=True)[0]
    assert torch.allclose(torch.autograd.grad(slope.sum(), margins)[0], gauss_newton_weights(margins.detach(), 1.7))
