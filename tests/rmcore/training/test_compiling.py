"""Layers that are compiled compute the same by few graphs; where compilation fails, it is given up loudly."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch._inductor.config as inductor
from torch._dynamo.exc import FailOnRecompileLimitHit
from transformers import AutoModelForSequenceClassification

from rmcore.config.model import ModelConfig
from rmcore.models.compiling import CompiledLayers
from rmcore.models.layers import recompute_layers
from rmcore.models.packing.attention import ATTENTION
from rmcore.models.packing.forward import packed_outputs
from rmcore.models.packing.layout import Packing, pack_sides
from rmcore.models.reward_model import BradleyTerryRM
from tests.support import varlen_kernel  # noqa: F401  (packed rows in one operation, as on a GPU)
from tests.support.exact_models import VOCABULARY, config_of


def model_of(architecture, num_layers, *, checkpointing=False):
    torch.manual_seed(0)
    config = config_of(architecture, num_layers)
    model = AutoModelForSequenceClassification.from_config(config, attn_implementation=ATTENTION).double()
    if checkpointing:
        recompute_layers(model)
        model.train()
        return model
    return model.eval()


def rows_of(architecture):
    """Packed rows of 1 to 3 pairs, with and without a shared prompt, of many lengths."""
    packing = Packing(causal=architecture != "bert", kernel="varlen", grouped=True)
    generator = torch.Generator().manual_seed(0)

    def draw(most):
        length = int(torch.randint(1, most, (1,), generator=generator))
        return torch.randint(1, VOCABULARY, (length,), generator=generator).tolist()

    rows = []
    for num_pairs, shares in ((3, True), (2, False), (1, True)):
        prompts = [draw(8) if shares else [] for _ in range(num_pairs)]
        sides = [prompt + draw(8) for prompt in prompts for _ in range(2)]
        rows.append(pack_sides(sides, [[2 * at, 2 * at + 1] for at in range(num_pairs)], packing))
    return rows


def computed(model, rows):
    """Outputs and gradients of each row."""
    found = []
    for row in rows:
        model.zero_grad()
        outputs = packed_outputs(model, row)
        outputs.square().sum().backward()
        found += [outputs.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    return found


@pytest.fixture
def graphs(monkeypatch):
    """How many graphs were compiled since; by the backend that runs them as they are, which takes seconds."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    yield lambda: torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "checkpointing"), [("qwen2", True), ("bert", False)])
def test_one_graph_serves_all_layers_and_rows_and_gives_the_same_bits(architecture, checkpointing, graphs):
    model, rows = model_of(architecture, 2, checkpointing=checkpointing), rows_of(architecture)
    names, plain = list(model.state_dict()), computed(model, rows)
    compiled = CompiledLayers(model)
    with compiled.active():
        found = computed(model, rows)
        assert list(model.state_dict()) == names
    assert compiled.works
    assert graphs() == 1
    assert all(torch.equal(one, other) for one, other in zip(found, plain, strict=True))
    if architecture == "qwen2":
        assert_second_derivatives(model, rows[0])
        assert graphs() == 1


def assert_second_derivatives(model, row):
    """Outside of the steps layers are plain, which have them."""
    for module in model.modules():  # the kernel has none
        if hasattr(module, "config"):
            module.config._attn_implementation = "eager"
    loss = model(input_ids=row.input_ids, attention_mask=torch.ones_like(row.input_ids)).logits.square().sum()
    weight = model.model.layers[0].mlp.up_proj.weight
    (first,) = torch.autograd.grad(loss, weight, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), weight)
    assert second.abs().max() > 0


@pytest.mark.slow
def test_scoring_with_compiled_layers_gives_the_same_bits_by_one_graph(graphs, gold_pairs):
    rm = BradleyTerryRM.new(ModelConfig(name="tiny", max_seq_len=96), seed=0, device=torch.device("cpu"))
    assert rm.packing("fp32") is not None
    rm._packing["fp32", "cpu"] = Packing(causal=True, kernel="varlen", grouped=True, pad_id=rm.pad_id)
    sides = [side for pair in rm.renderer.tokenize_pairs(gold_pairs[:12]) for side in (pair.chosen, pair.rejected)]
    plain = rm.score_sides(sides, token_budget=400)
    rm.compiled = CompiledLayers(rm.model)
    compiled = rm.score_sides(sides, token_budget=400)
    assert rm.compiled.works
    assert graphs() == 1
    np.testing.assert_array_equal(compiled, plain)


@pytest.mark.slow
def test_scoring_that_cannot_be_compiled_goes_on_without(gold_pairs, capsys, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: _raising)
    rm = BradleyTerryRM.new(ModelConfig(name="tiny", max_seq_len=96), seed=0, device=torch.device("cpu"))
    plain = rm.score_pairs(gold_pairs[:4])
    rm.compiled = CompiledLayers(rm.model)
    np.testing.assert_allclose(rm.score_pairs(gold_pairs[:4]), plain, rtol=1e-5, atol=1e-6)
    assert not rm.compiled.works
    assert capsys.readouterr().err.count("warning: torch.compile failed") == 1


def _raising(*_, **__):
    raise FailOnRecompileLimitHit("too many")


@pytest.mark.slow
def test_evaluations_of_a_compiled_training_use_its_layers(tmp_path, start, graphs, monkeypatch):
    monkeypatch.setattr("rmcore.training.loop.SCORES_COMPILED", {"cpu": True})
    used = []

    def look(evaluation):
        used.append(evaluation.rm.compiled.works)
        return {}

    changes = {"steps": 2, "eval_every": 1, "packing": False}
    plain = start(tmp_path / "plain", **changes).run()
    compiled = start(tmp_path / "compiled", compile=True, callbacks=[look], **changes).run()
    assert used == [True, True]
    assert compiled.rm.compiled is None
    np.testing.assert_allclose(compiled.trainer.best_rewards, plain.trainer.best_rewards, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_without_a_compiler_training_goes_on_with_the_same_losses(tmp_path, start, capsys):
    plain = start(tmp_path / "plain", steps=3, packing=False).run()
    torch._dynamo.reset()
    with inductor.patch({"cpp.cxx": ("/nowhere/c++",), "force_disable_caches": True, "compile_threads": 1}):
        compiled = start(tmp_path / "compiled", steps=3, compile=True).run()
    said = capsys.readouterr().err
    assert said.count("warning: torch.compile failed") == 1
    assert not compiled.result.compiled
    assert compiled.losses() == plain.losses()


@pytest.mark.slow
@pytest.mark.parametrize("recomputes", [False, True])
def test_compiled_layers_of_packed_rows_are_one_graph_and_the_last_is_computed_for_all_tokens(
    recomputes, tmp_path, start, graphs, monkeypatch, capsys
):
    """Although the trial found that the last layer can compute less, and evaluation has it compute less."""
    own = BradleyTerryRM.packing
    monkeypatch.setattr(BradleyTerryRM, "packing", lambda *given: replace(own(*given), kernel="varlen", grouped=True))
    changes = {"steps": 2, "gradient_checkpointing": recomputes, "precision": "fp32"}
    plain = start(tmp_path / "plain", **changes).run()
    assert plain.trainer.packing.reads_last
    compiled = start(tmp_path / "compiled", compile=True, **changes).run()
    assert compiled.result.compiled
    assert not compiled.trainer.packing.reads_last
    assert capsys.readouterr().err.count("note: the last layer is computed for all tokens") == 1
    assert graphs() == 1
    assert compiled.losses() == pytest.approx(plain.losses(), rel=1e-5)
