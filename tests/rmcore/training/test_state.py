"""The tensors of a state: every kind of them comes back to the bit, in however many files, or nothing is there."""

import numpy as np
import pytest
import torch
from torch import nn

from rmcore.config.train import TrainConfig
from rmcore.core.errors import StoreError, TrainingError
from rmcore.training.optimizers import make_optimizer
from rmcore.training.ranks import ALONE
from rmcore.training.resume import tensor_digests
from rmcore.training.state import collect_state, load_state, random_state, write_alone, write_together

CPU = torch.device("cpu")


class Tied(nn.Module):
    """A weight in two places, one that is not contiguous, a frozen one and a buffer."""

    def __init__(self, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embed, self.out = nn.Embedding(7, 3), nn.Linear(3, 7, bias=False)
        self.out.weight = self.embed.weight
        self.turned = nn.Parameter(torch.randn(4, 3, generator=generator).t())
        self.frozen = nn.Parameter(torch.randn(2, generator=generator), requires_grad=False)
        self.register_buffer("seen", torch.tensor(seed))
        nn.init.normal_(self.embed.weight, generator=generator)

    def forward(self):
        return (self.out(self.embed.weight) ** 2).sum() + (self.turned**2).sum()


def trained(seed):
    model = Tied(seed)
    optimizer = make_optimizer(model, TrainConfig(lr=0.1))
    model().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("file_bytes", [1, 2**27])
def test_all_comes_back_to_the_bit_and_the_frozen_is_not_touched(tmp_path, monkeypatch, file_bytes):
    monkeypatch.setattr("rmcore.training.state.FILE_BYTES", file_bytes)
    model, optimizer = trained(0)
    rewards = np.arange(6, dtype=np.float32).reshape(3, 2)
    randoms = [random_state(CPU), {"cpu": torch.arange(5, dtype=torch.uint8)}]
    written = dict(write_alone(collect_state(model, optimizer, randoms, rewards), tmp_path))
    assert written == tensor_digests(tmp_path)
    assert (len(list(tmp_path.iterdir())) > 1) == (file_bytes == 1)
    assert not [path for path in tmp_path.iterdir() if path.stat().st_mode & 0o077]

    other = Tied(1)
    fresh = make_optimizer(other, TrainConfig(lr=0.1))
    frozen = other.frozen.clone()
    found, best = load_state(tmp_path, other, fresh)
    np.testing.assert_array_equal(best, rewards)
    assert [list(map(torch.Tensor.tolist, one.values())) for one in found] == [
        list(map(torch.Tensor.tolist, one.values())) for one in randoms
    ]
    assert other.out.weight is other.embed.weight
    assert torch.equal(other.frozen, frozen)
    for name in ("embed.weight", "turned", "seen"):
        assert torch.equal(other.state_dict()[name], model.state_dict()[name])
    torch.testing.assert_close(fresh.named_state(), optimizer.named_state(), rtol=0, atol=0)


@pytest.mark.parametrize("change", ["another shape", "one more"])
def test_the_state_of_another_model_is_refused_before_anything_is_read(tmp_path, change):
    model, optimizer = trained(0)
    dict(write_alone(collect_state(model, optimizer, [], np.zeros((0, 2))), tmp_path))
    other = Tied(1)
    if change == "another shape":
        other.turned = nn.Parameter(torch.zeros(4, 3))
    else:
        other.more = nn.Parameter(torch.zeros(1))
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(TrainingError, match="turned" if change == "another shape" else "more"):
        load_state(tmp_path, other, make_optimizer(other, TrainConfig()))
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())


def test_what_cannot_be_written_is_told(tmp_path):
    model, optimizer = trained(0)
    place = tmp_path / "a file"
    place.touch()
    with pytest.raises(StoreError, match="could not be written"):
        write_together(collect_state(model, optimizer, [], np.zeros((0, 2))), place, ALONE)
