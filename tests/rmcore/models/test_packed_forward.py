"""Packed rows give the rewards, the loss and the gradients of each side alone, on the classes that can be packed.

Weights are drawn far larger than any initialisation, so that attention and positions matter.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import transformers as hf
from peft import LoraConfig, TaskType, get_peft_model
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from rmcore.data.rendering import TokenizedPair, TokenizedSide
from rmcore.models.batching import collate
from rmcore.models.packing.forward import find_packing, packed_outputs, rewards_of
from rmcore.models.packing.layout import pack_sides, pad_rows
from rmcore.models.precision import precision_context
from tests.support.exact_models import NoFloat32

PAD, VOCABULARY, LONGEST = 1, 50, 32
WIDTH = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
COMMON = {"vocab_size": VOCABULARY, "num_labels": 1, "pad_token_id": PAD, "max_position_embeddings": LONGEST + 2}
SHAPE = WIDTH | COMMON | {"bos_token_id": None, "eos_token_id": 2}
GROUPED = {"num_key_value_heads": 2}
UNDROPPED = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": LONGEST, "vocab_size": VOCABULARY, "num_labels": 1}
GPT2 |= {"pad_token_id": PAD, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

CONFIGS: dict[str, Callable[[], hf.PretrainedConfig]] = {
    "qwen2": partial(hf.Qwen2Config, **SHAPE, **GROUPED),
    "llama": partial(hf.LlamaConfig, **SHAPE, **GROUPED),
    "gpt_neox": partial(hf.GPTNeoXConfig, **SHAPE),  # a quarter of each head rotates; attention and MLP in parallel
    "gemma": partial(hf.GemmaConfig, **SHAPE, num_key_value_heads=1, head_dim=8),  # heads wider than the model
    "gpt2": partial(hf.GPT2Config, **GPT2),  # learned positions
    "bert": partial(hf.BertConfig, **SHAPE, **UNDROPPED),
    "roberta": partial(hf.RobertaConfig, **SHAPE, **UNDROPPED),  # positions begin behind the pad token's id
}


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(3, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def pair(name: str, chosen: list[int], rejected: list[int]) -> TokenizedPair:
    return TokenizedPair(name, TokenizedSide(chosen, 0), TokenizedSide(rejected, 0))


PROMPT = tokens(9, 0)
PAIRS = [
    pair("usual", PROMPT + tokens(4, 1), PROMPT + tokens(11, 2)),
    pair("nothing in common", [3, *tokens(6, 3)], [4, *tokens(3, 4)]),
    pair("all but one token", [*tokens(20, 5), 7], [*tokens(20, 5), 8]),
    pair("one a prefix of the other", PROMPT, PROMPT + tokens(6, 6)),
    pair("one token", [5], [5, *tokens(7, 7)]),
    pair("equal", PROMPT, PROMPT),
    pair("longest", tokens(LONGEST, 8), tokens(LONGEST - 1, 8)),
]


def set_weights(model: nn.Module) -> None:
    """Queries and keys that make attention sharp, a head that leaves margins of about one."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        head = name.split(".")[-2] in ("score", "out_proj", "classifier")
        if parameter.ndim > 1:
            spread = 0.1 if head else 0.4
            parameter.data = spread * torch.randn(parameter.shape, generator=generator).to(parameter)
        else:
            parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator).to(parameter)


