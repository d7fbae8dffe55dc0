"""benchmarks/gpu.sh: the whole plan on small shapes, and what becomes of parts that fail or hang."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
REASONS = ("no CUDA", "no vLLM", "nothing was compiled")
"""Of what a CPU cannot show."""


@pytest.fixture
def gpu_plan(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_plan

    return gpu_plan


def records_of(out):
    return [json.loads(line) for line in (out / "gpu.jsonl").read_text().splitlines()]


def outcomes(out):
    return [(one.get("unit"), one["status"]) for one in records_of(out)]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_whole_plan_runs_on_a_cpu_and_a_second_call_repeats_nothing(tmp_path, gpu_plan):
    environment = os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    first, second = tmp_path / "first", tmp_path / "second"

    def call(*words):
        command = [str(BENCHMARKS / "gpu.sh"), "--smoke", "--seconds", "800", *map(str, words)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=850)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{(words[1] / 'gpu.md').read_text()}"
        return done.stdout

    call("--out", first)
    parts = [part.name for part in gpu_plan.PLAN]
    assert [one["part"] for one in records_of(first) if "unit" not in one] == parts
    for record in records_of(first):
        assert record["on"] == "cpu, smoke"
        assert record["status"] == "done" or record["reason"].startswith(REASONS), record
    page = (first / "gpu.md").read_text()
    assert all(f"## {part}: done" in page for part in parts)

    assert call("--out", second, "--resume", first).count(": done before\n") == len(parts)
    assert records_of(second) == records_of(first)
    assert sum(part.seconds for part in gpu_plan.PLAN) <= gpu_plan.SECONDS
    done = {(one["part"], one["unit"]): one for one in records_of(first) if one["status"] == "done" and "unit" in one}
    assert done["compile", "compiled"]["graphs"] > 0
    assert ("scoring", "packed, bf16 weights, compiled") in done


@pytest.mark.slow
def test_each_form_decides_anew_how_rows_are_packed_and_counts_no_memory(tmp_path, monkeypatch, gpu_plan):
    import gpu_training

    from rmcore.models import scoring

    asked = []
    decide = scoring.find_packing
    monkeypatch.setattr(scoring, "find_packing", lambda *args, **how: asked.append(1) or decide(*args, **how))
    monkeypatch.setattr("rmcore.training.memory.StepCounter", None)
    work = gpu_plan.Work(smoke=True, records=gpu_plan.Records(tmp_path / "gpu.jsonl", "cpu"))
    cell = gpu_training.cell_of(gpu_training.HALF, smoke=True)
    for form in ("autocast, keys and values repeated", "autocast"):
        before = len(asked)
        gpu_training.trained(work, cell, **gpu_training.LADDER[form])
        assert len(asked) > before
    assert len(work.built) == 1  # its weights are drawn once all the same


@pytest.mark.slow
def test_plain_layers_do_not_pass_for_compiled_ones(tmp_path, monkeypatch, gpu_plan):
    import gpu_training
    import torch
    from torch._dynamo.exc import FailOnRecompileLimitHit

    def failing(*_, **__):
        raise FailOnRecompileLimitHit("too many")

    monkeypatch.setattr(torch, "compile", lambda function, **_: failing)
    work = gpu_plan.Work(smoke=True, records=gpu_plan.Records(tmp_path / "gpu.jsonl", "cpu"))
    cell = gpu_training.cell_of(gpu_training.HALF, smoke=True)
    with pytest.raises(RuntimeError, match=r"not compiled, .*FailOnRecompileLimitHit: too many"):
        gpu_training.trained(work, cell, **gpu_training.LADDER["compiled"])


def test_a_measurement_that_fails_stops_no_other_and_is_tried_again_alone(tmp_path, monkeypatch, gpu_plan):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "some_part.py").write_text(
        f"""
from pathlib import Path

from gpu_plan import NotHereError

def bad():
    if not Path({str(tmp_path)!r}, "mended").exists():
        raise ValueError("3 of 4 are wrong")
    return {{}}

def absent():
    raise NotHereError("no such card")

def some(work):
    work.measure("bad", bad)
    work.measure("absent", absent)
    assert work.measure("good", lambda: {{"speed": 2.5}})["speed"] == 2.5
"""
    )
    work = gpu_plan.Work(smoke=False, records=gpu_plan.Records(tmp_path / "gpu.jsonl", "a card"))
    part = gpu_plan.Part("some", "some_part", 60)
    assert work.run(part, 60) == "failed"
    assert outcomes(tmp_path) == [("bad", "failed"), ("absent", "skipped"), ("good", "done"), (None, "failed")]
    page = gpu_plan.page(work.records, ["some"])
    assert "ValueError: 3 of 4 are wrong" in page
    assert "no such card" in page
    (tmp_path / "mended").touch()
    late = gpu_plan.Part("late", "some_part", 60)
    assert (work.run(part, 60), work.run(part, 60), work.run(late, 0)) == ("done", "done", "not begun")
    assert outcomes(tmp_path)[4:] == [("bad", "done"), (None, "done")]
    assert gpu_plan.Records(tmp_path / "gpu.jsonl", "another card").latest() == {}


def test_a_part_that_takes_too_long_is_stopped_and_the_next_one_runs(tmp_path, monkeypatch, gpu_plan):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "long_part.py").write_text(
        "import time\n\n"
        "def endless(work):\n    work.measure('one', dict)\n    work.measure('two', lambda: time.sleep(600))\n\n"
        "def following(work):\n    work.measure('one', dict)\n"
    )
    work = gpu_plan.Work(smoke=False, records=gpu_plan.Records(tmp_path / "gpu.jsonl", "a card"))
    started = time.monotonic()
    assert work.run(gpu_plan.Part("endless", "long_part", 60), 2.0) == "stopped"
    assert work.run(gpu_plan.Part("following", "long_part", 60), 60) == "done"
    assert time.monotonic() - started < 300
    assert outcomes(tmp_path)[-3:] == [(None, "stopped"), ("one", "done"), (None, "done")]
