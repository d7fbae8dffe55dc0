import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoTokenizer, BertConfig, BertForSequenceClassification

from rmcore.config.model import ModelConfig
from rmcore.core.errors import ConfigError, ModelError
from rmcore.data.rendering import RENDERING_FILE
from rmcore.ensembles.score import score_pairs_table, score_readable_responses
from rmcore.models.loading import load_tokenizer, resolve_model
from rmcore.models.packing.attention import ATTENTION
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.models.seal import SEAL_FILE, write_seal
from rmcore.models.trained import load_renderer
from tests.support.random_models import hugging_face_rewards

CPU = torch.device("cpu")
PROMPTS = ["What is 2 + 2?", "Sort: pear, fig", "Name a fruit and say why it is good " * 4]
RESPONSES = ["4", "fig, pear. Of course, gladly.", "lemon"]


def test_a_saved_model_is_a_plain_hugging_face_folder_with_the_same_rewards(rm, tmp_path):
    """Whose files know nothing of packing, by which it has given rewards before."""
    rewards = rm.score(PROMPTS, RESPONSES)
    assert rm.model.config._attn_implementation == ATTENTION
    rm.save(tmp_path)
    assert not [file for file in tmp_path.rglob("*.json") if ATTENTION in file.read_text(encoding="utf-8")]
    assert AutoConfig.from_pretrained(tmp_path).problem_type == "regression"
    sides = rm.renderer.tokenize_sides(list(zip(PROMPTS, RESPONSES, strict=True)))
    np.testing.assert_allclose(hugging_face_rewards(tmp_path, sides), rewards, atol=2e-6)
    reloaded = BradleyTerryRM.from_pretrained(tmp_path, device="cpu")
    assert np.array_equal(reloaded.score(PROMPTS, RESPONSES), rewards)
    assert reloaded.renderer.rendering == rm.renderer.rendering


@pytest.fixture
def encoder_folder(tiny_folder, tmp_path):
    """A small BERT without a reward head yet, with the tiny tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    tokenizer.save_pretrained(tmp_path)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=48,
        pad_token_id=tokenizer.pad_token_id,
    )
    BertForSequenceClassification(config).bert.save_pretrained(tmp_path)
    return tmp_path


def test_a_backbone_gets_a_head_with_one_label(encoder_folder):
    rm = BradleyTerryRM.new(ModelConfig(name=str(encoder_folder), max_seq_len=48), seed=0, device=CPU)
    assert rm.model.config.num_labels == 1
    assert rm.score(PROMPTS, RESPONSES).shape == (3,)


def test_a_backbone_without_head_cannot_score(encoder_folder):
    with pytest.raises(ModelError, match="no reward head, so its rewards would be random"):
        BradleyTerryRM.from_pretrained(encoder_folder)


def test_more_tokens_than_positions_are_refused_with_the_limit(encoder_folder):
    with pytest.raises(ConfigError, match=r"max_seq_len=49.*positions for 48 tokens"):
        BradleyTerryRM.new(ModelConfig(name=str(encoder_folder), max_seq_len=49), seed=0, device=CPU)


@pytest.mark.parametrize("name", ["tiny", "minilm"])
def test_a_tokenizer_that_loses_text_is_refused(tiny_folder, tmp_path, name):
    """Without its vocabulary transformers makes an empty tokenizer, which gives every text the same few tokens."""
    source = tiny_folder if name == "tiny" else Path(resolve_model(name))
    for file in ("config.json", "tokenizer_config.json", "special_tokens_map.json"):
        if (source / file).is_file():
            shutil.copy(source / file, tmp_path)
    assert load_tokenizer(str(source))("text").input_ids
    with pytest.raises(ModelError, match=r"loses text.*Restore tokenizer\.json"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(rm, tmp_path, value):
    rm.save(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] = value
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    write_seal(tmp_path)
    with pytest.raises(ModelError, match=r"NaN or infinity in model\.layers\.1\.mlp\.up_proj\.weight, 1 tensors"):
        BradleyTerryRM.from_pretrained(tmp_path, device="cpu")


def test_rewards_that_are_not_finite_are_refused_with_their_rows(tiny_folder, gold_pairs):
    rm = BradleyTerryRM.new(ModelConfig(name=str(tiny_folder)), seed=0, device=CPU)
    with torch.no_grad():
        rm.model.score.weight.fill_(3e38)  # finite, and the sum is not
    with pytest.raises(ModelError, match=r"3 of 3 rewards are not finite \(response 0, response 1, response 2\)"):
        rm.score(PROMPTS, RESPONSES)
    named = f"chosen of pair {gold_pairs[0].pair_id}, rejected of pair {gold_pairs[0].pair_id}"
    with pytest.raises(ModelError, match=rf"4 of 4 rewards are not finite \({named}"):
        score_pairs_table(rm, gold_pairs[:2])
    with pytest.raises(ModelError, match=r"not finite \(row 1, row 2\)"):
        score_readable_responses(rm, [("a", "b"), ("c", "d")])


def test_a_model_trained_elsewhere_has_no_record_and_gets_a_default(rm, tmp_path):
    rm.save(tmp_path)
    (tmp_path / RENDERING_FILE).unlink()
    (tmp_path / SEAL_FILE).unlink()
    loaded = BradleyTerryRM.from_pretrained(tmp_path, device="cpu")
    assert loaded.renderer.rendering.format == "chat"
    assert loaded.renderer.rendering.max_seq_len == 1024


def test_a_checkpoint_that_lacks_its_head_is_refused(rm, tmp_path):
    rm.save(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["score.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    write_seal(tmp_path)
    with pytest.raises(ModelError, match=r"lacks the weights score\.weight"):
        BradleyTerryRM.from_pretrained(tmp_path, device="cpu")


SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [hf.MPNetConfig, hf.RobertaConfig, hf.XmodConfig, hf.BertConfig])
def test_a_model_of_others_reads_sides_up_to_its_last_position(kind, tiny_folder, tmp_path):
    tokenizer = hf.AutoTokenizer.from_pretrained(tiny_folder)
    config = kind(**SMALL, vocab_size=len(tokenizer), pad_token_id=1, max_position_embeddings=40, num_labels=1)
    if kind is hf.XmodConfig:
        config.default_language, config.languages = "en_XX", ["en_XX"]
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(1)
    for part in (hf.AutoModelForSequenceClassification.from_config(config), tokenizer):
        part.save_pretrained(tmp_path)
    rm = BradleyTerryRM.from_pretrained(tmp_path, device="cpu")
    limit = 40 if kind is hf.BertConfig else 38
    assert rm.renderer.rendering.max_seq_len == limit
    assert load_renderer(str(tmp_path), max_seq_len=None, render_fn=None).rendering.max_seq_len == limit
    (side,) = rm.renderer.tokenize_sides([("Name a fruit " * 30, "A pear.")])
    assert len(side.ids) == limit
    assert rm.score(["Name a fruit " * 30], ["A pear."]).shape == (1,)
    with pytest.raises(ConfigError, match=rf"positions for {limit} tokens"):
        BradleyTerryRM.from_pretrained(tmp_path, device="cpu", max_seq_len=limit + 1)
