"""What curvature costs on a GPU: Hessian products over a gradient, and the pairs' Gauss-Newton spectrum.

The exact spectrum of n pairs over all parameters of 0.5 B needs n gradients of 1.4 GB, of which a GPU holds a few
dozen, so each is computed about n / (2 held) times (`rmcore.landscape.margin_gram.RowPlan`). The unit over all
parameters therefore takes as many pairs as are held, and estimates what 2,048 would take: gradients by that plan times
the seconds of one. The spectrum of the last layer is measured with all 2,048.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from gpu_throughput import HALF, cell_of
from gpu_work import Work
from landscape import KINDS, timed
from throughput_sides import make_rm
from train_throughput import draw

from rmcore.data.rendering import TokenizedPair
from rmcore.landscape.gram import gauss_newton_spectrum
from rmcore.landscape.margin_gram import RowPlan
from rmcore.models.batching import pad_pairs
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.training.memory import free_bytes

NUM_PAIRS = 2048
HVP_PAIRS = 4
REPEATS = 3
SHARE = 0.75
"""Of the free memory, for gradients."""
MOST_HELD = 24


def run(work: Work) -> None:
    """Products, then the two spectra."""
    cell = cell_of(("smoke" if work.smoke else HALF, "hh-like", "packed", {}), smoke=work.smoke)
    num_pairs = 8 if work.smoke else NUM_PAIRS
    cell = replace(cell, steps=-(-num_pairs // cell.pairs_per_step))
    pairs = draw(cell)[:num_pairs]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rm = make_rm(cell, device)
    layer = f"model.layers.{rm.model.config.num_hidden_layers - 1}"
    units: list[tuple[str, float, Any]] = [
        (f"products with the {kind}", 15, partial(products, rm, kind, pairs[:HVP_PAIRS])) for kind in KINDS
    ]
    units.append(("spectrum, all parameters", 25, partial(whole_spectrum, rm, pairs)))
    units.append((f"spectrum, {layer}", 150, partial(spectrum, rm, pairs, layer)))
    work.units(units)


def products(rm: BradleyTerryRM, kind: str, pairs: Sequence[TokenizedPair]) -> dict[str, Any]:
    """Median seconds of a gradient and of a product with one vector, graph kept and built anew, in turns."""
    batch = pad_pairs(pairs, pad_id=rm.pad_id)
    kept, anew = (KINDS[kind](rm, [batch], keep_graphs=keep) for keep in (True, False))
    vector = torch.randn(1, kept.num_parameters, device=rm.device)
    calls = {
        "gradient_s": kept.gradient,
        "kept_s": lambda: kept.products(vector),
        "anew_s": lambda: anew.products(vector),
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(REPEATS + 1):
        for name, call in calls.items():
            taken = timed(call)[1][0]
            if repeat:
                seconds[name].append(taken)
    kept.release()
    medians = {name: sorted(values)[len(values) // 2] for name, values in seconds.items()}
    ratios = {f"{name[:-2]}_over_gradient": medians[name] / medians["gradient_s"] for name in ("kept_s", "anew_s")}
    peak = {"peak_gib": torch.cuda.max_memory_allocated() / 2**30} if rm.device.type == "cuda" else {}
    return medians | ratios | {"pairs": len(pairs)} | peak


def whole_spectrum(rm: BradleyTerryRM, pairs: Sequence[TokenizedPair]) -> dict[str, Any]:
    """As many pairs as are held at once; what all of them would take is an estimate, and called so."""
    parameters = sum(p.numel() for p in rm.model.parameters())
    embedding = rm.model.get_input_embeddings().weight.numel()
    row_bytes = 4 * (parameters - embedding)  # the embedding's gradients are kept apart
    room = int(SHARE * free_bytes(rm.device))
    held = max(2, min(len(pairs), MOST_HELD, room // row_bytes - 1))
    found = spectrum(rm, pairs[:held], "all", room)
    plan = RowPlan.fitting(len(pairs), row_bytes, room)
    seconds = found["seconds_a_gradient"] * plan.num_gradients(len(pairs))
    return found | {f"estimate_s_of_{len(pairs)}_pairs": seconds}


def spectrum(
    rm: BradleyTerryRM, pairs: Sequence[TokenizedPair], parameters: str, room: int | None = None
) -> dict[str, Any]:
    """The exact spectrum of the pairs."""
    started = time.perf_counter()
    found = gauss_newton_spectrum(
        rm,
        [pad_pairs([pair], pad_id=rm.pad_id) for pair in pairs],
        prompts=[pair.pair_id for pair in pairs],
        parameters=parameters,
        memory_bytes=room or int(SHARE * free_bytes(rm.device)),
    )
    seconds = time.perf_counter() - started
    return {
        "pairs": len(pairs),
        "spectrum_s": seconds,
        "gradients": found.num_gradients,
        "seconds_a_gradient": seconds / found.num_gradients,
        "lambda_max": found.lambda_max,
        "effective_rank": found.effective_rank,
    }
