"""Where a chat model's tokenizer pads with EOS, or with nothing, every reader reads its reward at the last token."""

import numpy as np
import pytest
import torch
import transformers as hf

from rmcore.config.model import LoraSettings, ModelConfig
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.models.seal import write_seal
from rmcore.models.trained import load_renderer
from tests.support.random_models import hugging_face_rewards

CPU = torch.device("cpu")
PROMPTS, RESPONSES = ["Name a fruit", "Sort: pear, fig"], ["A pear.", "fig, pear. Of course, gladly."]
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}<|im_end|>{% endfor %}"


@pytest.fixture
def chat_base(tiny_folder, tmp_path):
    """A chat model in the form of Llama-3-Instruct, whose tokenizer names no pad token, or EOS."""

    def build(kind=hf.LlamaForCausalLM, pad=None, **settings):
        source = hf.AutoTokenizer.from_pretrained(tiny_folder)
        tokenizer = hf.PreTrainedTokenizerFast(
            tokenizer_object=source.backend_tokenizer, eos_token="<|im_end|>", pad_token=pad, chat_template=TEMPLATE
        )
        config = hf.LlamaConfig(**SMALL, vocab_size=len(tokenizer), bos_token_id=None, **settings)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            kind(config).save_pretrained(tmp_path / "base")
        tokenizer.save_pretrained(tmp_path / "base")
        return tmp_path / "base"

    return build


def sides_of(rm):
    return rm.renderer.tokenize_sides(list(zip(PROMPTS, RESPONSES, strict=True)))


def read_at(folder, sides, place):
    """Rewards by the plain model's head at a place of each side, counted from its end: how vLLM does it, at -1."""
    model = hf.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.inference_mode():
        states = [model.model(input_ids=torch.tensor([side.ids])).last_hidden_state[0, place] for side in sides]
        return model.score(torch.stack(states))[:, 0].numpy()


@pytest.mark.parametrize("pad", [None, "<|im_end|>"])
def test_a_new_reward_model_reads_the_last_token_whoever_reads_it(chat_base, tmp_path, pad):
    base = chat_base(pad=pad)
    num_tokens = len(hf.AutoTokenizer.from_pretrained(base))
    rm = BradleyTerryRM.new(ModelConfig(name=str(base), max_seq_len=96), seed=0, device=CPU)
    rm.save(tmp_path / "trained")
    sides = sides_of(rm)
    assert {side.ids[-1] for side in sides} == {rm.tokenizer.eos_token_id}
    assert rm.pad_id != rm.tokenizer.eos_token_id
    assert len(rm.tokenizer) == rm.model.get_input_embeddings().num_embeddings == num_tokens
    rewards = rm.score(PROMPTS, RESPONSES)
    for other in (
        BradleyTerryRM.from_pretrained(tmp_path / "trained", device="cpu").score(PROMPTS, RESPONSES),
        hugging_face_rewards(tmp_path / "trained", sides),
        read_at(tmp_path / "trained", sides, -1),
    ):
        np.testing.assert_allclose(rewards, other, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["tokenizer", "config", "adapter"])
def test_a_model_that_was_trained_with_eos_as_the_pad_is_read_as_it_was(chat_base, tmp_path, where):
    """Its tokenizer says so, or, of others, its config."""
    if where == "adapter":
        base, place = chat_base(), tmp_path / "trained" / "adapter"
        lora = LoraSettings()
        rm = BradleyTerryRM.new(ModelConfig(name=str(base), max_seq_len=96, lora=lora), seed=0, device=CPU)
        rm.save(tmp_path / "trained")
        tokenizer = hf.AutoTokenizer.from_pretrained(place)
        tokenizer.pad_token = "<|im_end|>"
        tokenizer.save_pretrained(place)
        write_seal(place)
        weights = tmp_path / "trained"
    else:
        eos = chat_tokenizer_eos(chat_base)
        pads = {"pad": "<|im_end|>"} if where == "tokenizer" else {"pad_token_id": eos}
        place = weights = chat_base(hf.LlamaForSequenceClassification, num_labels=1, **pads)
    rm = BradleyTerryRM.from_pretrained(place, device="cpu")
    sides = sides_of(rm)
    np.testing.assert_allclose(rm.score(PROMPTS, RESPONSES), read_at(weights, sides, -2), atol=2e-6)
    assert load_renderer(str(place), max_seq_len=None, render_fn=None).tokenizer.pad_token == "<|im_end|>"


def chat_tokenizer_eos(chat_base):
    return hf.AutoTokenizer.from_pretrained(chat_base()).eos_token_id
