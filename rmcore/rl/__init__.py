"""From a measured reward model to optimising a policy against it."""

from rmcore.rl.readiness import RLReadinessReport, RLReadinessScorer

__all__ = ["RLReadinessReport", "RLReadinessScorer"]
