"""A model that is `tiny` in everything but its size: the same tokenizer and architecture, a tenth of the arithmetic."""

from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification

from rmcore.saving import save_pretrained
from rmcore.tiny import tiny_config, tiny_tokenizer


def build_nano(folder: Path, *, seed: int = 0) -> Path:
    """Write an untrained reward model of 2 layers of width 64 with its tokenizer; gives the folder."""
    tokenizer = tiny_tokenizer()
    config = tiny_config(tokenizer)
    config.update(
        {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
        | {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
    )
    folder.mkdir(parents=True, exist_ok=True)
    save_pretrained(tokenizer, folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        save_pretrained(AutoModelForSequenceClassification.from_config(config, dtype=torch.float32), folder)
    return folder
