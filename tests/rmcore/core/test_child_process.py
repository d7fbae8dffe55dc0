"""Stages that are forked: what their waiter hears, what they inherit, and whom they do not outlive."""

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from machine import PATIENCE_S, wait_for
from rmcore.core import child_process
from rmcore.core.child_process import ForkedProcess, StageServer, import_ahead, terminate_forked
from rmcore.core.errors import INTERRUPTED
from rmcore.core.processes import runs
from rmcore.stages.run import DELIBERATE_ERROR, ERROR_FILE

LONG = {"data": {"gold": {"num_prompts": 200_000, "pairs_per_prompt": 64}}}
STARTER = """
import os, sys
from pathlib import Path
from rmcore.core.child_process import ForkedProcess
process = ForkedProcess("rmcore.stages.run", Path(sys.argv[1]), open(os.devnull, "w"), os.environ)
print(process.process.pid, flush=True)
process.wait()
"""


@pytest.fixture
def start(tmp_path):
    """Starts a stage; its output goes to `tmp_path / "log"`."""

    def start(config=None, stage="prepare", progress=(), out="out", **variables):
        spec = {"stage": stage, "arguments": {"seed": 0, "data": {}} | (config or {}), "out": str(tmp_path / out)}
        place = tmp_path / f"spec-{out}.json"
        place.write_text(json.dumps(spec))
        with (tmp_path / "log").open("w") as log:
            return ForkedProcess("rmcore.stages.run", place, log, os.environ | variables, progress)

    return start


@contextlib.contextmanager
def another_program(tmp_path, environment):
    """A program that has started a long stage and waits for it, and the process of that."""
    spec = {"stage": "prepare", "arguments": {"seed": 0} | LONG, "out": str(tmp_path / "theirs")}
    (tmp_path / "theirs.json").write_text(json.dumps(spec))
    command = [sys.executable, "-c", STARTER, str(tmp_path / "theirs.json")]
    folder = Path(child_process.__file__).parents[2]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, cwd=folder) as program:
        yield program, psutil.Process(int(program.stdout.readline()))


def server_of(process):
    return process.process.parent()


def test_a_stage_that_ends_well_one_that_refuses_and_one_that_crashes(start, tmp_path):
    assert start().wait() == 0
    assert (tmp_path / "out" / "metrics.jsonl").is_file()
    process = start({"data": {"source": str(tmp_path / "absent.jsonl")}})
    assert process.wait() == process.wait() == DELIBERATE_ERROR
    assert "absent.jsonl" in json.loads((tmp_path / ERROR_FILE).read_text())["message"]
    assert start(stage="no such stage").wait() == 1
    assert "KeyError: 'no such stage'" in (tmp_path / "log").read_text()


def test_a_path_is_read_from_the_current_folder_and_not_from_the_servers(start, tmp_path, monkeypatch):
    assert start(out="first").wait() == 0  # its server stays
    (tmp_path / "pairs.csv").write_text("prompt,chosen,rejected\n" + "".join(f"ask {n},good,bad\n" for n in range(40)))
    monkeypatch.chdir(tmp_path)
    assert start({"data": {"source": "pairs.csv"}}).wait() == 0


def test_stages_share_a_server_unless_a_library_would_have_read_another_variable(start):
    first, second = start(LONG), start(LONG, RM_OPT_ANYTHING="1", TORCHINDUCTOR_CACHE_DIR="x")
    other = start(LONG, OMP_NUM_THREADS="3")
    servers = [server_of(one) for one in (first, second, other)]
    assert servers[0] == servers[1] != servers[2]
    assert servers[2].environ()["OMP_NUM_THREADS"] == "3"
    for process in (first, second, other):
        with pytest.raises(TimeoutError):
            process.wait(0.01)
        process.kill()
        assert process.wait() == -signal.SIGKILL
        process.kill()


