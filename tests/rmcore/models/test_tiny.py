"""The tiny model: same bytes for the same seed, a plain Hugging Face folder, a lossless tokenizer."""

import hashlib
import os
import subprocess
import sys
import unicodedata
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from rmcore.models.tiny import build_tiny, tiny_tokenizer

DIALOGUE = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Name 2 fruits."},
    {"role": "assistant", "content": "Apple, pear."},
    {"role": "user", "content": "More?"},
    {"role": "assistant", "content": "Kiwi."},
]


@cache
def built_tokenizer():
    return tiny_tokenizer()


def digests(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


pytestmark = pytest.mark.usefixtures("true_tiny")


@pytest.fixture(scope="module")
def folder(true_tiny, tmp_path_factory):
    return build_tiny(tmp_path_factory.mktemp("tiny") / "model", seed=0)


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bytes_in_another_process(folder, tmp_path):
    script = (
        "import sys, pathlib; from rmcore.models.tiny import build_tiny; build_tiny(pathlib.Path(sys.argv[1]), seed=0)"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "2"}
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], env=environment, capture_output=True, check=True)
    assert digests(tmp_path) == digests(folder)


def test_the_same_folder_loads_as_a_policy_on_the_same_backbone(folder, tokenizer):
    policy = AutoModelForCausalLM.from_pretrained(folder).eval()
    reward_model = AutoModelForSequenceClassification.from_pretrained(folder)
    for name, value in reward_model.model.state_dict().items():
        assert torch.equal(value, policy.model.state_dict()[name])
    prompt = tokenizer("Name 2 fruits.", return_tensors="pt")
    generated = policy.generate(**prompt, max_new_tokens=3, do_sample=False)
    assert generated.shape[1] <= prompt["input_ids"].shape[1] + 3


def test_vocabulary_special_tokens_and_no_bos(tokenizer, folder):
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    assert len(tokenizer) == model.config.vocab_size == 1024
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token) == ("<|im_end|>", "<pad>", None)
    assert model.config.pad_token_id == tokenizer.pad_token_id != tokenizer.eos_token_id == model.config.eos_token_id
    assert tokenizer("hi").input_ids == tokenizer("hi", add_special_tokens=False).input_ids


@pytest.mark.parametrize("prompt_turns", [2, 4])
def test_the_chat_template_renders_turns_that_extend_their_prompt(tokenizer, prompt_turns):
    prompt = tokenizer.apply_chat_template(DIALOGUE[:prompt_turns], tokenize=False, add_generation_prompt=True)
    full = tokenizer.apply_chat_template(DIALOGUE[: prompt_turns + 1], tokenize=False)
    answer = DIALOGUE[prompt_turns]["content"]
    assert full == f"{prompt}{answer}<|im_end|>"
    assert prompt.startswith(
        "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nName 2 fruits.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer(full).input_ids[-1] == tokenizer.eos_token_id
    prompt_ids, full_ids = tokenizer(prompt).input_ids, tokenizer(full).input_ids
    assert full_ids[: len(prompt_ids)] == prompt_ids


@pytest.mark.slow
@given(text=st.text())
def test_any_text_comes_back_in_its_normal_form(text):
    tokenizer = built_tokenizer()  # a fixture would be of narrower scope than the examples
    assert tokenizer.decode(tokenizer(text).input_ids) == unicodedata.normalize("NFC", text)


def test_other_sizes_are_multiples_of_tiny_in_whole_heads(tmp_path):
    from transformers import AutoConfig

    from rmcore.config.model import TINY_SIZES

    for size in TINY_SIZES:
        build_tiny(tmp_path / size, seed=0, size=size)
    shapes = {size: AutoConfig.from_pretrained(tmp_path / size) for size in TINY_SIZES}
    base = shapes["tiny"]
    for size, (width, depth) in TINY_SIZES.items():
        shape = shapes[size]
        assert shape.hidden_size // shape.num_attention_heads == base.hidden_size // base.num_attention_heads
        assert shape.num_attention_heads == max(1, round(width * base.num_attention_heads))
        assert shape.num_hidden_layers == max(1, round(depth * base.num_hidden_layers))
    again = build_tiny(tmp_path / "again", seed=0, size="tiny-small")
    assert digests(again) == digests(tmp_path / "tiny-small")
