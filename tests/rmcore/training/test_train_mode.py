import pytest
import torch

from rmcore.config.model import LoraSettings, ModelConfig
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.training.train_mode import without_dropout
from tests.support.random_models import adapted


def rewards(rm, pairs):
    sides = [pair.chosen for pair in rm.renderer.tokenize_pairs(pairs)]
    rm.model.train()
    return rm.score_chunk(sides, [range(len(sides))])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["minilm", "tiny"])
def test_a_models_own_dropout_is_off_inside_and_back_after(name, gold_pairs):
    rm = BradleyTerryRM.new(ModelConfig(name=name, max_seq_len=64), seed=0, device=torch.device("cpu"))
    if name == "tiny":  # its dropout is zero; causal models keep theirs inside of attention
        for layer in rm.model.model.layers:
            layer.self_attn.attention_dropout = 0.3
    expected = torch.from_numpy(rm.score_sides([p.chosen for p in rm.renderer.tokenize_pairs(gold_pairs[:4])]))
    assert not torch.equal(rewards(rm, gold_pairs[:4]), rewards(rm, gold_pairs[:4]))
    with without_dropout(rm.model):
        assert torch.equal(rewards(rm, gold_pairs[:4]), rewards(rm, gold_pairs[:4]))
        torch.testing.assert_close(rewards(rm, gold_pairs[:4]), expected, atol=1e-5, rtol=1e-5)
    assert not torch.equal(rewards(rm, gold_pairs[:4]), rewards(rm, gold_pairs[:4]))


def test_the_dropout_of_adapters_was_asked_for_and_stays(gold_pairs):
    rm = adapted("tiny", LoraSettings(dropout=0.5), max_seq_len=64)
    with without_dropout(rm.model):
        assert not torch.equal(rewards(rm, gold_pairs[:4]), rewards(rm, gold_pairs[:4]))


def test_dropout_that_is_a_function_and_no_module_is_off_too():
    from transformers import OPTConfig, OPTForSequenceClassification

    config = OPTConfig(
        vocab_size=32, hidden_size=16, ffn_dim=32, num_hidden_layers=2, num_attention_heads=2, dropout=0.5,
        word_embed_proj_dim=16, max_position_embeddings=32, num_labels=1, pad_token_id=1,
    )  # fmt: skip
    model = OPTForSequenceClassification(config).train()
    ids = torch.arange(4, 12).view(1, -1)
    assert not torch.equal(model(ids).logits, model(ids).logits)
    with without_dropout(model):
        assert torch.equal(model(ids).logits, model(ids).logits)
    assert not torch.equal(model(ids).logits, model(ids).logits)
