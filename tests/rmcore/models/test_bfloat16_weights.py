"""Weights that are loaded in bfloat16: near the same rewards, half the memory, an exact head, and no way to a file."""

from pathlib import Path

import numpy as np
import pytest
import torch

from rmcore.config.model import LoraSettings
from rmcore.config.train import TrainConfig
from rmcore.core.errors import ModelError
from rmcore.core.tracking import NullTracker
from rmcore.data.pair import PreferencePair
from rmcore.ensembles.features import features, head_of
from rmcore.models import lora
from rmcore.models.layers import is_reward_head
from rmcore.models.precision import float32_head
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.training.loop import Trainer
from tests.support.random_models import adapted, model_of

BOUND = 2.0**-5
"""Largest difference of a reward, as a share of the largest absolute reward: the one of `rm-opt export`."""
PROMPT = "Name a fruit that is good in winter, and say in one sentence why you think so."
ANSWERS = ["Pears.", "Gladly: apples keep well in a cool cellar.", "No.", "A lemon, for tea", "Pears, they are sweet."]
ASKED = [(PROMPT, answer) for answer in ANSWERS] + [("Hello", "Hi"), ("Sort: b, a", "a, b")]
SHAPES = ("gpt2", "bert", "roberta")


def near(found, expected):
    return np.abs(found - expected).max() <= BOUND * np.abs(expected).max()


def rank_correlation(a, b):
    return np.corrcoef(np.argsort(np.argsort(a)), np.argsort(np.argsort(b)))[0, 1]


def both(folder):
    return [BradleyTerryRM.from_pretrained(folder, device="cpu", dtype=dtype) for dtype in ("float32", "bfloat16")]


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bfloat16")
    for shape in SHAPES:
        model_of(shape).save(folder / shape)
    adapted("tiny").save(folder / "qwen2")
    return folder


@pytest.mark.parametrize("shape", [*SHAPES, "qwen2"])
def test_rewards_are_near_those_of_float32_packed_and_padded(shape, saved):
    exact, rounded = both(saved / shape)
    sides = exact.renderer.tokenize_sides(ASKED)
    expected, found = exact.score_sides(sides), rounded.score_sides(sides)
    assert rounded.packing() is not None
    assert found.dtype == np.float32
    assert near(found, expected)
    assert np.any(found != expected)
    assert rank_correlation(found, expected) > 0.9
    rounded.allow_packing = False
    assert near(rounded.score_sides(sides), expected)


@pytest.mark.parametrize("shape", [*SHAPES, "qwen2"])
def test_all_weights_are_rounded_but_the_heads_which_are_as_the_file_has_them(shape, saved):
    exact, rounded = (rm.model for rm in both(saved / shape))
    exact_ones = dict(exact.named_parameters())
    assert type(rounded) is type(exact)
    for name, parameter in rounded.named_parameters():
        kept = is_reward_head(name)
        assert parameter.dtype == (torch.float32 if kept else torch.bfloat16), name
        assert torch.equal(parameter, exact_ones[name] if kept else exact_ones[name].bfloat16()), name
    head = head_of(BradleyTerryRM.from_pretrained(saved / shape, device="cpu", dtype="bfloat16"))
    assert not torch.equal(head.weight, head.weight.bfloat16().float())


def test_the_head_computes_in_float32_whoever_calls_the_model(saved):
    exact, rounded = both(saved / "qwen2")
    sides = rounded.renderer.tokenize_sides(ASKED)
    found = rounded.score_sides(sides)
    states = features(rounded, sides)
    head = head_of(rounded).weight.detach().double().numpy()[0]
    # bfloat16 sums would be some thousand times further away.
    np.testing.assert_allclose(found, states.astype(np.float64) @ head, rtol=1e-5, atol=1e-5)
    ids = torch.tensor([sides[0].ids])
    with torch.no_grad():
        alone = rounded.model(input_ids=ids).logits
        with float32_head(rounded.model):
            pass  # leaves it as it was
        again = rounded.model(input_ids=ids).logits
    assert alone.dtype == torch.float32
    assert torch.equal(alone, again)
    assert near(alone.numpy()[0], exact.score_sides(sides[:1]))


@pytest.mark.slow
def test_an_adapter_is_put_on_its_rounded_base_after_that_was_recognised(saved, tmp_path):
    base = saved / "qwen2"
    adapted(base, LoraSettings(rank=4)).save(tmp_path / "trained")
    adapter = tmp_path / "trained" / lora.ADAPTER_FOLDER
    exact, rounded = both(adapter)
    assert rounded.has_adapters
    assert near(rounded.score(*zip(*ASKED, strict=True)), exact.score(*zip(*ASKED, strict=True)))
    kinds = {name: one.dtype for name, one in rounded.model.named_parameters()}
    assert all(kind == torch.float32 for name, kind in kinds.items() if "lora_" in name or is_reward_head(name))
    assert kinds["base_model.model.model.layers.0.mlp.up_proj.base_layer.weight"] == torch.bfloat16
    assert torch.equal(head_of(rounded).weight, head_of(exact).weight)
    other = tmp_path / "other"
    adapted("tiny-small").save(other)
    record = adapter / lora.BASE_FILE
    record.write_text(record.read_text().replace(str(base), str(other)))
    with pytest.raises(ModelError, match="trained on other weights"):
        BradleyTerryRM.from_pretrained(adapter, device="cpu", dtype="bfloat16")


def test_it_is_neither_saved_nor_trained_nor_differentiated_twice(saved, tmp_path):
    _, rounded = both(saved / "qwen2")
    with pytest.raises(ModelError, match="are bfloat16 here, and such a model cannot be saved"):
        rounded.save(tmp_path / "file")
    assert not (tmp_path / "file").exists()
    pairs = rounded.renderer.tokenize_pairs([PreferencePair(PROMPT, ANSWERS[1], ANSWERS[2])])
    with pytest.raises(ModelError, match="cannot be trained"):
        Trainer(
            rounded,
            TrainConfig(steps=1),
            train=pairs,
            validation=[],
            folder=tmp_path / "run",
            tracker=NullTracker(),
            seed=0,
        )
