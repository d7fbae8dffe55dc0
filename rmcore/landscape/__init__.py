"""Curvature of the loss at a reward model's weights."""

from rmcore.core.capabilities import Capability
from rmcore.core.metric_spec import MetricSpec

METRICS = (
    MetricSpec(
        "lambda_max",
        "largest eigenvalue λmax",
        "",
        "curvature of the loss along its sharpest direction",
        cell_name="hessian/test_lambda_max",
        cell_label="largest Hessian eigenvalue",
        stage="landscape",
    ),
    MetricSpec(
        "lambda_min",
        "smallest eigenvalue λmin",
        "",
        "negative: along some direction the loss still bends down",
        cell_name="hessian/test_lambda_min",
        cell_label="smallest Hessian eigenvalue",
        stage="landscape",
    ),
    MetricSpec(
        "lambda_max_normalized",
        "λmax at margins of size 1",
        "",
        "may be compared between models whose margins differ in size",
        cell_name="hessian/test_lambda_max_normalized",
        cell_label="largest Hessian eigenvalue at margins of size 1",
        stage="landscape",
    ),
    MetricSpec(
        "trace_estimate",
        "trace",
        "",
        "sum of all eigenvalues, estimated with random probes",
        cell_name="hessian/test_trace_estimate",
        cell_label="Hessian trace",
        stage="landscape",
    ),
    MetricSpec(
        "negative_mass", "negative mass", "share", "sizes of the negative eigenvalues together, as a share of all sizes"
    ),
    MetricSpec(
        "effective_rank",
        "effective rank",
        "",
        "about how many directions carry the curvature: k for k equal eigenvalues",
    ),
    MetricSpec("condition_number", "condition number", "", "largest over smallest resolved positive eigenvalue"),
    MetricSpec("sharpness_score", "sharpness λmax / trace", "", "share of the trace in one direction"),
    MetricSpec("flatness_index", "flatness 1 / λmax", "", "grows merely because margins grow: never read it alone"),
)

CAPABILITY = Capability(
    {"analyze": "Measure the curvature of the loss at a checkpoint: both ends of the spectrum, and the trace."},
    metrics=METRICS,
    public={"HessianAnalyzer": "analyzer"},
)
