"""Reward models with random weights: of other shapes than `tiny`, and as after a training; and rewards by others."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import transformers as hf
from peft import LoraConfig
from transformers import AutoModelForSequenceClassification as Classifier
from transformers import BertConfig, GPT2Config, RobertaConfig

from rmcore.config.model import LoraSettings, ModelConfig
from rmcore.data.rendering import Rendering, TokenizedSide
from rmcore.models.layers import is_reward_head
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


def adapted(
    name: str | Path, lora: LoraConfig | LoraSettings | None = None, *, seed: int = 0, max_seq_len: int = 96
) -> BradleyTerryRM:
    """A model with a head, and adapters where given, that do something: after a training B is not zero."""
    settings = lora if isinstance(lora, LoraSettings) else None
    config = ModelConfig(name=str(name), max_seq_len=max_seq_len, lora=settings)
    rm = BradleyTerryRM.new(config, seed=seed, device=torch.device("cpu"))
    if isinstance(lora, LoraConfig):
        rm.add_lora(lora)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for key, parameter in rm.model.named_parameters():
            is_adapter = lora is not None and "lora_A" not in key
            if parameter.requires_grad and (is_adapter or is_reward_head(key)):
                parameter.data += 0.1 * torch.randn_like(parameter)
    return rm


def hugging_face_rewards(folder: Path, sides: Sequence[TokenizedSide]) -> np.ndarray:
    """Rewards by the classes of transformers alone, in one padded batch; one by one they must be the same."""
    model = hf.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    rows = hf.AutoTokenizer.from_pretrained(folder).pad(
        {"input_ids": [side.ids for side in sides]}, return_tensors="pt"
    )
    with torch.inference_mode():
        together = model(**rows).logits[:, 0].numpy()
        alone = [model(input_ids=torch.tensor([side.ids])).logits.item() for side in sides]
    np.testing.assert_allclose(together, alone, rtol=1e-5, atol=5e-6)
    return together
