"""Curvature of the loss at a reward model's weights."""

from rmcore.landscape.operators import LossHessian
from rmcore.landscape.spectrum import HessianAnalyzer, HessianSpectrum

__all__ = ["HessianAnalyzer", "HessianSpectrum", "LossHessian"]
