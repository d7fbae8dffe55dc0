"""benchmarks/gpu.sh: the whole plan on small shapes, and what becomes of parts that fail, hang or die."""

import importlib
import json
import os
import subprocess
import sys
import textwrap
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
    return [(one.get("unit"), one["status"]) for one in records_of(out) if one["status"] != "begun"]


COMPILING = {"compile", "profile", "trl"}
"""Parts that take most of the plan's minutes: compilations, and the imports of TRL."""


@pytest.mark.slow
def test_every_part_that_compiles_nothing_runs_on_a_cpu(tmp_path, monkeypatch, gpu_plan):
    import torch

    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    work = gpu_plan.Work(smoke=True, records=gpu_plan.Records(tmp_path / "gpu.jsonl", "cpu"))
    for part in gpu_plan.PLAN:
        if part.name not in COMPILING:
            work.part = part.name
            getattr(importlib.import_module(part.module), part.name)(work)
    records = records_of(tmp_path)
    assert {one["part"] for one in records} == {part.name for part in gpu_plan.PLAN} - COMPILING
    for record in records:
        assert record["status"] in ("begun", "done") or record["reason"].startswith(REASONS), record
    assert ("packed, bf16 weights, compiled", "done") in outcomes(tmp_path)


@pytest.mark.night
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
        assert record["status"] in ("begun", "done") or record["reason"].startswith(REASONS), record
    page = (first / "gpu.md").read_text()
    assert all(f"## {part}: done" in page for part in parts)
    assert "loss 3: " in page
    assert (first / "trace.json.gz").stat().st_size > 0

    assert call("--out", second, "--resume", first).count(": done before\n") == len(parts)
    assert records_of(second) == records_of(first)
    assert sum(part.seconds for part in gpu_plan.PLAN) <= gpu_plan.SECONDS
    done = {(one["part"], one["unit"]): one for one in records_of(first) if one["status"] == "done" and "unit" in one}
    assert done["compile", "compiled"]["graphs"] > 0
    assert {"compiled", "bf16 copies of the weights"} == {unit for part, unit in done if part == "profile"}
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


def test_what_the_compiler_fused_is_no_copy_by_its_name(gpu_plan):
    import gpu_profile

    assert gpu_profile.class_of("triton_poi_fused__to_copy_add_mul_3") == "element-wise"
    assert gpu_profile.class_of("triton_per_fused__to_copy_mean_rsqrt_1") == "norms and other reductions"
    assert gpu_profile.class_of("aten::_to_copy") == "copies and fills"


def run_part(gpu_plan, folder, text, seconds=60.0):
    """Run one part, written as `text`, in a worker of its own; its status."""
    (folder / "some_part.py").write_text(textwrap.dedent(text))
    run = gpu_plan.Run(folder, time.monotonic() + 120, smoke=False)
    try:
        return run.part(gpu_plan.Part("some", "some_part", seconds))
    finally:
        run.end_worker()


@pytest.mark.slow
def test_a_measurement_that_fails_stops_no_other_and_is_tried_again_alone(tmp_path, monkeypatch, gpu_plan):
    monkeypatch.syspath_prepend(str(tmp_path))
    text = f"""
        from pathlib import Path

        from gpu_plan import NotHereError

        def some(work):
            def bad():
                if not Path({str(tmp_path)!r}, "mended").exists():
                    raise ValueError("3 of 4 are wrong")
                return {{}}
            def absent():
                raise NotHereError("no such card")
            work.measure("bad", bad)
            work.measure("absent", absent)
            assert work.measure("good", lambda: {{"speed": 2.5}})["speed"] == 2.5
        """
    assert run_part(gpu_plan, tmp_path, text) == "failed"
    assert outcomes(tmp_path) == [("bad", "failed"), ("absent", "skipped"), ("good", "done"), (None, "failed")]
    page = gpu_plan.page(gpu_plan.Records(tmp_path / "gpu.jsonl", gpu_plan.card()), ["some"])
    assert "ValueError: 3 of 4 are wrong" in page
    assert "no such card" in page
    (tmp_path / "mended").touch()
    assert run_part(gpu_plan, tmp_path, text) == "done"
    assert outcomes(tmp_path)[4:] == [("bad", "done"), (None, "done")]
    assert run_part(gpu_plan, tmp_path, text) == "done"
    assert len(outcomes(tmp_path)) == 6
    other_card = gpu_plan.Records(tmp_path / "gpu.jsonl", "another card")
    assert other_card.latest() == {}


def test_a_part_that_hangs_is_ended_with_all_it_started(tmp_path, monkeypatch, gpu_plan):
    monkeypatch.syspath_prepend(str(tmp_path))
    text = f"""
        import subprocess
        from pathlib import Path

        def hang():
            child = subprocess.Popen(["sleep", "600"])
            Path({str(tmp_path)!r}, "pid").write_text(str(child.pid))
            child.wait()

        def some(work):
            work.measure("first", dict)
            work.measure("second", hang)
        """
    # The worker hangs well within these seconds, unless the machine is very busy: then it is given more.
    seconds = 5.0
    while run_part(gpu_plan, tmp_path, text, seconds) == "stopped" and not (tmp_path / "pid").exists():
        seconds *= 2
    assert outcomes(tmp_path)[-3:] == [("first", "done"), ("second", "stopped"), (None, "stopped")]
    pid = (tmp_path / "pid").read_text()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline, "what the part started still runs"
        time.sleep(0.05)


@pytest.mark.slow
def test_a_part_that_dies_says_so_and_the_next_one_gets_a_new_worker(tmp_path, monkeypatch, gpu_plan):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "next_part.py").write_text("def following(work):\n    work.measure('one', dict)\n")
    (tmp_path / "some_part.py").write_text("import os\ndef some(work):\n    work.measure('one', lambda: os._exit(3))\n")
    run = gpu_plan.Run(tmp_path, time.monotonic() + 120, smoke=False)
    assert run.part(gpu_plan.Part("some", "some_part", 60)) == "failed"
    assert outcomes(tmp_path) == [("one", "failed"), (None, "failed")]
    assert "status 3" in records_of(tmp_path)[-1]["reason"]
    assert run.part(gpu_plan.Part("following", "next_part", 60)) == "done"
    # What no time is left for leaves no record: the next call has it before it.
    run.deadline = time.monotonic()
    assert run.part(gpu_plan.Part("late", "next_part", 60)) == "not begun"
    run.end_worker()
    assert outcomes(tmp_path)[2:] == [("one", "done"), (None, "done")]


def test_what_is_missing_is_named_with_its_pin_and_a_folder_without_wheels_lacks_it(tmp_path, monkeypatch, gpu_plan):
    import gpu_wheels

    before = gpu_wheels.missing()
    assert not set(before) - {"liger-kernel", "torchao"}
    monkeypatch.setitem(gpu_wheels.WANTED, "pydantic", "999")
    assert gpu_wheels.missing() == ["pydantic", *before]
    assert gpu_wheels.pinned(["pydantic"])[0].startswith("pydantic==2.")
    assert gpu_wheels.install(["pydantic"], tmp_path, tmp_path / "site") == ["pydantic"]
