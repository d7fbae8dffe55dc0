"""Evaluation of reward models from per-pair rewards, with intervals over prompts."""

from rmcore.metrics.calibration import reliability_bins
from rmcore.metrics.comparison import paired_comparison
from rmcore.metrics.diagnosis import Diagnosis, GateCheck, diagnose, validation_gate
from rmcore.metrics.report_card import batch_metrics, evaluate_pairs, most_confident_mistakes
from rmcore.metrics.uncertainty import MetricValue, cluster_bootstrap, sign_flip_test, t_interval

__all__ = [
    "Diagnosis",
    "GateCheck",
    "MetricValue",
    "batch_metrics",
    "cluster_bootstrap",
    "diagnose",
    "evaluate_pairs",
    "most_confident_mistakes",
    "paired_comparison",
    "reliability_bins",
    "sign_flip_test",
    "t_interval",
    "validation_gate",
]