def test_forks_of_a_process_share_the_server_that_it_started(start):
    import_ahead(os.environ)
    here, (reading, writing) = server_of(start(LONG)), os.pipe()
    if (pid := os.fork()) == 0:
        status = 1
        try:
            process = start()
            os.write(writing, str(server_of(process).pid).encode())
            status = process.wait()
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading) as told:
        assert int(told.read()) == here.pid
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.slow
def test_programs_share_a_server_that_is_kept_for_them_and_their_stages_end_with_them_alone(start, tmp_path):
    own = {"OMP_NUM_THREADS": "5"}  # what no server of these tests has been started with
    with StageServer(os.environ | own) as kept:
        assert Path(kept.folder).stat().st_mode & 0o077 == 0
        mine = start(LONG, **own, **kept.variable)
        with another_program(tmp_path, os.environ | own | kept.variable) as (program, theirs):
            assert theirs.parent().pid == server_of(mine).pid == kept.process.pid
            # Another variable that libraries read: a server of its own, as without this one.
            differs = start(out="differs", OMP_NUM_THREADS="3", **kept.variable)
            assert server_of(differs).pid != kept.process.pid
            assert differs.wait() == 0
            program.kill()
        wait_for(lambda: not runs(theirs))
        kept.process.kill()
        with pytest.raises(TimeoutError):
            mine.wait(0.5)
        mine.kill()
    alone = start(out="alone", **own, **kept.variable)  # it is gone: nobody needs it
    assert alone.wait() == 0


@pytest.mark.parametrize("when", ["at once", "in its work"])
def test_all_stages_of_a_process_can_be_asked_to_end(start, tmp_path, when):
    process = start(LONG)
    if when == "in its work":
        wait_for((tmp_path / "out").is_dir)
    server_of(process).terminate()  # as Prefect cancels a run: the process group, and so the server hears it, too
    terminate_forked()
    assert process.wait() == INTERRUPTED
    assert start(out="next").wait() == 0


def test_a_stage_draws_on_the_terminal_that_it_is_given(start):
    ours, theirs = pty.openpty()
    drawn = []

    def watch():  # a terminal that nobody reads holds 4 KB, and whoever draws more waits
        with contextlib.suppress(OSError):  # the last who could draw has closed it
            while part := os.read(ours, 65536):
                drawn.append(part)

    watcher = threading.Thread(target=watch)
    watcher.start()
    process = start(progress=[theirs])
    os.close(theirs)
    assert process.wait() == 0
    watcher.join(PATIENCE_S)
    assert b"prepare" in b"".join(drawn)
    os.close(ours)


def test_neither_a_stage_nor_its_server_outlives_a_killed_starter(tmp_path):
    with another_program(tmp_path, os.environ) as (program, stage):
        server = stage.parent()
        [folder] = {Path(one.laddr).parent for one in server.net_connections("unix") if one.laddr}
        program.kill()
    wait_for(lambda: not runs(stage) and not runs(server) and not folder.exists())


@pytest.mark.parametrize("given", [None, "max_split_size_mb:64"])
def test_a_stage_takes_a_gpus_memory_in_segments_that_grow_unless_the_user_says_how(tmp_path, given):
    """As torch reads it, at its first request for memory: after the import, which the server has done."""
    spec = {"stage": "prepare", "arguments": {"seed": 0, "data": {}}, "out": str(tmp_path / "out")}
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    code = (
        "import sys, torch\nfrom rmcore.stages.run import run_from_file\n"
        "assert run_from_file(sys.argv[1]) == 0\nprint(torch._C._accelerator_getAllocatorSettings())"
    )
    inherited = {name: value for name, value in os.environ.items() if name != "PYTORCH_ALLOC_CONF"}
    environment = inherited if given is None else inherited | {"PYTORCH_ALLOC_CONF": given}
    command = [sys.executable, "-c", code, str(tmp_path / "spec.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert done.stdout.split()[-1] == (given or "expandable_segments:True")
