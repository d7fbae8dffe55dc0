"""Packed rows through the varlen kernel of a GPU; skipped where there is none."""

from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from rmcore.config.model import ModelConfig
from rmcore.config.train import TrainConfig
from rmcore.core.hub import MINILM_PACKAGE
from rmcore.models.batching import micro_batches
from rmcore.models.compiling import CompiledLayers
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.training.losses import make_bradley_terry
from rmcore.training.step import StepContext, accumulate_gradient, make_forward

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]
GPU = torch.device("cuda")


def gradient(rm, pairs, packing, *, compiled=False, precision="bf16"):
    """Sum of losses and the whole gradient as one vector."""
    forward = make_forward(rm.model, make_bradley_terry(TrainConfig()), precision, rm.device)
    layers = CompiledLayers(rm.model) if compiled else None
    context = StepContext(rm.model, forward, None, 1.0, rm.device, compiled=layers)
    batches = micro_batches(pairs, token_budget=1500, pad_id=rm.pad_id, packing=packing)
    rm.model.zero_grad()
    sums = accumulate_gradient(context, batches, num_terms=len(pairs))
    return float(sums[0]), torch.cat([p.grad.flatten() for p in rm.model.parameters() if p.grad is not None]).double()


def error(found, expected):
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", ["tiny", "minilm"])
def test_bf16_gradients_are_as_near_to_float32_as_padded_ones(name, gold_pairs):
    if name == "minilm" and find_spec(MINILM_PACKAGE) is None:
        pytest.skip(f"{MINILM_PACKAGE} is not installed")
    rm = BradleyTerryRM.new(ModelConfig(name=name, max_seq_len=128), seed=0, device=GPU)
    rm.model.eval()
    pairs = rm.renderer.tokenize_pairs(gold_pairs[:24])
    packing = rm.packing("bf16")
    assert packing is not None
    assert packing.kernel == "varlen"
    truth_loss, truth = gradient(rm, pairs, None, precision="fp32")
    _, padded = gradient(rm, pairs, None)
    loss, packed = gradient(rm, pairs, packing)
    assert loss == pytest.approx(truth_loss, rel=2e-2)
    assert error(packed, truth) < 2 * error(padded, truth) + 1e-3


def test_a_compiled_packed_step_is_the_same(gold_pairs):
    rm = BradleyTerryRM.new(ModelConfig(name="tiny", max_seq_len=128), seed=0, device=GPU)
    pairs = rm.renderer.tokenize_pairs(gold_pairs[:24])
    loss, plain = gradient(rm, pairs, rm.packing("bf16"))
    whole = replace(rm.packing("bf16"), reads_last=False)  # as a compiled training has it
    compiled_loss, compiled = gradient(rm, pairs, whole, compiled=True)
    assert compiled_loss == pytest.approx(loss, rel=1e-2)
    assert error(compiled, plain) < 5e-2


def test_float32_on_a_gpu_is_padded_and_says_why(tiny_folder, gold_pairs, capsys):
    here = BradleyTerryRM.from_pretrained(tiny_folder, device="cuda", max_seq_len=128)
    assert here.packing("fp32") is None
    assert "bf16" in capsys.readouterr().err
    there = BradleyTerryRM.from_pretrained(tiny_folder, device="cpu", max_seq_len=128)
    np.testing.assert_allclose(here.score_pairs(gold_pairs[:16]), there.score_pairs(gold_pairs[:16]), atol=1e-4)


@pytest.mark.parametrize("name", ["tiny", "minilm"])
def test_weights_in_bfloat16_take_half_the_memory_and_are_packed_by_the_kernel(name, gold_pairs, tmp_path):
    if name == "minilm" and find_spec(MINILM_PACKAGE) is None:
        pytest.skip(f"{MINILM_PACKAGE} is not installed")
    BradleyTerryRM.new(ModelConfig(name=name, max_seq_len=128), seed=0, device=torch.device("cpu")).save(tmp_path)
    there = BradleyTerryRM.from_pretrained(tmp_path, device="cpu")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    here = BradleyTerryRM.from_pretrained(tmp_path, device="cuda", dtype="bfloat16")
    assert torch.cuda.max_memory_allocated() - before < 0.6 * 4 * here.num_parameters
    packing = here.packing()
    assert packing is not None
    assert packing.kernel == "varlen"
    truth, packed = there.score_pairs(gold_pairs[:24]), here.score_pairs(gold_pairs[:24])
    here.allow_packing = False
    padded = here.score_pairs(gold_pairs[:24])
    bound = 2.0**-5 * np.abs(truth).max()
    assert np.abs(packed - truth).max() < bound
    assert np.abs(padded - truth).max() < bound
