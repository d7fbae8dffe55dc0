"""Rewards and gradients packed, padded and alone, against float64 of each side alone on the CPU.

The error is ||found - truth|| / ||truth||, over all rewards and over the gradient of the summed Bradley-Terry loss of
all parameters. Weights are drawn large, so that attention is sharp and positions matter. What cannot be packed is
padded by the library with the reason, which then stands in the place of the error.

bf16 copies of the weights in place of autocast keep the stream between the layers in bf16, too: said, not judged.

A shape passes where packed is no further from the truth than 1.5 times padded, and float32 is within 1e-3.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any

import torch
import transformers as hf
from gpu_plan import Work
from gpu_training import device
from torch import Tensor
from torch.nn.functional import softplus
from train_throughput import HH_PREFIX, HH_TAIL

from rmcore.core.errors import ModelError
from rmcore.data.rendering import TokenizedPair, TokenizedSide
from rmcore.models.batching import collate
from rmcore.models.packing.forward import find_packing, rewards_of
from rmcore.models.packing.layout import Packing, pad_rows
from rmcore.models.precision import Precision, float32_head, precision_context
from rmcore.training.train_mode import HalfWeights

PAD = 1
VOCABULARY = 512
CLOSE_IN_FLOAT32 = 1e-3
CLOSE_TO_PADDED = 1.5
Outcome = tuple[Tensor, Tensor]
"""Rewards (2P,) and the whole gradient, float64 on the CPU."""


def config_of(name: str, *, smoke: bool) -> hf.PretrainedConfig:
    """One of SHAPES: four layers of width 512, or two of 32."""
    width, layers, head = (32, 2, 16) if smoke else (512, 4, 64)
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers,
        "num_attention_heads": width // head, "max_position_embeddings": 1024, "pad_token_id": PAD, "num_labels": 1,
    }  # fmt: skip
    grouped = {"num_key_value_heads": 2 if not smoke else 1}
    ends = {"bos_token_id": None, "eos_token_id": 2}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    configs: dict[str, Callable[[], hf.PretrainedConfig]] = {
        "qwen2": partial(hf.Qwen2Config, **shape, **grouped, **ends),
        "llama": partial(hf.LlamaConfig, **shape, **grouped, **ends),
        # Every other layer sees a window; it is wider than the sides, as in the published models.
        "gemma3": partial(
            hf.Gemma3TextConfig, **shape, **grouped, **ends, head_dim=head, query_pre_attn_scalar=head,
            sliding_window=1024, layer_types=["sliding_attention", "full_attention"] * (layers // 2),
        ),
        "bert": partial(hf.BertConfig, **shape, **no_dropout),
        "modernbert": partial(hf.ModernBertConfig, **shape, cls_token_id=3, sep_token_id=4, local_attention=128),
    }  # fmt: skip
    return configs[name]()


SHAPES = ("qwen2", "llama", "gemma3", "modernbert", "bert")


def exactness(work: Work) -> None:
    """One measurement a shape."""
    pairs = draw_pairs(4 if work.smoke else 24, divide=16 if work.smoke else 1)
    for name in SHAPES:
        work.measure(name, partial(compare, name, pairs, device(), work.smoke))


def draw_pairs(count: int, *, divide: int) -> list[TokenizedPair]:
    """Pairs with lengths like those of HH, divided."""
    generator = torch.Generator().manual_seed(0)

    def ids(length: int) -> list[int]:
        return torch.randint(8, VOCABULARY, (max(1, length // divide),), generator=generator).tolist()

    pairs = []
    for number in range(count):
        prompt = ids(HH_PREFIX[1 + number * 7 % 19])
        sides = [TokenizedSide(prompt + ids(HH_TAIL[1 + (number * step) % 19]), 0) for step in (3, 5)]
        pairs.append(TokenizedPair(str(number), *sides))
    return pairs


def compare(name: str, pairs: Sequence[TokenizedPair], device: torch.device, smoke: bool) -> dict[str, Any]:
    """Errors of every form in both precisions; fails where the shape does not pass."""
    truth = alone(build(name, smoke, torch.device("cpu"), torch.float64), pairs, "fp32")
    found: dict[str, Any] = {}
    precisions: tuple[Precision, ...] = ("fp32", "bf16")
    for precision in precisions:
        errors: dict[str, tuple[float, float] | str] = {}
        model = build(name, smoke, device, torch.float32)
        with float32_head(model):
            errors["alone"] = error(alone(model, pairs, precision), truth)
            errors["padded"] = error(together(model, pairs, precision, None), truth)
            try:
                longest = max(pair.num_tokens for pair in pairs)
                packing = find_packing(model, longest_side=longest, precision=precision, pad_id=PAD)
                errors["packed"] = error(together(model, pairs, precision, packing), truth)
                if precision == "bf16":
                    copies = HalfWeights(model).active()
                    errors["packed, bf16 copies"] = error(together(model, pairs, "fp32", packing, copies), truth)
            except ModelError as refusal:
                errors["packed"] = f"padded: {refusal}"
        for form, seen in errors.items():
            shown = seen if isinstance(seen, str) else f"{seen[0]:.1e}, {seen[1]:.1e}"
            found[f"{form} {precision}: rewards, gradient"] = shown
        check(name, precision, errors)
    return found


def check(name: str, precision: str, errors: dict[str, tuple[float, float] | str]) -> None:
    """Refuse errors that rounding does not explain."""
    padded, packed = errors["padded"], errors["packed"]
    assert not isinstance(padded, str)
    if precision == "fp32" and not max(padded) <= CLOSE_IN_FLOAT32:
        raise AssertionError(f"{name} padded in float32 is {max(padded):.1e} from float64")
    if isinstance(packed, str):
        return
    for what, ours, theirs in zip(("rewards", "gradient"), packed, padded, strict=True):
        if not ours <= CLOSE_TO_PADDED * theirs + 1e-5:
            raise AssertionError(f"{name} packed in {precision}: {what} {ours:.1e} from float64, padded {theirs:.1e}")


@cache
def _weights(name: str, smoke: bool) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = hf.AutoModelForSequenceClassification.from_config(config_of(name, smoke=smoke), dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    for key, parameter in model.named_parameters():
        if parameter.ndim > 1:
            spread = 0.5 if "score" in key or "classifier" in key else 2.0 / parameter.shape[1] ** 0.5
            parameter.data = spread * torch.randn(parameter.shape, generator=generator)
        else:
            parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    return dict(model.state_dict())


def build(name: str, smoke: bool, device: torch.device, dtype: torch.dtype) -> Any:
    """The model of a shape: the same weights on every device and in every precision."""
    model: Any = hf.AutoModelForSequenceClassification.from_config(config_of(name, smoke=smoke), dtype=torch.float32)
    model.load_state_dict(_weights(name, smoke))
    return model.to(device, dtype).eval()


def alone(model: Any, pairs: Sequence[TokenizedPair], precision: Precision) -> Outcome:
    """Each side in a row of its own."""
    rows = [pad_rows([side.ids], pad_id=PAD).to(model.device) for side in sides_of(pairs)]
    return outcome(model, precision, lambda: torch.cat([rewards_of(model, row) for row in rows]))


def together(
    model: Any,
    pairs: Sequence[TokenizedPair],
    precision: Precision,
    packing: Packing | None,
    weights: AbstractContextManager[None] | None = None,
) -> Outcome:
    """All pairs in one micro-batch, with other weights in place where they are given."""
    batch = collate(pairs, range(len(pairs)), pad_id=PAD, packing=packing).to(model.device)
    return outcome(model, precision, lambda: rewards_of(model, batch.rows), weights or nullcontext())


def sides_of(pairs: Sequence[TokenizedPair]) -> list[TokenizedSide]:
    """The chosen sides, then the rejected ones."""
    return [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs]


def outcome(
    model: Any,
    precision: Precision,
    rewards: Callable[[], Tensor],
    weights: AbstractContextManager[None] = nullcontext(),  # noqa: B008 - does nothing, as often as it is entered
) -> Outcome:
    """Rewards, and the gradient of the summed loss."""
    model.zero_grad()
    with weights:
        with precision_context(precision, model.device):
            found = rewards()
        chosen, rejected = found.chunk(2)
        softplus(rejected - chosen).sum().backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return found.detach().double().cpu(), gradient.double().cpu()


def error(found: Outcome, truth: Outcome) -> tuple[float, float]:
    """Relative errors of rewards and gradient; what is not finite is infinitely wrong."""
    rewards, gradient = (float((a - b).norm() / b.norm()) for a, b in zip(found, truth, strict=True))
    return (math.inf if math.isnan(rewards) else rewards), (math.inf if math.isnan(gradient) else gradient)
