"""Curvature by layer against the diagonal blocks of the dense truth."""

import json
import math
from functools import cache

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

import exact_models
from rmcore.core.errors import ConfigError
from rmcore.landscape.eigensolvers import hutchinson
from rmcore.landscape.layers import EXTREMES, LayerCurvature, layer_curvature
from rmcore.landscape.operators import LossGaussNewton, LossHessian
from rmcore.landscape.parameters import parameter_blocks

OPERATORS = [LossHessian, LossGaussNewton]
ROWS = exact_models.draw_rows(12)
SIGMAS = 4.0  # a right estimator is farther off than that in one of 16,000 tests


@cache
def model_of(architecture: str) -> nn.Module:
    return exact_models.exact(exact_models.make_model(architecture))


@cache
def truth_of(architecture: str, operator_class: type, temperature: float) -> Tensor:
    function = exact_models.functional(model_of(architecture), ROWS)
    return function.hessian(temperature) if operator_class is LossHessian else function.gauss_newton(temperature)


def measure(operator, *, num_probes: int = 2, num_steps: int, seed: int = 0, **settings) -> LayerCurvature:
    """Traces by tensor and extremes by block, of the same seed."""
    generator = torch.Generator().manual_seed(seed)
    traces = hutchinson(
        operator.products, operator.sizes, num_probes=num_probes, generator=generator, dtype=operator.dtype
    )
    return layer_curvature(operator, traces, num_steps=num_steps, seed=seed, **settings)


def places(operator) -> dict[str, Tensor]:
    """Positions of each parameter in a flat vector."""
    return dict(zip(operator.names, torch.arange(operator.num_parameters).split(operator.sizes), strict=True))


def sub_block(matrix: Tensor, operator, names: tuple[str, ...]) -> Tensor:
    chosen = torch.cat([places(operator)[name] for name in names])
    return matrix[chosen][:, chosen]


@pytest.mark.slow
@pytest.mark.parametrize("operator_class", OPERATORS)
@pytest.mark.parametrize(("architecture", "temperature"), [("qwen2", 1.0), ("bert", 2.5)])
def test_extremes_of_a_block_are_those_of_its_dense_diagonal_block(architecture, operator_class, temperature):
    operator = operator_class(model_of(architecture), [ROWS], temperature=temperature)
    found = measure(operator, num_steps=60)
    truth = truth_of(architecture, operator_class, temperature)
    blocks = parameter_blocks(operator.names)
    assert [block["name"] for block in found.blocks] == list(blocks)
    for block in found.blocks:
        values = torch.linalg.eigvalsh(sub_block(truth, operator, blocks[block["name"]]))
        assert block["num_parameters"] == len(values)
        scale = float(values.abs().max())
        for name, true in (("lambda_max", float(values[-1])), ("lambda_min", float(values[0]))):
            assert abs(block[name] - true) <= block[f"{name}_residual"] + 1e-10 * scale
        assert block["lambda_max"] == pytest.approx(float(values[-1]), abs=1e-4 * scale)
        assert block["lambda_min"] == pytest.approx(float(values[0]), abs=1e-4 * scale)


@pytest.mark.slow
@pytest.mark.parametrize("operator_class", OPERATORS)
def test_traces_add_up_to_the_total_trace_of_the_same_probes(operator_class):
    operator = operator_class(model_of("qwen2"), [ROWS])
    found = measure(operator, num_probes=7, num_steps=2, seed=5)
    whole = hutchinson(
        operator.products,
        [operator.num_parameters],
        num_probes=7,
        generator=torch.Generator().manual_seed(5),
        dtype=operator.dtype,
    )
    total, _ = whole.trace()
    scale = sum(abs(tensor["trace"]) for tensor in found.tensors)
    for parts in (found.blocks, found.tensors):
        assert sum(part["trace"] for part in parts) == pytest.approx(total, abs=1e-12 * scale)
        assert sum(part["num_parameters"] for part in parts) == found.num_parameters == operator.num_parameters
    for block in found.blocks:
        members = [tensor["trace"] for tensor in found.tensors if tensor["block"] == block["name"]]
        assert sum(members) == pytest.approx(block["trace"], abs=1e-12 * scale)


