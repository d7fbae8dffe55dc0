"""A reward model small enough for its dense Hessian in float64, and the truth computed another way."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from exact_models import VOCABULARY, draw_rows, functional


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


def cut_rows(rows: dict[str, Tensor], sizes: list[int]) -> list[dict[str, Tensor]]:
    """The same pairs in micro-batches of the given numbers of pairs."""
    halves = {name: tensor.chunk(2) for name, tensor in rows.items()}
    pieces = {name: [half.split(sizes) for half in both] for name, both in halves.items()}
    return [{name: torch.cat([c[k], r[k]]) for name, (c, r) in pieces.items()} for k in range(len(sizes))]


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
    """(63, 63); the model is in training mode again."""
    hessian = functional(tiny.eval(), rows).hessian()
    tiny.train()
    return hessian


@pytest.fixture
def world() -> SimpleNamespace:
    """The functions above, for test files, which cannot import from here."""
    return SimpleNamespace(TinyReward=TinyReward, cut_rows=cut_rows)
