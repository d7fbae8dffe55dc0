"""A realistic record of a curvature measurement, as the landscape stage writes it: six layers of a BERT shape."""

from typing import Any

import numpy as np

NUM_PAIRS, NUM_PROMPTS, NUM_PARAMETERS = 64, 21, 11_240_449
LAYERS = [f"bert.encoder.layer.{number}" for number in range(6)]
KINDS = {
    "attention.self.query.weight": 147_456,
    "attention.self.query.bias": 384,
    "attention.self.key.weight": 147_456,
    "attention.self.key.bias": 384,
    "attention.self.value.weight": 147_456,
    "attention.output.dense.weight": 147_456,
    "attention.output.LayerNorm.weight": 384,
    "intermediate.dense.weight": 589_824,
    "output.dense.weight": 589_824,
    "output.LayerNorm.weight": 384,
}
OTHERS = {"embeddings": {"word_embeddings.weight": 11_720_448, "LayerNorm.weight": 384}, "head": {"weight": 384}}


def spectrum() -> dict[str, Any]:
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
        "num_pairs": NUM_PAIRS,
        "num_parameters": NUM_PARAMETERS,
        "num_products": 57,
        "method": "lanczos",
        "parameters": "all",
        "converged": True,
        "reasons": {"condition_number": "fewer than two positive eigenvalues are known to 1 %"},
    }


def gauss_newton() -> dict[str, Any]:
    eigenvalues = 10.9 * np.arange(1, NUM_PAIRS + 1) ** -1.3
    values = {"lambda_max": 10.9, "trace": float(eigenvalues.sum()), "effective_rank": 6.4}
    bounds = {}
    for name, value in values.items():
        bounds |= {name: value, f"{name}_standard_error": 0.16 * value}
        bounds |= {f"{name}_ci_low": 0.7 * value, f"{name}_ci_high": 1.45 * value}
    return {
        "eigenvalues": eigenvalues.tolist(),
        "rounding": 2.1e-7,
        **bounds,
        "num_pairs": NUM_PAIRS,
        "num_prompts": NUM_PROMPTS,
        "num_parameters": NUM_PARAMETERS,
        "num_gradients": NUM_PAIRS,
        "temperature": 1.0,
        "blocks": {
            name: {"lambda_max": 0.5 + 0.4 * row, "trace": 1.1 + row, "num_parameters": sum(KINDS.values())}
            for row, name in enumerate(["embeddings", *LAYERS, "head"])
        },
        "reasons": {},
    }


def density() -> dict[str, Any]:
    grid, width = np.linspace(-1.6, 13.6, 600), 0.12
    peaks = [(0.0, 1.0 - 2e-5), (-0.4, 4e-7), (0.9, 1e-6), (2.0, 4e-7), (4.1, 1e-7), (12.3, 1e-7), (-0.2, 1.8e-5)]
    height = sum(mass * np.exp(-0.5 * ((grid - at) / width) ** 2) / (width * np.sqrt(2 * np.pi)) for at, mass in peaks)
    return {
        "grid": grid.tolist(),
        "density": height.tolist(),
        "standard_error": (0.4 * height).tolist(),
        "width": width,
        "rounding": 3e-6,
        "num_products": 328,
        "lambda_low": -0.4,
        "lambda_high": 12.3,
        "negative_mass": 0.183,
        "negative_mass_standard_error": 0.021,
        "effective_rank": 10.2,
        "effective_rank_standard_error": 1.1,
        "trace": 41.3,
        "trace_standard_error": 3.0,
        "num_vectors": 8,
        "num_steps": 40,
        "num_parameters": NUM_PARAMETERS,
        "reasons": {},
    }


