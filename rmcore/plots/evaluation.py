"""The figures of an evaluation, one import for the stage that draws them all."""

from rmcore.plots.calibration import reliability_diagram
from rmcore.plots.context import accuracy_in_context
from rmcore.plots.length import reward_by_length
from rmcore.plots.margins import margin_histogram

__all__ = ["accuracy_in_context", "margin_histogram", "reliability_diagram", "reward_by_length"]