@pytest.mark.slow
def test_traces_are_unbiased_and_their_errors_calibrated(tiny, rows, truth):
    """Every block and every tensor, over many seeds; and the t interval covers as often as it should on the whole."""
    operator = LossHessian(tiny, [rows])
    num_runs, num_probes = 100, 6
    runs = [measure(operator, num_probes=num_probes, num_steps=2, seed=seed) for seed in range(num_runs)]
    blocks = parameter_blocks(operator.names)
    parts = [*blocks.values(), *((name,) for name in operator.names)]
    inside = []
    for number, names in enumerate(parts):
        true = float(sub_block(truth, operator, names).trace())
        records = [[*run.blocks, *run.tensors][number] for run in runs]
        assert {record["name"] for record in records} <= {*blocks, *names}
        values, errors = np.array([[record["trace"], record["trace_standard_error"]] for record in records]).T
        assert abs(values.mean() - true) <= SIGMAS * values.std(ddof=1) / math.sqrt(num_runs)
        surplus = errors**2 - (values - true) ** 2
        assert abs(surplus.mean()) <= SIGMAS * surplus.std(ddof=1) / math.sqrt(num_runs)
        inside.append(np.abs(values - true) <= stats.t.ppf(0.975, num_probes - 1) * errors)
    covered = np.mean(inside, axis=0)  # of the parts, which share their probes, by run
    assert abs(covered.mean() - 0.95) <= SIGMAS * covered.std(ddof=1) / math.sqrt(num_runs)


def test_blocks_and_tensors_are_named_as_the_model_names_them():
    operator = LossHessian(model_of("qwen2"), [ROWS])
    found = measure(operator, num_steps=2)
    assert [block["name"] for block in found.blocks] == [
        "embeddings",
        "model.layers.0",
        "model.layers.1",
        "model.norm",
        "head",
    ]
    assert [tensor["name"] for tensor in found.tensors] == list(operator.names)
    kinds = {
        block: [t["kind"] for t in found.tensors if t["block"] == block] for block in parameter_blocks(operator.names)
    }
    assert kinds["model.layers.0"] == kinds["model.layers.1"]
    assert "self_attn.q_proj.weight" in kinds["model.layers.0"]
    assert (kinds["model.norm"], kinds["head"]) == (["weight"], ["score.weight"])
    assert (found.num_pairs, found.reasons) == (12, {})


@pytest.mark.slow
@pytest.mark.parametrize("subset", ["model.layers.1.self_attn", ("model.layers.0", "head"), "embeddings"])
def test_a_part_of_the_model_is_cut_into_its_own_blocks_only(subset):
    """A block holds what the operator is over, even where that is a part of a layer."""
    operator = LossHessian(model_of("qwen2"), [ROWS], parameters=subset)
    found = measure(operator, num_steps=30)
    assert [tensor["name"] for tensor in found.tensors] == list(operator.names)
    assert sum(block["num_parameters"] for block in found.blocks) == operator.num_parameters
    whole = LossHessian(model_of("qwen2"), [ROWS])
    names = tuple(tensor["name"] for tensor in found.tensors if tensor["block"] == found.blocks[0]["name"])
    values = torch.linalg.eigvalsh(sub_block(truth_of("qwen2", LossHessian, 1.0), whole, names))
    assert found.blocks[0]["lambda_max"] == pytest.approx(float(values[-1]), rel=1e-2)


