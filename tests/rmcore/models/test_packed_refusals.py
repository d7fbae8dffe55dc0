"""What a packed row cannot express goes to padding, with a line that says why and with the right rewards.

Accepting one model too many would give wrong rewards in silence, so this is where packing must not err.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

from rmcore.core.errors import ModelError
from rmcore.data.rendering import Rendering, TokenizedSide
from rmcore.models.packing import forward
from rmcore.models.packing.forward import find_packing, packed_outputs, rewards_of
from rmcore.models.packing.layout import pack_sides, pad_rows
from rmcore.models.precision import InFloat32, round_backbone
from rmcore.models.reward_model import BradleyTerryRM

PAD, VOCABULARY, LONGEST = 1, 60, 48
WIDTH = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
COMMON = {"vocab_size": VOCABULARY, "num_labels": 1, "pad_token_id": PAD, "bos_token_id": None, "eos_token_id": 2}
SHAPE: dict[str, Any] = WIDTH | COMMON | {"max_position_embeddings": 64}
MAMBA = {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False, "mamba_d_state": 4}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
LAYERS = {"layer_types": ["linear_attention", "full_attention"], "mlp_only_layers": [0, 1]}
NARROW = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY, "num_labels": 1, "pad_token_id": PAD}

HYBRIDS = {
    "jamba": partial(hf.JambaConfig, **SHAPE, **MAMBA, num_key_value_heads=2, num_experts=1, mamba_dt_rank=4),
    "qwen3_next": partial(hf.Qwen3NextConfig, **SHAPE, **LINEAR, **LAYERS, num_key_value_heads=2, head_dim=8),
}
REFUSED: dict[str, Callable[[], hf.PretrainedConfig]] = HYBRIDS | {
    "bloom": partial(hf.BloomConfig, **COMMON, hidden_size=32, n_layer=2, n_head=4),  # ALiBi
    "falcon_alibi": partial(hf.FalconConfig, **SHAPE, alibi=True),
    "mpt": partial(hf.MptConfig, **COMMON, d_model=32, n_layers=2, n_heads=4, max_seq_len=64),  # ALiBi
    "deberta_v2": partial(hf.DebertaV2Config, **SHAPE, relative_attention=True, pos_att_type=["p2c", "c2p"]),
    "gemma2": partial(hf.Gemma2Config, **SHAPE, num_key_value_heads=2, head_dim=8, attn_logit_softcapping=20.0),
    "gpt_oss": partial(
        hf.GptOssConfig, **SHAPE, num_key_value_heads=2, head_dim=8, num_local_experts=2, num_experts_per_tok=1
    ),  # sinks
    "ctrl": partial(hf.CTRLConfig, **NARROW, dff=48, n_positions=64),  # counts places in the row
    "modernbert": partial(hf.ModernBertConfig, **SHAPE, local_attention=128, sep_token_id=2, cls_token_id=2),
    "distilbert": partial(
        hf.DistilBertConfig, dim=32, hidden_dim=48, n_layers=2, n_heads=4, num_labels=1, vocab_size=VOCABULARY
    ),  # a head of another build
}


def build(config: hf.PretrainedConfig, **options: Any) -> Any:
    torch.manual_seed(0)
    return hf.AutoModelForSequenceClassification.from_config(config, **options).eval()


def find(model: Any) -> Any:
    return find_packing(model, longest_side=LONGEST, precision="fp32", pad_id=PAD)


def draw(count: int, seed: int) -> list[int]:
    return torch.randint(3, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def sides() -> list[list[int]]:
    prompt = draw(20, 0)
    return [prompt + draw(6, 1), prompt + draw(28, 2), draw(3, 3), draw(11, 4), [5]]


def alone(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([rewards_of(model, pad_rows([side], pad_id=PAD)) for side in sides()])


def reward_model(model: Any, tiny_folder: Any) -> BradleyTerryRM:
    tokenizer = hf.AutoTokenizer.from_pretrained(tiny_folder)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(PAD)
    return BradleyTerryRM.of(model, tokenizer, Rendering("plain", LONGEST))


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_it_is_padded_with_the_reason_and_the_right_rewards(name, tiny_folder, capsys):
    """At the usual small initialisation, where positions change a reward least."""
    model = build(REFUSED[name]())
    rewards, attention = alone(model), model.config._attn_implementation
    rm = reward_model(model, tiny_folder)
    found = rm.score_sides([TokenizedSide(side, 0) for side in sides()])
    assert rm.packing("fp32") is None
    np.testing.assert_allclose(found, rewards.numpy(), rtol=1e-4, atol=1e-5)
    said = capsys.readouterr().err
    assert said.count("note: sides are padded, not packed: ") == 1
    assert said.strip().endswith(".")
    assert model.config._attn_implementation == attention
    assert torch.equal(alone(model), rewards)


@pytest.mark.parametrize("name", ["ctrl", "smollm3"])
def test_weights_in_bfloat16_do_not_hide_what_float32_shows(name, monkeypatch):
    """The trial computes in float32 on the rounded weights: here positions are off by one, which moves little."""
    model = build((REFUSED | ACCEPTED)[name]())
    round_backbone(model)
    exact = copy.deepcopy(model).float()
    with InFloat32():
        torch.testing.assert_close(alone(model), alone(exact), rtol=1e-5, atol=1e-7)
    if name in ACCEPTED:
        assert find(model).causal
        monkeypatch.setattr(forward, "_first_position", lambda plain: 1)
    for one in (model, exact):
        with pytest.raises(ModelError, match="packed trial differ"):
            find(one)


GROUPED = {"num_key_value_heads": 2}
WINDOWED = {
    "mistral": (hf.MistralConfig, GROUPED, "sliding_window"),
    "phi3": (hf.Phi3Config, GROUPED, "sliding_window"),
    "starcoder2": (hf.Starcoder2Config, GROUPED, "sliding_window"),
    "gemma3": (hf.Gemma3TextConfig, GROUPED | {"head_dim": 8}, "sliding_window"),
    "olmo3": (hf.Olmo3Config, GROUPED, "sliding_window"),
    "qwen2": (hf.Qwen2Config, GROUPED | {"use_sliding_window": True, "max_window_layers": 0}, "sliding_window"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WINDOWED)
def test_a_window_shorter_than_a_side_is_refused_and_a_longer_one_packed_exactly(name):
    """24 tokens are more than the trial sees: only the configuration can tell."""
    config, more, field = WINDOWED[name]
    for window in (8, 24, LONGEST - 1):
        with pytest.raises(ModelError, match=rf"sees {window} tokens back \(sliding_window\), sides have up to 48"):
            find(build(config(**SHAPE | more | {field: window})))
    model = build(config(**SHAPE | more | {field: LONGEST, "initializer_range": 0.2}))
    row = pack_sides(sides(), [[0, 1], [2, 3], [4]], find(model))
    with torch.no_grad():
        torch.testing.assert_close(packed_outputs(model, row)[:, 0], alone(model), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("original", "fits"), [(LONGEST - 1, False), (LONGEST, True)])
def test_positions_that_stretch_with_the_longest_side_are_refused_where_they_would(original, fits):
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": original}
    model = build(hf.LlamaConfig(**SHAPE, rope_parameters=rope))
    if fits:
        assert find(model).causal
    else:
        with pytest.raises(ModelError, match=rf"dynamic positions change beyond {original} tokens"):
            find(model)


def test_a_layer_that_does_not_pass_the_plan_on_cannot_go_unnoticed():
    """Later too: code that only training runs may lose it, and every token would see the whole row."""
    model = build(hf.LlamaConfig(**SHAPE))
    packing = find(model)
    attention = model.model.layers[0].self_attn
    forward = attention.forward

    def losing(*args, packing=None, **rest):
        return forward(*args, **rest)

    attention.forward = losing
    with torch.no_grad():
        assert packed_outputs(model, pack_sides(sides(), [[0, 1], [2, 3], [4]], packing))[:, 0].isnan().all()
    with pytest.raises(ModelError, match="differ by nan"):
        find(model)


# Found by building every sequence-classification class small; these carry positions in unlike ways.
ACCEPTED: dict[str, Callable[[], hf.PretrainedConfig]] = {
    "opt": partial(hf.OPTConfig, **WIDTH, **COMMON, ffn_dim=48, max_position_embeddings=64, word_embed_proj_dim=32),
    "phi": partial(hf.PhiConfig, **SHAPE),
    "gpt_bigcode": partial(hf.GPTBigCodeConfig, **NARROW, n_positions=64),
    "biogpt": partial(hf.BioGptConfig, **SHAPE),
    "qwen3_moe": partial(
        hf.Qwen3MoeConfig, **SHAPE, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2
    ),
    "deepseek_v3": partial(
        hf.DeepseekV3Config, **SHAPE, num_key_value_heads=4, kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=12, first_k_dense_replace=2,
    ),  # keys and values of unlike width
    "smollm3": partial(hf.SmolLM3Config, **SHAPE, num_key_value_heads=2),  # some layers without positions
    "xlm_roberta": partial(hf.XLMRobertaConfig, **SHAPE),
    "electra": partial(hf.ElectraConfig, **SHAPE, embedding_size=16),
    "nomic_bert": partial(hf.NomicBertConfig, **SHAPE, head_dim=8),  # an encoder with rotary positions
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ACCEPTED)
def test_what_the_trial_accepts_is_exact_with_weights_grown_tenfold(name):
    """The trial ran on small weights, where a mistake shows least; training may make them large."""
    model = build(ACCEPTED[name]())
    packing = find(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10) if parameter.ndim > 1 else parameter.add_(0.1 * torch.randn_like(parameter))
        packed = packed_outputs(model, pack_sides(sides(), [[0, 1], [2, 3], [4]], packing))[:, 0]
    truth = alone(model)
    assert truth.std() > 1e-2
    torch.testing.assert_close(packed, truth, rtol=1e-4, atol=1e-4 * float(truth.abs().max()))
