"""Rows a second of the batched scorer: float32, bf16 weights in batches of 8 k and 64 k tokens, compiled, and vLLM.

MFU = 2 W t r / peak with the W weights of the layers' matrices, t tokens computed a row, r rows a second (attention
left out: below 3 % at these lengths). The rewards of every form are compared with those of padded float32: largest
difference, and that over the standard deviation of the rewards. `held_gib` are the weights, `peak_gib` all that was
allocated at once. Aimed at are 4,100 rows/s at 0.5 B.
"""

import tempfile
import time
from typing import Any

import numpy as np
import torch
from gpu_plan import NotHereError, Work
from gpu_training import HALF, built, cell_of, compiling
from train_throughput import PEAK_TFLOPS, draw, num_matrix_weights

from rmcore.data.rendering import TokenizedSide
from rmcore.models.compiling import CompiledLayers
from rmcore.models.packing.layout import group_tokens
from rmcore.models.precision import round_backbone
from rmcore.models.reward_model import BradleyTerryRM

SMALL_BUDGET, LARGE_BUDGET = 8192, 65536
"""Tokens of a batch: a CPU's, and one that fills a large GPU."""
VLLM_SHARE = 0.4
WARM_UP = 64
"""Sides."""


def scoring(work: Work) -> None:
    """One measurement a form; weights are rounded in place, so the float32 ones come first, and are scored once."""
    cell = cell_of(HALF, smoke=work.smoke)
    sides = [side for pair in draw(cell) for side in (pair.chosen, pair.rejected)]
    rm = built(work, cell)
    rm.allow_packing = False
    truth: list[np.ndarray] = []
    work.measure("padded, float32", lambda: scored(rm, sides, truth, SMALL_BUDGET))
    if not truth:  # measured by an earlier call
        truth.append(rm.score_sides(sides, token_budget=SMALL_BUDGET))
    work.built.clear()  # what follows stays
    round_backbone(rm.model)
    rounded = BradleyTerryRM.of(rm.model, rm.tokenizer, rm.renderer.rendering)  # which asks again how rows are packed
    for budget in (SMALL_BUDGET, LARGE_BUDGET):
        name = f"packed, bf16 weights, {budget} tokens"
        work.measure(name, lambda budget=budget: scored(rounded, sides, truth, budget))
    work.measure("packed, bf16 weights, compiled", lambda: scored_compiled(rounded, sides, truth))
    work.measure("vLLM", lambda: scored_by_vllm(rounded, sides))


def scored(rm: BradleyTerryRM, sides: list[TokenizedSide], truth: list[np.ndarray], budget: int) -> dict[str, Any]:
    """Score all sides, after some of them to warm up; `truth` receives the rewards where it is empty."""
    rm.score_sides(sides[:WARM_UP], token_budget=budget)
    on_gpu = rm.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    rewards = rm.score_sides(sides, token_budget=budget)
    seconds = time.perf_counter() - started
    if not truth:
        truth.append(rewards)
    packing = rm.packing("fp32")
    chunks = rm.scoring_chunks(sides, token_budget=budget, precision="fp32")
    tokens = sum(
        sum(group_tokens([sides[index].ids for index in group], packing) for group in chunk)
        if packing
        else sum(map(len, chunk)) * max(len(sides[index].ids) for group in chunk for index in group)
        for chunk in chunks
    )
    difference = float(np.abs(rewards - truth[0]).max())
    found = {
        "rows_per_s": len(sides) / seconds,
        "tokens_a_row": tokens / len(sides),
        "largest_difference": difference,
        "over_spread": difference / float(truth[0].std()),
        "form": packing.kernel if packing else "padded",
        "mfu_percent": 200 * num_matrix_weights(rm.model.config) * tokens / seconds / (PEAK_TFLOPS * 1e12),
        "held_gib": sum(one.numel() * one.element_size() for one in rm.model.parameters()) / 2**30,
    }
    return found | ({"peak_gib": torch.cuda.max_memory_allocated() / 2**30} if on_gpu else {})


def scored_compiled(rm: BradleyTerryRM, sides: list[TokenizedSide], truth: list[np.ndarray]) -> dict[str, Any]:
    """The same with compiled layers, as long scorings on a GPU have them; seconds of the first pass compile."""
    with compiling() as given_up:
        rm.allow_packing = rm.device.type == "cuda"  # on a CPU attention of packed rows is more than one operation
        rm.compiled = CompiledLayers(rm.model)
        started = time.perf_counter()
        rm.score_sides(sides[:WARM_UP], token_budget=LARGE_BUDGET)
        first = time.perf_counter() - started
        found = {"first_pass_s": first} | scored(rm, sides, truth, LARGE_BUDGET)
        rm.compiled, rm.allow_packing = None, True
    if given_up:
        raise RuntimeError(f"not compiled, so these are the numbers of plain layers: {given_up[0]}; {found}")
    return found


def scored_by_vllm(rm: BradleyTerryRM, sides: list[TokenizedSide]) -> dict[str, Any]:
    """The same rows through vLLM's own batching in this process, in bf16."""
    try:
        from vllm import LLM
    except ImportError as error:
        raise NotHereError("no vLLM to import") from error
    with tempfile.TemporaryDirectory() as folder:
        rm.model.save_pretrained(folder)
        rm.tokenizer.save_pretrained(folder)
        longest = max(len(side.ids) for side in sides) + 1
        engine = LLM(
            folder, runner="pooling", convert="classify", dtype="bfloat16", max_model_len=longest,
            gpu_memory_utilization=VLLM_SHARE, enable_prefix_caching=True,
        )  # fmt: skip
        prompts = [{"prompt_token_ids": list(side.ids)} for side in sides]
        engine.classify(prompts[:64])
        started = time.perf_counter()
        answers = engine.classify(prompts)
        seconds = time.perf_counter() - started
    assert len(answers) == len(sides)
    return {"rows_per_s": len(sides) / seconds, "form": "vLLM"}
