"""A reward model small enough for its dense Hessian in float64, and the truth computed another way."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from transformers import AutoModelForSequenceClassification, Qwen2Config

VOCABULARY = 8


class TinyReward(nn.Module):
    """Embedding, masked mean, one tanh layer with dropout, reward head: 63 parameters."""

    def __init__(self, num_labels: int = 1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 4)
        self.hidden = nn.Linear(4, 5)
        self.dropout = nn.Dropout(0.5)
        self.score = nn.Linear(5, num_labels)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> SimpleNamespace:
        mask = attention_mask.unsqueeze(-1).to(self.score.weight.dtype)
        mean = (self.embedding(input_ids) * mask).sum(1) / mask.sum(1)
        return SimpleNamespace(logits=self.score(self.dropout(torch.tanh(self.hidden(mean)))))


def draw_rows(num_pairs: int, num_tokens: int = 6, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, (2 * num_pairs, num_tokens), generator=generator)
    lengths = torch.randint(2, num_tokens + 1, (2 * num_pairs, 1), generator=generator)
    mask = (torch.arange(num_tokens) < lengths).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def cut_rows(rows: dict[str, Tensor], sizes: list[int]) -> list[dict[str, Tensor]]:
    """The same pairs in micro-batches of the given numbers of pairs."""
    halves = {name: tensor.chunk(2) for name, tensor in rows.items()}
    pieces = {name: [half.split(sizes) for half in both] for name, both in halves.items()}
    return [{name: torch.cat([c[k], r[k]]) for name, (c, r) in pieces.items()} for k in range(len(sizes))]


def true_hessian(model: nn.Module, rows: dict[str, Tensor]) -> Tensor:
    """(N, N) of the mean loss over flat parameters, by torch.func."""
    names = [name for name, _ in model.named_parameters()]
    shapes = [p.shape for p in model.parameters()]
    model.eval()

    def mean_loss(flat: Tensor) -> Tensor:
        parts = flat.split([shape.numel() for shape in shapes])
        values = {name: part.view(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}
        chosen, rejected = torch.func.functional_call(model, values, kwargs=rows).logits[:, 0].chunk(2)
        return softplus(rejected - chosen).mean()

    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    hessian: Tensor = torch.func.hessian(mean_loss)(flat)
    return hessian


@pytest.fixture
def tiny() -> TinyReward:
    """Weights larger than at initialisation, so that some eigenvalues stand out at both ends."""
    torch.manual_seed(1)
    model = TinyReward().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.5)
    return model


@pytest.fixture
def rows() -> dict[str, Tensor]:
    return draw_rows(9)


@pytest.fixture
def truth(tiny: TinyReward, rows: dict[str, Tensor]) -> Tensor:
    return true_hessian(tiny, rows)


@pytest.fixture
def make_qwen() -> Callable[[str], nn.Module]:
    def make(attention: str) -> nn.Module:
        torch.manual_seed(0)
        config = Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=8,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=16,
            num_labels=1,
            pad_token_id=0,
            initializer_range=0.3,
        )
        return AutoModelForSequenceClassification.from_config(config, attn_implementation=attention)

    return make


@pytest.fixture
def world() -> SimpleNamespace:
    """The functions above, for test files, which cannot import from here."""
    return SimpleNamespace(
        TinyReward=TinyReward, draw_rows=draw_rows, cut_rows=cut_rows, true_hessian=true_hessian, vocabulary=VOCABULARY
    )
