"""Curvature of the loss at a reward model's weights."""

from rmcore.landscape.analyzer import HessianAnalyzer
from rmcore.landscape.operators import LossHessian
from rmcore.landscape.spectrum import HessianSpectrum

__all__ = ["HessianAnalyzer", "HessianSpectrum", "LossHessian"]
