"""The spectrum record: equal to the dense truth, honest about what it does not know."""

import dataclasses
import json

import numpy as np
import pytest
import torch

from rmcore.core.errors import ConfigError, CurvatureError
from rmcore.landscape.analyzer import HessianAnalyzer, HessianSpectrum

METHODS = ["lanczos", "power_iteration", "full"]
OPTIONAL = {
    field.name
    for field in dataclasses.fields(HessianSpectrum)
    if field.type == (float | None) or "None" in str(field.type)
}


def test_full_is_the_dense_truth_in_every_quantity(tiny, rows, truth):
    spectrum = HessianAnalyzer(tiny).compute_spectrum([rows], "full", top_k=3)
    values = torch.linalg.eigvalsh(truth).flip(0).numpy()
    assert np.allclose(spectrum.eigenvalues, [*values[:3], *values[-3:]], rtol=0, atol=1e-12)
    assert (spectrum.lambda_max, spectrum.lambda_min) == (spectrum.eigenvalues[0], spectrum.eigenvalues[-1])
    assert spectrum.lambda_min < -1e-3  # indefinite: the signed end is really tested
    assert spectrum.trace_estimate == pytest.approx(values.sum(), abs=1e-12)
    assert spectrum.trace_standard_error == 0.0
    assert spectrum.effective_rank == pytest.approx(np.abs(values).sum() ** 2 / (values**2).sum(), rel=1e-9)
    assert spectrum.negative_mass == pytest.approx(-values[values < 0].sum() / np.abs(values).sum(), rel=1e-9)
    positive = values[values > 1e-12]
    assert spectrum.condition_number == pytest.approx(positive[0] / positive[-1], rel=1e-3)
    assert spectrum.flatness_index == pytest.approx(1 / values[0], rel=1e-9)
    assert spectrum.sharpness_score is None  # the trace is negative
    assert "-0.642" in spectrum.reasons["sharpness_score"]
    assert (spectrum.num_pairs, spectrum.num_parameters, spectrum.converged) == (9, 63, True)


@pytest.mark.slow
def test_few_steps_suffice_for_the_extremes_and_bound_their_own_error(tiny, rows, truth):
    values = torch.linalg.eigvalsh(truth).numpy()
    ranks = []
    for seed in range(10):
        found = HessianAnalyzer(tiny).compute_spectrum([rows], top_k=3, num_steps=14, trace_probes=2, seed=seed)
        assert found.converged
        assert found.lambda_max == pytest.approx(values[-1], abs=0.01 * values[-1])
        assert found.lambda_min == pytest.approx(values[0], abs=0.01 * values[-1])
        for value, residual in zip(found.eigenvalues, found.residuals, strict=True):
            assert np.abs(values - value).min() <= residual * (1 + 1e-9)
        ranks.append(found.effective_rank)
    truth_rank = np.abs(values).sum() ** 2 / (values**2).sum()
    assert np.mean(ranks) == pytest.approx(truth_rank, rel=0.15)


@pytest.mark.parametrize("method", METHODS)
def test_an_undefined_quantity_has_a_reason_and_a_defined_one_has_none(tiny, rows, method):
    for parameters in ("all", "head"):
        found = HessianAnalyzer(tiny).compute_spectrum([rows], method, top_k=2, num_steps=6, parameters=parameters)
        record = found.to_dict()
        assert {name for name, value in record.items() if value is None} == set(found.reasons)
        assert set(found.reasons) <= OPTIONAL
        assert all(len(reason) > 10 for reason in found.reasons.values())
        assert json.loads(json.dumps(record, allow_nan=False)) == record


def test_a_flat_loss_is_reported_as_undefined_not_as_numbers(tiny, rows):
    """Equal rewards whatever the weights: the head is zero and alone is looked at, on two equal sides."""
    same = {name: torch.cat([tensor[:9], tensor[:9]]) for name, tensor in rows.items()}
    found = HessianAnalyzer(tiny).compute_spectrum([same], parameters="head")
    assert found.lambda_max == 0.0
    assert found.trace_estimate == 0.0
    undefined = {"condition_number", "effective_rank", "negative_mass", "sharpness_score", "flatness_index"}
    assert set(found.reasons) == undefined
    assert all(getattr(found, name) is None for name in undefined)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_the_callers_autograd_mode_does_not_matter(world, rows, mode):
    analyzer = HessianAnalyzer(world.TinyReward())
    expected = analyzer.compute_spectrum([rows], num_steps=6)
    with mode():
        assert analyzer.compute_spectrum([rows], num_steps=6) == expected


def test_bad_settings_are_refused(tiny, rows, world):
    analyzer = HessianAnalyzer(tiny)
    with pytest.raises(ConfigError, match="lanczos, power_iteration, full, pyhessian"):
        analyzer.compute_spectrum([rows], "qr")  # type: ignore[arg-type]
    for setting in ({"top_k": 0}, {"num_steps": 1}, {"trace_probes": 1}):
        with pytest.raises(ConfigError, match="too small"):
            analyzer.compute_spectrum([rows], **setting)
    tiny.embedding = torch.nn.Embedding(6000, 4).double()
    with pytest.raises(CurvatureError, match="method='lanczos'"):
        analyzer.compute_spectrum([rows], "full")


@pytest.mark.slow
def test_pyhessian_agrees_and_leaves_gradients_alone(world, rows):
    pytest.importorskip("pyhessian", reason="PyHessian is optional")
    torch.manual_seed(1)
    model = world.TinyReward().train()
    model.score.weight.grad = torch.ones_like(model.score.weight)
    analyzer = HessianAnalyzer(model)
    ours = analyzer.compute_spectrum([rows], "full")
    state = torch.random.get_rng_state()
    seen: list[int] = []
    theirs = analyzer.compute_spectrum(
        world.cut_rows(rows, [4, 5]),
        "pyhessian",
        top_k=2,
        num_steps=500,
        trace_probes=30,
        report=lambda done, *_: seen.append(done),
    )
    largest = sorted(ours.eigenvalues, key=abs, reverse=True)[:2]
    assert np.allclose(theirs.eigenvalues, sorted(largest, reverse=True), rtol=0.01)
    assert abs(theirs.trace_estimate - ours.trace_estimate) < 4 * theirs.trace_standard_error
    assert max(theirs.residuals) < 0.1 * ours.lambda_max
    assert seen[-1] == theirs.num_products
    assert model.training
    assert torch.equal(torch.random.get_rng_state(), state)
    assert bool((model.score.weight.grad == 1).all())
    assert model.hidden.weight.grad is None
    with pytest.raises(CurvatureError, match="float32 only"):
        HessianAnalyzer(model.double()).compute_spectrum([rows], "pyhessian")
