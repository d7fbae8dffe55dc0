"""A realistic record of a curvature measurement, as the landscape stage writes it."""

from typing import Any

from rmcore.landscape.settings import LandscapeConfig

SETTINGS = LandscapeConfig()
OTHERS = {"landscape.method": "full", "landscape.parameters": "head"}
TEXTS = {"landscape.parameters": "names of parts of the model"}
DECIDE = {"rmcore.landscape.analyzer": "whether a basis that does not fit is refused, which stores nothing"}


def record() -> dict[str, Any]:
    return {
        "eigenvalues": [12.3, 4.1, 2.2, 1.9, 1.1, -0.02, -0.1, -0.2, -0.3, -0.4],
        "residuals": [0.001, 0.01, 0.1, 0.3, 0.4, 0.1, 0.1, 0.05, 0.02, 0.01],
        "lambda_max": 12.3,
        "lambda_min": -0.4,
        "trace_estimate": 42.1,
        "trace_standard_error": 3.2,
        "condition_number": None,
        "effective_rank": 9.7,
        "negative_mass": 0.179,
        "sharpness_score": 0.292,
        "flatness_index": 0.081,
        "num_pairs": 64,
        "num_parameters": 11_240_449,
        "num_products": 57,
        "method": "lanczos",
        "parameters": "all",
        "converged": True,
        "reasons": {"condition_number": "fewer than two positive eigenvalues are known to 1 %"},
        "over_prompts": {"standard_error": 1.9, "num_prompts": 21, "num_groups": 16, "reasons": {}},
        "normalized": {"temperature": 1.52, "lambda_max": 21.6, "residual": 0.002, "reasons": {}},
    }
