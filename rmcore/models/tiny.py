"""`--model tiny`: a byte-level BPE tokenizer and a 1.3 M parameter Qwen2-shaped reward model, built in seconds.

It lets every stage run for real on a laptop without a model hub. The tokenizer is trained on a fixed corpus of the
synthetic benchmark and so is the same for every run; only the random weights depend on the seed. What is written is a
plain Hugging Face folder, which loads as a sequence classifier (reward model) and as a causal language model (policy).
"""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoModelForSequenceClassification, Qwen2Config, Qwen2Tokenizer

from rmcore.config.data import GoldConfig
from rmcore.config.model import TINY_SIZES
from rmcore.core.saving import save_pretrained
from rmcore.data.gold.world import generate_pairs
from rmcore.data.pair import prompt_text

PAD, START, END = "<pad>", "<|im_start|>", "<|im_end|>"
VOCAB_SIZE = 1024
MAX_POSITIONS = 1024
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if not loop.first %}{{ '\\n' }}{% endif -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' -}}"
    "{%- if message['role'] == 'assistant' -%}"
    "{%- generation -%}{{- message['content'] + '<|im_end|>' -}}{%- endgeneration -%}"
    "{%- else -%}{{- message['content'] + '<|im_end|>' -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '\\n<|im_start|>assistant\\n' -}}{%- endif -%}"
)
"""ChatML with the line break before a turn and not after it: a rendered dialogue ends with the end-of-turn token, which
is what a causal reward model reads, and the rendered prompt is a prefix of the rendered dialogue. The `generation`
marks let trainers find the assistant's tokens (`return_assistant_tokens_mask`)."""


def build_tiny(folder: Path, *, seed: int = 0, size: str = "tiny") -> Path:
    """Write the tiny reward model with its tokenizer into a folder and return the folder.

    One regression label, weights in float32 drawn under the seed: the same seed and size give the same bytes. The
    caller's random state is left as it was.

    Raises:
        OSError, StoreError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tiny_tokenizer()
    save_pretrained(tokenizer, folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = resized(tiny_config(tokenizer), *TINY_SIZES[size])
        model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    save_pretrained(model, folder)
    return folder


def tiny_config(tokenizer: Qwen2Tokenizer) -> Qwen2Config:
    """The shape of the tiny model: Qwen2 with 4 layers of width 160.

    Five heads of 32, because vLLM's attention on a CPU knows head sizes of 32, 64, 80, 96 and more, and no 40.
    `initializer_range` is larger than Qwen2's 0.02, which is meant for widths above a thousand: at width 160 it is
    about 0.6 / sqrt(width), and training starts several times faster.
    """
    return Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=160,
        intermediate_size=448,
        num_hidden_layers=4,
        num_attention_heads=5,
        num_key_value_heads=1,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=0.05,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        id2label={0: "reward"},
        label2id={"reward": 0},
        problem_type="regression",
    )


def resized(config: Qwen2Config, width: float, depth: float) -> Qwen2Config:
    """The config at multiples of its width and depth, in place: whole heads of the size that it has, at least one."""
    if (width, depth) == (1.0, 1.0):
        return config
    head = config.hidden_size // config.num_attention_heads
    config.num_attention_heads = max(1, round(width * config.num_attention_heads))
    config.hidden_size = head * config.num_attention_heads
    config.intermediate_size = max(1, round(width * config.intermediate_size))
    config.num_hidden_layers = max(1, round(depth * config.num_hidden_layers))
    if config.layer_types is not None:
        config.layer_types = [config.layer_types[0]] * config.num_hidden_layers
    return config


def tiny_tokenizer() -> Qwen2Tokenizer:
    """The byte-level BPE tokenizer; `<|im_end|>` is EOS, `<pad>` is the padding, there is no BOS.

    Any text decodes back to its NFC form. Normalizer and pre-tokenizer are Qwen2's own, because transformers gives
    every folder with `model_type: qwen2` exactly those on loading, whatever its tokenizer.json says.
    """
    vocab, merges = _trained_bpe()
    merged: Any = list(merges)
    return Qwen2Tokenizer(
        vocab=dict(vocab),
        merges=merged,
        unk_token=PAD,  # bytes leave nothing unknown; left out, a token beyond the vocabulary would be added
        pad_token=PAD,
        eos_token=END,
        extra_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_POSITIONS,
        padding_side="right",
        clean_up_tokenization_spaces=False,
    )


@cache
def _trained_bpe() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges; a process that builds several tiny models trains them once."""
    blueprint = Qwen2Tokenizer().backend_tokenizer
    bpe = Tokenizer(models.BPE())
    bpe.normalizer, bpe.pre_tokenizer = blueprint.normalizer, blueprint.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(_corpus(), trainer)
    trained: dict[str, Any] = json.loads(bpe.to_str())["model"]
    return trained["vocab"], [tuple(merge) for merge in trained["merges"]]


def _corpus() -> Iterator[str]:
    """A fixed sample of the synthetic benchmark: both shortcuts, both distributions, whatever a run's settings are."""
    # The role names open every turn: often enough here to become one token each.
    yield from ("system\n", "user\n", "assistant\n") * 1000
    for shortcut in ("length", "flattery"):
        config = GoldConfig(num_prompts=400, pairs_per_prompt=2, temperature=1.0, flip_rate=0.0, shortcut=shortcut)
        world = generate_pairs(config, seed=0)
        for pair in world.pairs + world.ood_pairs:
            yield from (prompt_text(pair.prompt), pair.chosen, pair.rejected)
