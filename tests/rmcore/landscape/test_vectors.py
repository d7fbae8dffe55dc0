"""Sums over millions of float32 entries, which torch's own norm gets wrong in the fourth digit."""

import math

import pytest
import torch

from rmcore.landscape.vectors import dot, norm

LONG = 2**24


@pytest.fixture(scope="module")
def vector():
    return torch.randn(LONG, generator=torch.Generator().manual_seed(0))


def test_norm_and_products_of_long_vectors_are_exact_to_float32(vector):
    truth = math.sqrt(float(vector.double().square().sum()))
    assert norm(vector) == pytest.approx(truth, rel=1e-9)
    assert dot(vector, vector) == pytest.approx(truth**2, rel=1e-6)
