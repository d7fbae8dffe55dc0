"""What `--model tiny` is in the process of the tests: everything but its size, a tenth of the arithmetic.

Programs that tests start build the real one, but those that run a copy of the code (`make_nano`).
"""

import re
from pathlib import Path

from transformers import Qwen2Config, Qwen2Tokenizer

from rmcore.models import tiny

true_config = tiny.tiny_config
SHAPE = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1,
    "num_hidden_layers": 2,
}  # fmt: skip


def nano_config(tokenizer: Qwen2Tokenizer) -> Qwen2Config:
    """`tiny` with 2 layers of width 64 in place of 4 of width 160."""
    config = true_config(tokenizer)
    config.update({**SHAPE, "layer_types": ["full_attention"] * SHAPE["num_hidden_layers"]})
    return config


def make_nano(code: Path) -> None:
    """Have a copy of the packages build it."""
    module = code / "rmcore" / "models" / "tiny.py"
    text = module.read_text()
    for name, value in SHAPE.items():
        text, count = re.subn(rf"\b{name}=\d+", f"{name}={value}", text)
        assert count == 1, name
    module.write_text(text)
