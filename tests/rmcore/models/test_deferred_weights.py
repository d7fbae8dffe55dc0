"""Weights that are left in their files are those that a usual load reads, and what is drawn is drawn alike."""

import pytest
import torch
from transformers import MixtralConfig, MixtralForSequenceClassification, T5Config, T5ForSequenceClassification

from rmcore.core.errors import ModelError
from rmcore.models.loading import load_backbone, read_config
from rmcore.models.tiny import build_tiny
from rmcore.models.weight_files import load_deferred


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_tiny(tmp_path_factory.mktemp("model"), size="tiny-small")


def test_leaving_out_what_something_copied_is_refused(folder):
    loaded = load_backbone(str(folder), seed=0, defer=True)
    layer = loaded.model.model.layers[0].mlp.up_proj
    layer.weight = torch.nn.Parameter(layer.weight.clone())
    with pytest.raises(ModelError, match="copied or replaced"):
        loaded.deferred.leave_out(loaded.model)


def test_a_model_that_must_be_loaded_whole_is_and_says_why(folder, tmp_path, capsys):
    tied = T5Config(vocab_size=20, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, num_labels=1)
    experts = MixtralConfig(
        vocab_size=20, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=2, num_labels=1, pad_token_id=0,
    )  # fmt: skip
    for model, reason in (
        (T5ForSequenceClassification(tied), "several places"),
        (MixtralForSequenceClassification(experts), "another way"),  # the files have each expert by itself
    ):
        model.save_pretrained(tmp_path / reason)
        with pytest.raises(ModelError, match=reason):
            load_deferred(str(tmp_path / reason), read_config(str(tmp_path / reason), trust_remote_code=False))
    assert load_backbone("tiny", seed=0, defer=True).deferred is None
    assert "note: each process loads all of tiny before it is sharded: it is built" in capsys.readouterr().err
