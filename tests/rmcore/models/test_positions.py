"""A model takes sides of as many tokens as it has positions for, whatever its class counts positions from."""

import pytest
import torch
import transformers as hf
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

from rmcore.core.errors import ConfigError
from rmcore.models.loading import max_positions
from rmcore.models.packing.forward import _first_position
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.models.trained import load_renderer

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
NEEDED = {"esm": {"vocab_size": 33, "pad_token_id": 1}, "luke": {"entity_vocab_size": 10}}


def learned_positions(kind):
    """The config of a class with an embedding of positions, None of another one; its shell has no memory."""
    config = kind(**NEEDED.get(kind.model_type, {}))
    if getattr(config, "rope_parameters", None) or config.get_text_config() is not config:
        return None
    classes = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[kind]
    with torch.device("meta"):
        model = (classes[0] if isinstance(classes, tuple) else classes)(config)
    tables = [module for name, module in model.named_modules() if name.endswith("embeddings.position_embeddings")]
    return (config, model) if any(hasattr(table, "padding_idx") for table in tables) else None


@pytest.mark.slow
def test_every_class_with_learned_positions_has_as_many_as_behind_its_first():
    met = set()
    for kind in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        if kind.model_type in ("cohere_compass_text", "layoutlmv2", "nemotron", "perceiver"):
            continue  # their defaults build no model, or need another library
        found = learned_positions(kind)
        if found is not None:
            config, model = found
            first = _first_position(model)
            assert max_positions(config) == config.max_position_embeddings - first, kind.model_type
            met.add((kind.model_type, first))
    assert {("bert", 0), ("roberta", 2), ("mpnet", 2), ("ibert", 2), ("esm", 2), ("markuplm", 1)} <= met


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
