"""A model takes sides of as many tokens as it has positions for, whatever its class counts positions from."""

import pytest
import torch
import transformers as hf

from rmcore.core.errors import ConfigError
from rmcore.models.loading import max_positions
from rmcore.models.packing.forward import _first_position
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.models.trained import load_renderer

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
FIRST = {
    "BertConfig": 0, "ElectraConfig": 0, "MarkupLMConfig": 1, "RobertaConfig": 2, "XLMRobertaConfig": 2,
    "CamembertConfig": 2, "MPNetConfig": 2, "IBertConfig": 2, "EsmConfig": 2,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", FIRST)
def test_a_class_with_learned_positions_has_as_many_as_behind_its_first(name):
    config = getattr(hf, name)(**({"vocab_size": 33, "pad_token_id": 1} if name == "EsmConfig" else {}))
    with torch.device("meta"):  # its shell has no memory
        model = hf.AutoModelForSequenceClassification.from_config(config)
    assert _first_position(model) == FIRST[name]
    assert max_positions(config) == config.max_position_embeddings - FIRST[name]


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
