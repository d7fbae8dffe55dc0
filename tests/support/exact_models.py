"""Tiny Qwen2, Llama and BERT reward models that compute in float64 throughout, and their curvature by torch.func.

Hugging Face casts to float32 inside RMSNorm, softmax and rotary embeddings whatever the weights are. `NoFloat32` lifts
that for everything run inside it, so that truth and tested code agree to float64 rounding instead of about 1e-6.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.overrides import TorchFunctionMode
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    RobertaConfig,
)

VOCABULARY = 8
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
    "num_labels": 1,
    "pad_token_id": 0,
    "initializer_range": 0.4,
}
NUM_LAYERS = {"qwen2": 2, "llama": 1, "bert": 1}
ARCHITECTURES = tuple(NUM_LAYERS)
ROUNDING = 1e-12
"""Relative error that float64 products may have; about 1e-15 was seen."""


class NoFloat32(TorchFunctionMode):
    """Every request for float32 becomes one for float64."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(_wide, args), **{name: _wide(value) for name, value in (kwargs or {}).items()})


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def config_of(architecture: str, num_layers: int | None = None) -> PreTrainedConfig:
    shape = SHAPE | {"num_hidden_layers": num_layers or NUM_LAYERS[architecture]}
    if architecture == "bert":
        return BertConfig(**shape)
    return {"qwen2": Qwen2Config, "llama": LlamaConfig}[architecture](num_key_value_heads=1, **shape)


def make_model(
    architecture: str, *, attention: str = "eager", num_layers: int | None = None, seed: int = 0
) -> nn.Module:
    """A float32 model with dropout where the class has it; no weight is at a special value such as 0 or 1."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_config(
            config_of(architecture, num_layers), attn_implementation=attention
        )
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def exact(model: nn.Module) -> nn.Module:
    """The same model in float64, in place, without a cast to float32 anywhere in its forward."""
    forward = model.double().forward

    def wide(*args: Any, **kwargs: Any) -> Any:
        with NoFloat32():
            return forward(*args, **kwargs)

    model.forward = wide
    return model


def draw_rows(num_pairs: int, num_tokens: int = 6, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, (2 * num_pairs, num_tokens), generator=generator)
    lengths = torch.randint(2, num_tokens + 1, (2 * num_pairs, 1), generator=generator)
    mask = (torch.arange(num_tokens) < lengths).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def random_vectors(count: int, size: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed), dtype=dtype)


class Functional(NamedTuple):
    """A model as a function of its flat parameters.

    flat: (N,) where it stands. margins: (N,) -> (n,).
    """

    flat: Tensor
    margins: Callable[[Tensor], Tensor]

    def hessian(self, temperature: float = 1.0) -> Tensor:
        """(N, N), of the mean of softplus(-m / T)."""

        def loss(flat: Tensor) -> Tensor:
            return softplus(-self.margins(flat) / temperature).mean()

        return torch.func.jacrev(torch.func.grad(loss), chunk_size=256)(self.flat).detach()


def functional(model: nn.Module, rows: dict[str, Tensor], names: tuple[str, ...] | None = None) -> Functional:
    """`model` in the parameters `names`, all by default; the others stay as they are."""
    chosen = {name: p.detach() for name, p in model.named_parameters() if names is None or name in names}
    sizes = [p.numel() for p in chosen.values()]

    def margins(flat: Tensor) -> Tensor:
        pieces = zip(chosen.items(), flat.split(sizes), strict=True)
        values = {name: piece.view_as(p) for (name, p), piece in pieces}
        accepted, rejected = torch.func.functional_call(model, values, kwargs=rows).logits[:, 0].chunk(2)
        return accepted - rejected

    return Functional(torch.cat([p.reshape(-1) for p in chosen.values()]), margins)


def relative_error(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth).norm() / truth.norm())


# Deep models of two-digit layers, for names.

DEEP = 12  # layers, so that `layers.1` is a prefix of `layers.10`


def make_lora(num_layers=2):
    base = make_model("qwen2", num_layers=num_layers)
    config = LoraConfig(
        task_type="SEQ_CLS", r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.3, modules_to_save=["score"]
    )
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = get_peft_model(base, config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".lora_B." in name:  # zero at first, where the curvature in lora_A would be zero too
                    parameter.normal_(std=0.3)
    return model


def make_roberta():
    config = RobertaConfig(**SHAPE | {"num_hidden_layers": DEEP, "max_position_embeddings": 20})
    return AutoModelForSequenceClassification.from_config(config)


MAKERS = {
    "qwen2": lambda: make_model("qwen2", num_layers=DEEP),
    "llama": lambda: make_model("llama", num_layers=DEEP),
    "bert": lambda: make_model("bert", num_layers=DEEP),
    "roberta": make_roberta,
    "lora": lambda: make_lora(DEEP),
}
LAYERS = {
    "qwen2": "model.layers",
    "llama": "model.layers",
    "bert": "bert.encoder.layer",
    "roberta": "roberta.encoder.layer",
    "lora": "base_model.model.model.layers",
}


@cache
def deep(kind):
    return MAKERS[kind]()


def trained_names(model):
    return tuple(name for name, p in model.named_parameters() if p.requires_grad)
