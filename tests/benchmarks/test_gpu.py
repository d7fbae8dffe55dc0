"""benchmarks/gpu.sh: the whole path on small shapes, and what becomes of parts that fail, hang or die."""

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
REASONS = ("no CUDA", "no vLLM", "no GPU here")
"""Of what a CPU cannot show."""


@pytest.fixture
def gpu_run(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_run

    monkeypatch.setattr(gpu_run, "LIBRARIES", ())
    monkeypatch.setattr(gpu_run, "ENDING_SECONDS", 0.5)
    monkeypatch.setattr(gpu_run.Run, "_ask_device", lambda self: None)
    return gpu_run


def records_of(out):
    return [json.loads(line) for line in (out / "gpu.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_whole_path_runs_on_a_cpu_and_a_second_call_repeats_nothing(tmp_path):
    environment = os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    environment.pop("RM_OPT_VLLM", None)
    command = [str(BENCHMARKS / "gpu.sh"), "--smoke", "--minutes", "20", "--out", str(tmp_path)]

    def call():
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800)
        shown = f"{done.stdout}\n{done.stderr}"
        assert done.returncode == 0, f"{shown}\n{(tmp_path / 'gpu.md').read_text()}"
        return shown, (tmp_path / "gpu.jsonl").read_text(), (tmp_path / "gpu.log").read_text()

    _, written, log = call()
    records = records_of(tmp_path)
    ends = {one["part"]: one for one in records if "unit" not in one}
    parts = ["machine", "tests", "exactness", "throughput", "scoring", "curvature", "profile", "sharding", "weights"]
    assert list(ends) == parts
    for record in records:
        assert record["on"] == "cpu, smoke"
        assert record["status"] == "done" or record["reason"].startswith(REASONS), record
    skipped = {one["part"] for one in ends.values() if one["status"] == "skipped"}
    assert skipped == {"tests", "weights"}
    page = (tmp_path / "gpu.md").read_text()
    assert all(f"| {part} |" in page for part in parts)
    assert "loss 3: " in page
    assert (tmp_path / "trace.json.gz").stat().st_size > 0
    assert len(list(tmp_path.iterdir())) == 4  # few enough files to be brought back

    shown, again, log_again = call()
    assert (again, log_again) == (written, log)
    assert shown.count(" before\n") == len(parts)


def write_part(folder, text):
    (folder / "some_part.py").write_text(textwrap.dedent(text))
    sys.modules.pop("some_part", None)


def seconds_to_start(gpu_run, folder, monkeypatch):
    """What a part takes that has nothing to do."""
    folder.mkdir()
    (folder / "idle_part.py").write_text("def run(work):\n    work.units([('nothing', 0, dict)])\n")
    monkeypatch.syspath_prepend(str(folder))
    begun = time.monotonic()
    run = gpu_run.Run(folder, False, begun + 120, [])
    assert run.part(gpu_run.Part("idle", "idle_part", 100.0, 1)) == "done"
    return time.monotonic() - begun


def run_parts(gpu_run, out, minutes=1.0, limit=20.0):
    run = gpu_run.Run(out, False, time.monotonic() + 60 * minutes, [])
    return run.part(gpu_run.Part("some", "some_part", limit, 1))


def units_of(out):
    return [(one.get("unit"), one["status"]) for one in records_of(out)]


@pytest.mark.slow
def test_a_unit_that_fails_stops_no_other_and_is_tried_again_alone(tmp_path, monkeypatch, gpu_run):
    monkeypatch.syspath_prepend(str(tmp_path))
    write_part(
        tmp_path,
        """
        from pathlib import Path

        def run(work):
            def bad():
                if not Path("mended").exists():
                    raise ValueError("3 of 4 are wrong")
                return {}
            work.units([("bad", 0, bad), ("good", 0, lambda: {"speed": 2.5})])
        """,
    )
    monkeypatch.chdir(tmp_path)
    assert run_parts(gpu_run, tmp_path) == "failed"
    assert units_of(tmp_path) == [("bad", "failed"), ("good", "done"), (None, "failed")]
    assert "ValueError: 3 of 4 are wrong" in (tmp_path / "gpu.md").read_text()
    Path("mended").touch()
    assert run_parts(gpu_run, tmp_path) == "done"
    assert units_of(tmp_path)[3:] == [("bad", "done"), (None, "done")]
    assert run_parts(gpu_run, tmp_path) == "done"
    assert len(units_of(tmp_path)) == 5


@pytest.mark.slow
def test_a_part_that_hangs_is_ended_with_all_it_started_and_what_hung_comes_last(tmp_path, monkeypatch, gpu_run):
    monkeypatch.syspath_prepend(str(tmp_path))
    write_part(
        tmp_path,
        f"""
        import subprocess
        from pathlib import Path

        def hang():
            child = subprocess.Popen(["sleep", "600"])
            Path({str(tmp_path)!r}, "pid").write_text(str(child.pid))
            child.wait()

        def run(work):
            work.units([("first", 0, lambda: {{}}), ("second", 0, hang), ("third", 0, lambda: {{}})])
        """,
    )
    limit = 2 + 5 * seconds_to_start(gpu_run, tmp_path / "idle", monkeypatch)  # the machine may be busy
    assert run_parts(gpu_run, tmp_path, limit=limit) == "stopped"
    assert units_of(tmp_path) == [("first", "done"), ("second", "stopped"), (None, "stopped")]
    pid = (tmp_path / "pid").read_text()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline, "what the part started still runs"
        time.sleep(0.05)
    assert run_parts(gpu_run, tmp_path, limit=limit) == "stopped"
    assert units_of(tmp_path)[3:] == [("third", "done"), ("second", "stopped"), (None, "stopped")]


def test_a_part_that_dies_or_lacks_something_says_so(tmp_path, monkeypatch, gpu_run):
    monkeypatch.syspath_prepend(str(tmp_path))
    write_part(tmp_path, "import os\ndef run(work):\n    work.units([('one', 0, lambda: os._exit(3))])\n")
    assert run_parts(gpu_run, tmp_path) == "failed"
    assert units_of(tmp_path) == [("one", "failed"), (None, "failed")]
    assert "status 3" in records_of(tmp_path)[-1]["reason"]
    write_part(tmp_path, "from gpu_work import NotHereError\ndef run(work):\n    raise NotHereError('no such card')\n")
    assert run_parts(gpu_run, tmp_path) == "skipped"
    assert records_of(tmp_path)[-1]["reason"] == "no such card"
    # What no time is left for leaves no record: the next call has it before it.
    other = tmp_path / "other"
    other.mkdir()
    assert run_parts(gpu_run, other, minutes=0) == "not begun"
    assert not (other / "gpu.jsonl").exists()


def test_what_is_missing_is_named_with_its_pin_and_a_folder_without_wheels_lacks_it(tmp_path, monkeypatch, gpu_run):
    import gpu_wheels

    assert gpu_wheels.missing() == []
    monkeypatch.setitem(gpu_wheels.ALWAYS, "pydantic", "999")
    assert gpu_wheels.missing("tests") == ["pydantic"]
    assert gpu_wheels.pinned(["pydantic"])[0].startswith("pydantic==2.")
    assert gpu_wheels.install(["pydantic"], tmp_path, tmp_path / "site") == ["pydantic"]
