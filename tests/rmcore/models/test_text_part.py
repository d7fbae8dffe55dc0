"""Reward models whose files are those of a model that also reads images: the text part is read, and says the same."""

import shutil

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from exact_models import NoFloat32
from rmcore.core.errors import ModelError
from rmcore.models.loading import load_backbone
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.models.tiny import tiny_tokenizer

pytestmark = pytest.mark.slow

SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "max_position_embeddings": 128,
}  # fmt: skip
SEES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "image_size": 28}
QWEN_SEES = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32}
ROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}}
WRAPPERS = {
    "llava": lambda text: hf.LlavaForConditionalGeneration(
        hf.LlavaConfig(text_config=hf.LlamaConfig(**text), vision_config=hf.CLIPVisionConfig(**SEES, patch_size=14))
    ),
    "mistral3": lambda text: hf.Mistral3ForConditionalGeneration(
        hf.Mistral3Config(
            text_config=hf.MistralConfig(**text, head_dim=8, sliding_window=None),
            vision_config=hf.PixtralVisionConfig(**SEES, patch_size=14),
        )
    ),
    "qwen2_vl": lambda text: hf.Qwen2VLForConditionalGeneration(
        hf.Qwen2VLConfig(
            text_config={**text, **ROPE},
            vision_config={"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 1},
        )
    ),
    "qwen2_5_vl": lambda text: hf.Qwen2_5_VLForConditionalGeneration(
        hf.Qwen2_5_VLConfig(text_config={**text, **ROPE}, vision_config={**QWEN_SEES, "fullatt_block_indexes": [0]})
    ),
    "qwen3_vl": lambda text: hf.Qwen3VLForConditionalGeneration(
        hf.Qwen3VLConfig(
            text_config={**text, **ROPE, "head_dim": 8}, vision_config={**QWEN_SEES, "deepstack_visual_indexes": [0]}
        )
    ),
    "gemma3": lambda text: hf.Gemma3ForConditionalGeneration(
        hf.Gemma3Config(
            text_config={**text, "head_dim": 8, "sliding_window": 16},
            vision_config={**SEES, "patch_size": 14},
            mm_tokens_per_image=4,
        )
    ),
}
PROMPTS = [
    "What is 2 + 2?",
    "Name a fruit and say in a few words why it is good",
    "Name a fruit and say in a few words why it is good",
]
RESPONSES = ["4", "A pear, because it is sweet", "No."]


@pytest.fixture(scope="module", params=WRAPPERS)
def wrapped(request, tmp_path_factory):
    """The whole model, every weight of it drawn, and its folder with another trainer's reward head."""
    tokenizer = tiny_tokenizer()
    torch.manual_seed(0)
    model = WRAPPERS[request.param](SIZES | {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id})
    with torch.no_grad():
        for one in model.parameters():
            one.add_(0.1 * torch.randn_like(one))
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    head = torch.randn(1, SIZES["hidden_size"])
    save_file({"v_head.summary.weight": head, "v_head.summary.bias": torch.zeros(1)}, folder / "value_head.safetensors")
    return model.eval().double(), head.double(), folder


def test_rewards_are_those_of_the_whole_model_alone_padded_and_packed(wrapped, capsys):
    model, head, folder = wrapped
    rm = BradleyTerryRM.from_pretrained(folder, device="cpu", max_seq_len=96)
    assert "its text part alone is used" in capsys.readouterr().err
    rm.model.double()
    sides = rm.renderer.tokenize_sides(list(zip(PROMPTS, RESPONSES, strict=True)))
    with NoFloat32(), torch.no_grad():
        truth = [
            float(model.model(input_ids=torch.tensor([list(side.ids)])).last_hidden_state[0, -1] @ head[0])
            for side in sides
        ]
        for packs in (True, False):
            rm.allow_packing = packs
            assert rm.score_sides(sides) == pytest.approx(truth, rel=3e-7, abs=1e-7)  # given in float32
        assert [float(rm.score_sides([side])[0]) for side in sides] == pytest.approx(truth, rel=3e-7, abs=1e-7)


def test_the_names_of_older_files_are_read_as_well(wrapped, tmp_path):
    folder = shutil.copytree(wrapped[2], tmp_path / "older")
    named = {
        name.replace("model.language_model.", "language_model.model.").replace("model.visi", "visi"): one
        for name, one in load_file(folder / "model.safetensors").items()
    }
    save_file(named, folder / "model.safetensors", {"format": "pt"})
    old, new = (BradleyTerryRM.from_pretrained(one, device="cpu", max_seq_len=96) for one in (folder, wrapped[2]))
    assert old.score(PROMPTS, RESPONSES).tolist() == new.score(PROMPTS, RESPONSES).tolist()


def test_what_is_saved_is_a_plain_model_of_text_with_the_same_rewards(wrapped, tmp_path):
    rm = BradleyTerryRM.from_pretrained(wrapped[2], device="cpu", max_seq_len=96)
    assert rm.is_rewritten
    rm.save(tmp_path / "plain")
    again = BradleyTerryRM.from_pretrained(tmp_path / "plain", device="cpu")
    assert again.score(PROMPTS, RESPONSES).tolist() == rm.score(PROMPTS, RESPONSES).tolist()


def test_a_wrapper_without_a_reward_head_is_a_base_to_train(wrapped, tmp_path):
    model, _, folder = wrapped
    kept = load_file(folder / "model.safetensors")
    model.save_pretrained(tmp_path)
    save_file({name: one.float() for name, one in kept.items()}, tmp_path / "model.safetensors", {"format": "pt"})
    tiny_tokenizer().save_pretrained(tmp_path)
    assert load_backbone(str(tmp_path), seed=0).origin.fresh == {"score.weight"}
    with pytest.raises(ModelError, match="no reward head"):
        BradleyTerryRM.from_pretrained(tmp_path, device="cpu")


def test_a_text_part_that_no_class_reads_is_refused_by_name(tmp_path):
    config = hf.Llama4Config(
        text_config={**SIZES, "vocab_size": 64, "head_dim": 8, "num_local_experts": 1, "intermediate_size_mlp": 8},
        vision_config={"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16},
    )
    config.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    save_file({"language_model.model.norm.weight": torch.zeros(32)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"is a llama4 model, .* its text part, llama4_text, is not known"):
        load_backbone(str(tmp_path), seed=0)
