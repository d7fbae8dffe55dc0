"""The figures of an evaluation, one import for the stage that draws them all."""

from rmcore.reporting.figures.calibration import reliability_diagram
from rmcore.reporting.figures.context import accuracy_in_context
from rmcore.reporting.figures.length import reward_by_length
from rmcore.reporting.figures.margins import margin_histogram

__all__ = ["accuracy_in_context", "margin_histogram", "reliability_diagram", "reward_by_length"]
