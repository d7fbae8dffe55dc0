"""torch.compile that fails is given up loudly, and changes nothing but the speed."""

import numpy as np
import pytest
import torch
import torch._inductor.config as inductor

from rmcore.models.packing.rows import PaddedRows
from rmcore.training.compiling import CompiledForward

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def small_folder(tiny_folder, tmp_path_factory):
    """`tiny` with one layer of its four."""
    from rmcore.models.reward_model import BradleyTerryRM

    rm = BradleyTerryRM.from_pretrained(tiny_folder, device="cpu")
    rm.model.model.layers = rm.model.model.layers[:1]
    rm.model.config.num_hidden_layers = 1
    rm.model.config.layer_types = rm.model.config.layer_types[:1]
    folder = tmp_path_factory.mktemp("small")
    rm.save(folder)
    return str(folder)


def test_without_a_compiler_training_goes_on_with_the_same_losses(tmp_path, start, small_folder, capsys):
    plain = start(tmp_path / "plain", model={"name": small_folder}, steps=3, packing=False).run()
    torch._dynamo.reset()
    with inductor.patch({"cpp.cxx": ("/nowhere/c++",), "force_disable_caches": True, "compile_threads": 1}):
        compiled = start(tmp_path / "compiled", model={"name": small_folder}, steps=3, compile=True).run()
    said = capsys.readouterr().err
    assert said.count("warning: torch.compile failed") == 1
    assert not compiled.result.compiled
    assert compiled.losses() == plain.losses()


def test_a_compiled_forward_computes_the_same_and_says_that_it_works():
    def forward(rows, target_margins):
        rewards = (weight[rows.input_ids] * rows.attention_mask).sum(1)
        margins = rewards[::2] - rewards[1::2]
        return torch.nn.functional.softplus(target_margins - margins).sum(), margins

    weight = torch.randn(9, generator=torch.Generator().manual_seed(0), requires_grad=True)
    torch._dynamo.reset()
    compiled = CompiledForward(forward)
    for count, length in ((4, 5), (6, 3)):
        ids = torch.arange(count * length).view(count, length) % 9
        batch = PaddedRows(ids, torch.ones_like(ids), ids.numel()), torch.zeros(count // 2)
        gradients = []
        for function in (forward, compiled):
            loss, margins = function(*batch)
            gradients.append((loss.item(), margins.tolist(), *torch.autograd.grad(loss, weight)[0].tolist()))
        np.testing.assert_allclose(np.hstack(gradients[0]), np.hstack(gradients[1]), rtol=1e-5)
    assert compiled.works
