"""Rows a second of the batched scorer, packed and padded, in float32, in bf16 by autocast, and with bf16 weights.

MFU = 2 W t r / peak with the W weights of the layers' matrices, t tokens computed a row, r rows a second (attention
left out: below 3 % at these lengths). The rewards of every form are compared with those of padded float32: largest
difference, and that over the standard deviation of the rewards. `held_gib` are the weights, `peak_gib` all that was
allocated at once. Against vLLM where it can be imported. Last, an ensemble of three large members with bf16 weights.
"""

import time
from functools import partial
from typing import Any

import numpy as np
import torch
from gpu_throughput import HALF, cell_of
from gpu_work import NotHereError, Work
from throughput_sides import Cell, make_rm, model_config
from train_throughput import PEAK_TFLOPS, draw, num_matrix_weights
from transformers import AutoModelForSequenceClassification, Qwen2Config

from rmcore.data.rendering import Rendering, TokenizedSide
from rmcore.ensembles.ensemble import RewardModelEnsemble
from rmcore.ensembles.features import features
from rmcore.models.precision import Precision, round_backbone
from rmcore.models.reward_model import SCORING_TOKEN_BUDGET, BradleyTerryRM
from rmcore.models.tiny import tiny_tokenizer

BUDGETS = (SCORING_TOKEN_BUDGET, 65536)
"""Tokens of a batch: the library's own, and one that fills a large GPU better."""
VLLM_SHARE = 0.4
SEVEN_BILLION = {
    "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "num_labels": 1,
}  # fmt: skip
"""Qwen2.5-7B: 7.07 billion weights without the language model's head."""


def run(work: Work) -> None:
    """One unit a form."""
    cell = cell_of(("smoke" if work.smoke else HALF, "hh-like", "packed", {}), smoke=work.smoke)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sides = [side for pair in draw(cell) for side in (pair.chosen, pair.rejected)]
    rm = make_rm(cell, device)
    truth: list[np.ndarray] = []
    forms: list[tuple[Precision, bool, int]] = [("fp32", False, BUDGETS[0]), ("bf16", False, BUDGETS[0])]
    forms += [("bf16", True, budget) for budget in BUDGETS]
    units = [
        (f"{'packed' if packed else 'padded'}, {precision}, batches of {budget} tokens", 8.0, partial(
            score, rm, cell, sides, truth, precision, packed, budget,
        ))
        for precision, packed, budget in forms
    ]  # fmt: skip
    units += [
        (f"packed, bf16 weights, batches of {budget} tokens", 8.0, partial(
            score_rounded, rm, cell, sides, truth, budget,
        ))
        for budget in BUDGETS
    ]  # fmt: skip
    work.units([
        *units,
        ("vLLM", 60.0, partial(score_with_vllm, rm, sides, work)),
        ("ensemble of three, 7 B, bf16 weights", 45.0, partial(score_with_three, sides, device, small=work.smoke)),
    ])  # fmt: skip


def score(
    rm: BradleyTerryRM,
    cell: Cell,
    sides: list[TokenizedSide],
    truth: list[np.ndarray],
    precision: Precision,
    packed: bool,
    budget: int,
) -> dict[str, Any]:
    """Twice, of which the second is timed."""
    if not truth:  # after an interruption the first form's rewards are not there any more
        rm.allow_packing = False
        truth.append(rm.score_sides(sides))
    rm.allow_packing = packed
    call = partial(rm.score_sides, sides, token_budget=budget, precision=precision)
    call()
    if rm.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    rewards = call()
    seconds = time.perf_counter() - started
    packing = rm.packing(precision)
    chunks = rm.scoring_chunks(sides, token_budget=budget, precision=precision)
    tokens = sum(_computed(rm, sides, chunk, packing) for chunk in chunks)
    difference = float(np.abs(rewards - truth[0]).max())
    found = {
        "rows_per_s": len(sides) / seconds,
        "tokens_a_row": tokens / len(sides),
        "largest_difference": difference,
        "over_spread": difference / float(truth[0].std()),
        "packing": packing.kernel if packing else "padded",
        "held_gib": sum(one.numel() * one.element_size() for one in rm.model.parameters()) / 2**30,
    }
    if rm.device.type == "cuda":
        found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        flops = 2 * num_matrix_weights(model_config(cell.model)) * tokens / seconds
        found["mfu_percent"] = 100 * flops / (PEAK_TFLOPS * 1e12)
    return found


def score_rounded(
    rm: BradleyTerryRM, cell: Cell, sides: list[TokenizedSide], truth: list[np.ndarray], budget: int
) -> dict[str, Any]:
    """The same with weights rounded in place, as `--dtype bfloat16` loads them; so these units come last."""
    if not truth:
        rm.allow_packing = False
        truth.append(rm.score_sides(sides))
    round_backbone(rm.model)
    rounded = BradleyTerryRM(rm.model, rm.tokenizer, rm.renderer.rendering)  # which asks anew how rows are packed
    return score(rounded, cell, sides, truth, "fp32", True, budget)


def score_with_three(sides: list[TokenizedSide], device: torch.device, *, small: bool) -> dict[str, Any]:
    """Rewards of an ensemble whose members would not fit a GPU of 80 GB in float32: 28 GB each."""
    tokenizer = tiny_tokenizer()
    shape = model_config("smoke") if small else Qwen2Config(**SEVEN_BILLION, pad_token_id=tokenizer.pad_token_id)
    members = []
    for seed in range(3):
        torch.manual_seed(seed)
        with device:
            model = AutoModelForSequenceClassification.from_config(shape, dtype=torch.bfloat16)
        round_backbone(model)
        members.append(BradleyTerryRM(model.eval(), tokenizer, Rendering("plain", 512)))
    ensemble = RewardModelEnsemble(members)
    backbones = [shared.rm for shared in ensemble.members.backbones]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    for one in backbones:
        features(one, sides[:256])
    found = {
        "rows_per_s": min(256, len(sides)) / (time.perf_counter() - started),
        "packing": ", ".join(sorted({one.packing().kernel if one.packing() else "padded" for one in backbones})),
        "held_gib": sum(p.numel() * p.element_size() for one in backbones for p in one.model.parameters()) / 2**30,
    }
    return found | ({"peak_gib": torch.cuda.max_memory_allocated() / 2**30} if device.type == "cuda" else {})


def _computed(rm: BradleyTerryRM, sides: list[TokenizedSide], chunk: list[list[int]], packing: Any) -> int:
    from rmcore.models.packing.layout import group_tokens

    if packing is None:
        rows = [index for group in chunk for index in group]
        return len(rows) * max(len(sides[index].ids) for index in rows)
    return sum(group_tokens([sides[index].ids for index in group], packing) for group in chunk)


def score_with_vllm(rm: BradleyTerryRM, sides: list[TokenizedSide], work: Work) -> dict[str, Any]:
    """The same rows through vLLM's own batching in this process, in bf16."""
    try:
        from vllm import LLM
    except ImportError as error:
        raise NotHereError("no vLLM to import") from error
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        rm.model.to(torch.bfloat16).save_pretrained(folder)
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
    return {"rows_per_s": len(sides) / seconds, "packing": "vLLM"}
