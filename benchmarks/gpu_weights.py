"""Weights into a running vLLM by a checkpoint, the one way that the platform has: seconds an update, same rewards."""

import os
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from gpu_work import NotHereError, Work
from throughput_sides import SEED

from rmcore.config.model import ModelConfig
from rmcore.models.reward_model import BradleyTerryRM

UPDATES = 3
ROWS = [{"prompt": f"What is {n} + 2?", "response": f"It is {n + 2}."} for n in range(16)]
CLOSE = 0.05
"""Of the rewards' spread: vLLM computes in its own precision."""


def run(work: Work) -> None:
    """Skipped where there is no vLLM: the one of `make vllm` is named in RM_OPT_VLLM."""
    if not os.environ.get("RM_OPT_VLLM"):
        if find_spec("vllm") is None:
            raise NotHereError("no vLLM: it cannot be imported, and RM_OPT_VLLM names no environment that has it")
        os.environ["RM_OPT_VLLM"] = sys.executable
    work.units([("checkpoint", 120.0, published)])


def published() -> dict[str, Any]:
    """Start a server on one set of weights, publish others, compare rewards after each update."""
    from rmcore.serving.process import RewardServer
    from rmcore.serving.server import ServeSettings
    from rmcore.serving.weight_sync import create_rm_publisher

    models = [
        BradleyTerryRM.new(ModelConfig(name="tiny", max_seq_len=128), seed=SEED + n, device=torch.device("cpu"))
        for n in range(2)
    ]
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "checkpoint"
        models[0].save(checkpoint)
        started = time.perf_counter()
        with RewardServer(ServeSettings(str(checkpoint), port=0)) as server:
            start_s = time.perf_counter() - started
            publisher, client = create_rm_publisher(server.address), server.client()
            seconds, worst = [], 0.0
            for update in range(1, UPDATES + 1):
                rm = models[update % 2]
                started = time.perf_counter()
                publisher.publish(rm)
                seconds.append(time.perf_counter() - started)
                expected = rm.score([row["prompt"] for row in ROWS], [row["response"] for row in ROWS])
                served = torch.tensor(client.score(ROWS).rewards).numpy()
                worst = max(worst, float(abs(served - expected).max() / expected.std()))
    if not worst <= CLOSE:
        raise AssertionError(f"served rewards are {worst:.2g} of their spread from those published")
    return {"start_s": start_s, "update_s": sorted(seconds)[len(seconds) // 2], "largest_difference": worst}
