"""What `--model tiny` is in the process of the tests: everything but its size, a tenth of the arithmetic.

Programs that tests start build the real one.
"""

from transformers import Qwen2Config, Qwen2Tokenizer

from rmcore.models import tiny

true_config = tiny.tiny_config


def nano_config(tokenizer: Qwen2Tokenizer) -> Qwen2Config:
    """`tiny` with 2 layers of width 64 in place of 4 of width 160."""
    config = true_config(tokenizer)
    config.update(
        {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
        | {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
    )
    return config