def layers() -> dict[str, Any]:
    rng = np.random.default_rng(1)
    tensors, blocks = [], []
    for name in ("embeddings", *LAYERS, "head"):
        kinds = OTHERS.get(name, KINDS)
        for kind, num in kinds.items():
            trace = float(rng.normal(0.8, 1.0)) * (4e-4 * num if num < 1000 else 3e-6 * num)
            held = {"name": f"{name}.{kind}", "block": name, "kind": kind, "num_parameters": num}
            tensors.append(held | {"trace": trace, "trace_standard_error": abs(trace) * float(rng.uniform(0.05, 0.8))})
        own = [tensor for tensor in tensors if tensor["block"] == name]
        largest, smallest = float(rng.uniform(0.6, 6.0)), -float(rng.uniform(0.05, 0.4))
        blocks.append(
            {
                "name": name,
                "num_parameters": sum(kinds.values()),
                "trace": sum(tensor["trace"] for tensor in own),
                "trace_standard_error": 0.3,
                "lambda_max": largest,
                "lambda_max_residual": 0.05 * largest,
                "lambda_min": smallest,
                "lambda_min_residual": 0.03,
            }
        )
    counts = {"num_pairs": NUM_PAIRS, "num_products": 16 + 8 * 20, "num_parameters": NUM_PARAMETERS}
    return {"blocks": blocks, "tensors": tensors, **counts, "reasons": {}}


def slices() -> dict[str, Any]:
    distances, axis = np.linspace(-0.3, 0.3, 11), np.linspace(-0.5, 0.5, 5)
    common = {"loss_at_model": 0.561, "num_pairs": NUM_PAIRS, "temperature": 1.0, "num_not_finite": 0, "reasons": {}}
    line = {
        "name": "eigenvector of the largest eigenvalue, 12.3",
        "unit": "Euclidean length",
        "distances": distances.tolist(),
        "loss": (0.561 + 5.2 * distances**2 - 3 * distances**3).tolist(),
        "accuracy": (0.71 - 0.2 * distances**2).tolist(),
        "tie_rate": [0.0] * len(distances),
        "quadratic": (0.561 + 6.15 * distances**2).tolist(),
        "slope": 0.0,
        "curvature": 12.3,
        "length": 1.0,
    }
    surface = {
        "name_x": "random direction 1",
        "name_y": "random direction 2",
        "unit": "filter-normalised",
        "xs": axis.tolist(),
        "ys": axis.tolist(),
        "loss": (0.561 + axis[:, None] ** 2 + 3 * axis**2).tolist(),
        "accuracy": np.full((5, 5), 0.7).tolist(),
        "cosine": 0.001,
        "length_x": 31.0,
        "length_y": 31.0,
    }
    sam = {"radius": 0.05, "loss": 0.561, "loss_at_radius": 0.602, "sharpness": 0.041, "gradient_norm": 0.62}
    sam |= {"first_order": 0.031, "second_order": 0.0405, "num_pairs": NUM_PAIRS, "temperature": 1.0, "reasons": {}}
    return {"lines": [line | common], "surface": surface | common, "sam": sam}


def noise() -> dict[str, Any]:
    return {
        "lambda_max": {"value": 12.3, "standard_error": 1.9, "pairs_for_10_percent": 152.7},
        "lambda_min": {"value": -0.4, "standard_error": 0.21, "pairs_for_10_percent": 1764.0},
        "trace": {"value": 43.0, "standard_error": 2.1, "pairs_for_10_percent": 15.3},
        "bf16": {"relative_error": 0.0071, "lambda_max": 12.27},
        "num_pairs": NUM_PAIRS,
        "num_prompts": NUM_PROMPTS,
        "num_groups": 16,
        "reasons": {},
    }


def curvature() -> dict[str, Any]:
    normalized = {"temperature": 1.52, "lambda_max": 21.6, "lambda_max_residual": 0.002, "lambda_min": -0.9}
    normalized |= {"lambda_min_residual": 0.03, "trace": 88.0, "trace_standard_error": 6.1, "reasons": {}}
    return {
        "spectrum": spectrum(),
        "normalized": normalized,
        "gauss_newton": gauss_newton(),
        "density": density(),
        "layers": layers(),
        "slices": slices(),
        "noise": noise(),
    }
