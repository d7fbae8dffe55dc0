"""The curve of gains against dense float64 truth, and what is read off it."""

import numpy as np
import pytest

from rmcore.policy.stopping.watch import BEND, OWN, ROUGHNESS, SLOPE, GainCurve

KLS = (0.2, 0.5, 1.1, 0.8, 2.5)  # a way back is a way on
SEEN = ((1, 0, 0.3, 0.04), (2, 0, 0.2, 0.03), (3, 1, -0.1, 0.05), (4, 2, 0.1, 0.02), (5, 2, -0.4, 0.02))


def curve():
    found = GainCurve()
    for kl, (later, earlier, difference, variance) in zip(KLS, SEEN, strict=True):
        assert found.add_checkpoint(kl) == later
        found.compare(later, earlier, difference, variance)
    return found


def dense():
    """By the information form, from the definition of each kernel."""
    roots = np.sqrt(np.array([0.0, *KLS]))
    along = np.cumsum(np.abs(np.diff(roots)))
    prior = np.zeros((5, 5))
    for i, s in enumerate(along):
        for j, t in enumerate(along):
            grid = np.linspace(0, min(s, t), 4001)
            walk = np.trapezoid((s - grid) * (t - grid), grid)  # of an integrated random walk
            prior[i, j] = SLOPE**2 * s * t + BEND**2 * s**2 * t**2 + ROUGHNESS**2 * walk + OWN**2 * (i == j)
    precision = np.linalg.inv(prior)
    right = np.zeros(5)
    for later, earlier, difference, variance in SEEN:
        contrast = np.zeros(6)
        contrast[later], contrast[earlier] = 1, -1
        precision = precision + np.outer(contrast[1:], contrast[1:]) / variance
        right += contrast[1:] * difference / variance
    covariance = np.linalg.inv(precision)
    return covariance @ right, covariance


def test_the_posterior_is_the_dense_one():
    mean, covariance = curve().posterior()
    expected, spread = dense()
    assert mean[0] == 0
    assert (covariance[0] == 0).all()
    np.testing.assert_allclose(mean[1:], expected, atol=1e-7)
    np.testing.assert_allclose(covariance[1:, 1:], spread, atol=1e-7)
    alone = GainCurve()  # before anything is judged it is the prior
    alone.add_checkpoint(1.0)
    mean, covariance = alone.posterior()
    assert mean.tolist() == [0, 0]
    assert covariance[1, 1] == pytest.approx(SLOPE**2 + BEND**2 + ROUGHNESS**2 / 3 + OWN**2)
    assert alone.informative_reference([0]) == 0


def test_the_telling_reference_has_the_largest_square_fall():
    found = curve()
    found.add_checkpoint(3.0)
    mean, covariance = found.posterior()
    drawn = np.random.default_rng(0).multivariate_normal(mean, covariance, size=200_000)
    falls = (np.minimum(drawn[:, -1:] - drawn[:, :-1], 0) ** 2).mean(axis=0)
    assert found.informative_reference([0, 1, 2, 3, 4, 5]) == falls.argmax()
    among = [0, 3, 5]
    assert found.informative_reference(among) == among[int(falls[among].argmax())]


def test_the_best_is_cautious():
    found = GainCurve()
    for kl in (0.5, 1.0):
        found.add_checkpoint(kl)
    found.compare(1, 0, 0.30, 0.001)
    found.compare(2, 1, 0.02, 0.5)  # a little better, if it is: nearly nothing is known
    assert found.best([0, 1, 2], 0.0) == 2
    assert found.best([0, 1, 2], 1.0) == 1
    assert found.best([0, 2], 3.0) == 0