def build(name: str, *, lora: bool = False, checkpointing: bool = False, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    model: Any = hf.AutoModelForSequenceClassification.from_config(CONFIGS[name]())
    if lora:
        config = LoraConfig(task_type=TaskType.SEQ_CLS, r=2, target_modules="all-linear")
        model = get_peft_model(model, config)
    set_weights(model)
    model = model.to(dtype).train()
    if checkpointing:
        plain = model.get_base_model() if lora else model
        if hasattr(plain, "activation_checkpointing_enable"):
            plain.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
        else:  # transformers before 5.23
            plain.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def find(model: Any) -> Any:
    return find_packing(model, longest_side=LONGEST, precision="fp32", pad_id=PAD)


def outcome(model: Any, rewards: Callable[[], tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Rewards (2P,), the loss, and the gradient of every parameter that has one."""
    model.zero_grad()
    chosen, rejected = rewards()
    loss = -logsigmoid(chosen - rejected).sum()
    loss.backward()
    found = {name: p.grad.detach().double() for name, p in model.named_parameters() if p.grad is not None}
    return found | {"rewards": torch.cat([chosen, rejected]).detach().double(), "loss": loss.detach().double()}


def packed(model: Any, packing: Any, precision: str = "fp32") -> dict[str, Tensor]:
    def rewards() -> tuple[Tensor, Tensor]:
        batch = collate(PAIRS, range(len(PAIRS)), pad_id=PAD, packing=packing)
        with precision_context(precision, torch.device("cpu")):
            values = rewards_of(model, batch.rows).float() if precision == "bf16" else rewards_of(model, batch.rows)
        return values[: len(PAIRS)], values[len(PAIRS) :]

    return outcome(model, rewards)


def alone(model: Any, precision: str = "fp32") -> dict[str, Tensor]:
    """Each side in a row of its own, through the model's own forward."""

    def rewards() -> tuple[Tensor, Tensor]:
        with precision_context(precision, torch.device("cpu")):
            values = [
                torch.cat([rewards_of(model, pad_rows([getattr(pair, side).ids], pad_id=PAD)) for pair in PAIRS])
                for side in ("chosen", "rejected")
            ]
        return (values[0].float(), values[1].float()) if precision == "bf16" else (values[0], values[1])

    return outcome(model, rewards)


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Within `tolerance` of each tensor's largest value; what is zero but for rounding, of the largest gradient."""
    assert found.keys() == expected.keys()
    floor = 1e-3 * max(float(value.abs().max()) for name, value in expected.items() if name != "rewards")
    for name, value in expected.items():
        scale = max(float(value.abs().max()), floor)
        assert float((found[name] - value).abs().max()) <= tolerance * scale, name


@pytest.mark.slow
@pytest.mark.parametrize("adapted", [False, True], ids=["plain", "lora+checkpointing"])
@pytest.mark.parametrize("name", CONFIGS)
def test_rewards_loss_and_gradients_are_those_of_each_side_alone(name, adapted):
    """Whether the last layer is computed where rewards are read, or for all tokens."""
    model = build(name, lora=adapted, checkpointing=adapted, dtype=torch.float64)
    with nullcontext() if adapted else NoFloat32():  # what is recomputed does not see the mode
        expected, packing = alone(model), find(model)
        assert all(n in expected for n, parameter in model.named_parameters() if parameter.requires_grad)
        assert expected["rewards"].std() > 0.05
        assert packing.reads_last == (name != "gpt2")
        for one in (packing, replace(packing, reads_last=False)):
            assert_equal(packed(model, one), expected, 1e-6 if adapted else 1e-11)
        assert_equal(alone(model), expected, 0)  # the padded path is as it was before


def test_a_model_that_wants_all_tokens_of_its_last_layer_gets_them_and_that_is_said(capsys):
    model = build("gpt2", dtype=torch.float64)
    expected, packing = alone(model), find(model)
    assert not packing.reads_last
    assert capsys.readouterr().err.count("note: the last layer is computed for all tokens") == 1
    assert_equal(packed(model, packing), expected, 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_bfloat16_is_as_near_to_the_truth_packed_as_padded(name):
    model = build(name)
    truth = alone(model)
    padded = alone(model, "bf16")
    found = packed(model, find(model), "bf16")

    def error(result: dict[str, Tensor], names: list[str]) -> float:
        return float(torch.cat([(result[n] - truth[n]).flatten() for n in names]).norm())

    gradients = [n for n in truth if n not in ("rewards", "loss")]
    for names in (["rewards"], gradients):
        assert 0 < error(found, names) < 1.5 * error(padded, names)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_the_pad_token_in_a_text_means_what_it_means_to_the_model(name):
    """Causal classes read the last token that is not the pad token, RoBERTa does not count it as a position.

    Texts do hold it: a chat template closes every answer with EOS, and many tokenizers pad with EOS.
    """
    model = build(name, dtype=torch.float64).eval()
    packing = find(model)
    sides = [[*PROMPT, 5, 6, PAD], [*PROMPT, 7, PAD, PAD], [*PROMPT, PAD], [8, PAD, 9, 10], [*PROMPT, PAD, 9]]
    with torch.no_grad():
        expected = torch.cat([rewards_of(model, pad_rows([side], pad_id=PAD)) for side in sides])
        found = packed_outputs(model, pack_sides(sides, [[0, 1, 2, 4], [3]], packing))[:, 0]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
