"""Sketches keep inner products: unbiased, with the stated variance, exact where nothing is shortened."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rmcore.core.errors import CurvatureError
from rmcore.explain import sketch
from rmcore.explain.influence import influences
from rmcore.explain.sketch import LEAST_WIDTH, _Sketch, sketched_gram
from rmcore.landscape.margin_gram import margin_gram
from rmcore.landscape.operators import LossGaussNewton
from rmcore.models.batching import pad_pairs

WIDTH, COLUMNS = LEAST_WIDTH, 3 * LEAST_WIDTH + 1234


def sketched(vectors, seed):
    rows = SimpleNamespace(num_columns=COLUMNS, pairs=[None], device=torch.device("cpu"))
    shorten = _Sketch(rows, WIDTH, seed)
    return torch.stack([shorten(vector) for vector in vectors])


def test_products_are_unbiased_with_the_stated_variance():
    draw = torch.Generator().manual_seed(0)
    # Few large coordinates at one place of each stretch: the worst case of shortening without random turns.
    vectors = torch.randn(2, COLUMNS, generator=draw) * 0.05
    vectors[:, ::WIDTH] += 3 * torch.randn(2, 4, generator=draw)
    true = float(vectors[0] @ vectors[1])
    found = np.array([float(torch.prod(sketched(vectors, seed), dim=0).sum()) for seed in range(400)])
    bound = np.sqrt(2 / WIDTH) * float(vectors.norm(dim=1).prod())
    assert abs(found.mean() - true) < 5 * bound / np.sqrt(400)
    assert np.sqrt(np.mean((found - true) ** 2)) < 1.2 * bound


def test_every_coordinate_is_kept_once():
    for place in (0, WIDTH - 1, WIDTH, COLUMNS - 1):
        one = torch.zeros(1, COLUMNS)
        one[0, place] = 2.0
        (found,) = sketched(one, seed=3)
        assert found.abs().sum() == 2.0


@pytest.fixture
def operator(rm, gold_pairs):
    pairs = rm.renderer.tokenize_pairs(gold_pairs[:12])
    return LossGaussNewton(rm, [pad_pairs([pair], pad_id=rm.pad_id) for pair in pairs])


def test_nothing_is_shortened_where_there_is_room(operator):
    exact = margin_gram(operator)
    found = sketched_gram(operator, width=10**9)
    assert found.width is None
    whole = torch.stack([*exact.blocks.values()]).sum(0)
    torch.testing.assert_close(found.products, whole, rtol=0, atol=1e-5 * float(whole.diagonal().max()))
    torch.testing.assert_close(found.margins, exact.margins)


def test_shortened_products_are_off_by_the_stated_part_of_the_norms(operator):
    exact = sketched_gram(operator, width=10**9).products
    found = sketched_gram(operator, width=2**14)
    assert found.width == 2**14
    norms = exact.diagonal().sqrt()
    off = (found.products - exact) / torch.outer(norms, norms)
    assert float(off.square().mean().sqrt()) < np.sqrt(2 / 2**14)


def test_influence_keeps_its_order(rm, gold_pairs, monkeypatch):
    parts = gold_pairs[:40], gold_pairs[40:44], gold_pairs[50:80]
    monkeypatch.setattr(sketch, "WIDTH", 10**9)
    exact = influences(rm, *parts)
    monkeypatch.undo()
    found = influences(rm, *parts)
    for ours, theirs in zip(found.effect, exact.effect, strict=True):
        assert np.corrcoef(ours, theirs)[0, 1] > 0.98


def test_memory_makes_sketches_narrower_and_is_refused_where_they_would_mean_little(operator):
    refused, memory, found = 0, 2**20, None
    while found is None:
        try:
            found = sketched_gram(operator, memory_bytes=memory)
        except CurvatureError as refusal:
            assert "the memory leaves" in str(refusal)  # noqa: PT017 - it is refused until there is enough
            refused += 1
            memory += 12 * 2**13 * 4  # a step that the narrowest sketches cannot jump over
    assert refused
    assert LEAST_WIDTH <= found.width < sketch.WIDTH
