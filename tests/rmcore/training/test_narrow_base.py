"""A frozen base that is held as its files have it, in bfloat16: half the memory, the same training to the last bit."""

import numpy as np
import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file

from rmcore.config.model import LoraSettings, ModelConfig
from rmcore.models.reward_model import BradleyTerryRM

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder of which all numbers are bfloat16 ones."""
    folder = tmp_path_factory.mktemp("base")
    rm = BradleyTerryRM.new(ModelConfig(max_seq_len=96), seed=0, device=CPU)
    for parameter in rm.model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    rm.save(folder)
    return folder


def linear_layers(rm):
    layers = {name: one for name, one in rm.model.named_parameters() if "base_layer" in name and one.ndim == 2}
    assert layers
    return layers


@pytest.mark.slow
def test_training_saving_and_what_is_left_are_the_same_to_the_bit(tmp_path, base, start):
    outcomes = []
    for narrow in (True, False):
        folder, model = tmp_path / str(narrow), {"name": str(base), "lora": {}}
        training = start(folder, model=model, steps=4, lr=1e-2, precision="bf16", packing=False)
        assert {weight.dtype for weight in linear_layers(training.rm).values()} == {torch.bfloat16}
        if not narrow:
            training.rm.widen()
        training.run()
        files = [
            load_file(folder / "best" / name) for name in ("model.safetensors", "adapter/adapter_model.safetensors")
        ]
        left = {name: one.detach() for name, one in training.rm.model.named_parameters()}
        outcomes.append((training.losses(), files, left, training.result.peak_training_bytes))
    (losses, files, left, peak), (others, other_files, other_left, other_peak) = outcomes
    assert losses == others
    torch.testing.assert_close((files, left), (other_files, other_left), rtol=0, atol=0)
    assert {tensor.dtype for tensor in files[0].values()} == {torch.float32}
    assert peak < other_peak  # autocast copies no weight that is bfloat16 already


def test_float32_rewards_of_a_narrow_base_are_those_of_the_wide_one(base, gold_pairs):
    rm = BradleyTerryRM.new(ModelConfig(name=str(base), max_seq_len=96, lora=LoraSettings()), seed=0, device=CPU)
    expected, packing = rm.score_pairs(gold_pairs[:4]), rm.packing("fp32")
    assert rm.narrow_base()
    rm._packing.clear()
    found = rm.score_pairs(gold_pairs[:4])
    assert rm.packing("fp32") == packing
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


def test_weights_that_would_be_rounded_or_are_trained_stay_float32(base, gold_pairs):
    rm = BradleyTerryRM.new(ModelConfig(name=str(base), max_seq_len=96), seed=0, device=CPU)
    rm.add_lora(LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    layers = linear_layers(rm)
    first = next(iter(layers))
    layers[first].data.add_(2.0**-20)
    rm.narrow_base()
    kinds = {name: weight.dtype for name, weight in rm.model.named_parameters()}
    assert kinds[first] == torch.float32
    assert all(kinds[name] == torch.bfloat16 for name in layers if name != first)
    trained_weights = [name for name, weight in rm.model.named_parameters() if weight.requires_grad]
    assert {kinds[name] for name in trained_weights} == {torch.float32}
    rm.widen()
    assert {weight.dtype for weight in rm.model.parameters()} == {torch.float32}


def test_the_base_is_float32_where_that_is_computed_in(tmp_path, base, start):
    training = start(tmp_path, model={"name": str(base), "lora": {}}, precision="fp32")
    assert {weight.dtype for weight in training.rm.model.parameters()} == {torch.float32}
