"""Reward models of other shapes than `tiny`, with random weights and the tokenizer of `tiny`."""

import torch
from transformers import AutoModelForSequenceClassification as Classifier
from transformers import BertConfig, GPT2Config, RobertaConfig

from rmcore.data.rendering import Rendering
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.models.tiny import tiny_tokenizer


def model_of(kind: str) -> BradleyTerryRM:
    """Weights that are large enough for rewards that bend; sides of at most 100 tokens."""
    tokenizer = tiny_tokenizer()
    shape = {"vocab_size": len(tokenizer), "num_labels": 1, "pad_token_id": tokenizer.pad_token_id}
    wide = shape | {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = {
        "gpt2": lambda: GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=128, **shape),
        "bert": lambda: BertConfig(max_position_embeddings=128, initializer_range=0.2, **wide),
        "roberta": lambda: RobertaConfig(max_position_embeddings=140, initializer_range=0.2, **wide),
    }[kind]()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Classifier.from_config(config)
    return BradleyTerryRM.of(model, tokenizer, Rendering("plain", 100))