@pytest.mark.parametrize("operator_class", OPERATORS)
def test_the_model_and_the_operator_are_left_as_they_were_found(tiny, rows, operator_class):
    tiny.train()
    tiny.hidden.eval()
    tiny.embedding.weight.requires_grad_(False)
    tiny.hidden.bias.grad = torch.full_like(tiny.hidden.bias, 7.0)
    weights = {name: value.clone() for name, value in tiny.state_dict().items()}
    operator = operator_class(tiny, [rows])
    vector = torch.ones(operator.num_parameters, dtype=torch.float64)
    before, state = operator.product(vector), torch.random.get_rng_state()
    found = measure(operator, num_steps=3)
    assert "embeddings" not in {block["name"] for block in found.blocks}
    assert torch.equal(operator.product(vector), before)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert (tiny.training, tiny.hidden.training, tiny.dropout.training) == (True, False, True)
    assert [p.requires_grad for p in tiny.parameters()] == [False, True, True, True, True]
    assert all((p.grad is None) == (p is not tiny.hidden.bias) for p in tiny.parameters())
    assert bool((tiny.hidden.bias.grad == 7.0).all())
    assert all(torch.equal(value, weights[name]) for name, value in tiny.state_dict().items())


def test_parameters_without_influence_have_no_curvature(tiny, rows):
    tiny.unused = nn.Linear(3, 2).double()
    found = measure(LossHessian(tiny, [rows]), num_steps=3)
    unused = found.blocks[-1]
    assert unused["name"] == "unused"
    assert all(unused[name] == 0.0 for name in ("trace", "trace_standard_error", *EXTREMES))
    assert found.blocks[0]["lambda_max"] > 0


def test_a_block_whose_basis_does_not_fit_has_a_reason_and_the_others_their_extremes(tiny, rows):
    tiny.embedding = nn.Embedding(200_000, 4).double()
    found = measure(LossHessian(tiny, [rows]), num_steps=10**6)
    embeddings, *others = found.blocks
    assert set(found.reasons) == {"embeddings"} == {embeddings["name"]}
    assert "Lower num_steps" in found.reasons["embeddings"]
    assert all(embeddings[name] is None for name in EXTREMES)
    assert embeddings["trace_standard_error"] > 0
    assert all(block[name] is not None for block in others for name in EXTREMES)
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False)) == found.to_dict()


def test_the_gauss_newton_matrix_is_nowhere_negative(make_qwen, rows):
    found = measure(LossGaussNewton(make_qwen("sdpa"), [rows]), num_probes=3, num_steps=12)
    for block in found.blocks:
        assert block["lambda_min"] >= -block["lambda_min_residual"]
        assert block["lambda_max"] > 0


def test_progress_counts_every_product_to_the_end(tiny, rows):
    seen: list[tuple[int, int]] = []
    found = measure(LossHessian(tiny, [rows]), num_steps=8, report=lambda *told: seen.append(told[:2]))
    assert seen[-1] == (found.num_products, found.num_products)
    assert all(done <= total for done, total in seen)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_the_seed_decides_and_the_cut_into_micro_batches_does_not(tiny, rows, world):
    def of(micro_batches, seed: int) -> LayerCurvature:
        return measure(LossHessian(tiny, micro_batches), num_probes=3, num_steps=4, seed=seed)

    first = of([rows], 0)
    torch.rand(3)
    assert of([rows], 0) == first
    assert of([rows], 1) != first
    cut = of(world.cut_rows(rows, [2, 4, 3]), 0)
    for name in ("trace", "trace_standard_error", *EXTREMES):
        assert [b[name] for b in cut.blocks] == pytest.approx([b[name] for b in first.blocks], abs=1e-9)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_the_callers_autograd_mode_does_not_matter(world, rows, mode):
    model = world.TinyReward()
    expected = measure(LossHessian(model, [rows]), num_steps=4)
    with mode():
        assert measure(LossHessian(model, [rows]), num_steps=4) == expected


def test_one_step_gives_no_error_and_is_refused(tiny, rows):
    with pytest.raises(ConfigError, match="at least 2"):
        measure(LossHessian(tiny, [rows]), num_steps=1)
