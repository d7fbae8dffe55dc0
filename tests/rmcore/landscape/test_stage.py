"""One key, one result: no clock, load or free memory of the machine decides what the stage landscape stores."""

import itertools
import time
from types import SimpleNamespace

import psutil
import pytest
import torch

from rmcore.config.pipeline import PipelineConfig
from rmcore.core.tracking import NullTracker
from rmcore.data.table import write_pairs
from rmcore.landscape import stage
from rmcore.landscape.operators import LossHessian
from rmcore.landscape.settings import LandscapeConfig
from rmcore.stages.stages import STAGES
from single_stage import stage_with

CONFIG = PipelineConfig(device="cpu", landscape=LandscapeConfig(num_pairs=4, lanczos_steps=3, trace_probes=2, top_k=2))


@pytest.fixture
def upstream(rm, gold_pairs, tmp_path):
    rm.save(tmp_path / "train" / "best")
    (tmp_path / "prepare").mkdir()
    write_pairs(gold_pairs[:20], tmp_path / "prepare" / "test.parquet")
    return {"train": tmp_path / "train", "prepare": tmp_path / "prepare"}


def outcome(upstream, out):
    """Bytes of every file that the artifact's digest covers."""
    out.mkdir()
    stage.run(stage_with("landscape", CONFIG, upstream), out, NullTracker(), lambda *at: None)
    return {path.name: path.read_bytes() for glob in STAGES["landscape"].outcome for path in out.glob(glob)}


@pytest.mark.slow
def test_a_slow_device_and_a_busy_machine_store_the_same_bytes(upstream, tmp_path, monkeypatch):
    undisturbed = outcome(upstream, tmp_path / "idle")
    assert set(undisturbed) == {"spectrum.json"}

    # Each look at a clock finds an hour gone, little memory is free, and a product gives way to other processes.
    hours = itertools.count(0, 3600)
    for name in ("time", "monotonic", "perf_counter"):
        monkeypatch.setattr(time, name, lambda: float(next(hours)))
    memory = SimpleNamespace(**{**psutil.virtual_memory()._asdict(), "available": 2**28})
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    products = LossHessian.products

    def slow(self, vectors):
        torch.randn(500, 500, generator=torch.Generator().manual_seed(0)).matrix_exp()
        return products(self, vectors)

    monkeypatch.setattr(LossHessian, "products", slow)
    assert outcome(upstream, tmp_path / "busy") == undisturbed
