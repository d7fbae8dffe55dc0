"""Stages that are forked: what their waiter hears, what they inherit, and whom they do not outlive."""

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from light_stages import probe_variables
from machine import wait_for
from rmcore.core.child_process import ForkedProcess, StageServer, import_ahead, terminate_forked
from rmcore.core.errors import INTERRUPTED
from rmcore.core.processes import runs
from rmcore.core.progress import PROGRESS_VARIABLE
from rmcore.stages.run import DELIBERATE_ERROR, ERROR_FILE

LONG = "open('began', 'w').close()\nimport time\ntime.sleep(10**6)"
STARTER = """
import os, sys
from pathlib import Path
from rmcore.core.child_process import ForkedProcess
process = ForkedProcess("probe", Path(sys.argv[1]), open(os.devnull, "w"), os.environ)
print(process.process.pid, flush=True)
process.wait()
"""


@pytest.fixture(scope="module")
def light(tmp_path_factory):
    return probe_variables(tmp_path_factory.mktemp("light"))


@pytest.fixture
def start(tmp_path, light, monkeypatch):
    """Starts a program of a few lines as a stage, in a folder of the test's own; its output goes to `log` there."""
    monkeypatch.chdir(tmp_path)

    def start(program, progress=(), environment=light, **variables):
        (tmp_path / "spec.py").write_text(program)
        with (tmp_path / "log").open("w") as log:
            return ForkedProcess("probe", tmp_path / "spec.py", log, environment | variables, progress)

    return start


@contextlib.contextmanager
def another_program(tmp_path, environment):
    """A program that has started a long stage and waits for it, and the process of that."""
    (tmp_path / "theirs.py").write_text(LONG)
    command = [sys.executable, "-c", STARTER, str(tmp_path / "theirs.py")]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as program:
        yield program, psutil.Process(int(program.stdout.readline()))


def server_of(process):
    return process.process.parent()


@pytest.mark.parametrize(
    ("program", "status", "said"),
    [
        ("print('done')", 0, "done"),
        (f"status = {DELIBERATE_ERROR}", DELIBERATE_ERROR, ""),
        ("raise SystemExit(7)", 7, ""),
        ("raise KeyError('no such stage')", 1, "KeyError: 'no such stage'"),
    ],
)
def test_who_waits_for_a_stage_hears_how_it_ended_and_its_log_what_it_said(start, tmp_path, program, status, said):
    process = start(program)
    assert process.wait() == process.wait() == status
    assert (tmp_path / "log").read_text().strip().endswith(said)  # the end is what a user is shown


def test_a_path_is_read_from_the_current_folder_and_not_from_the_servers(start, tmp_path, monkeypatch):
    assert start("open('first', 'x').close()").wait() == 0  # its server stays
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "inner")
    assert start("open('second', 'x').close()").wait() == 0
    assert (tmp_path / "first").is_file()
    assert (tmp_path / "inner" / "second").is_file()


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


def test_forks_of_a_process_share_the_server_that_it_started(start, light):
    import_ahead(light)
    here, (reading, writing) = server_of(start(LONG)), os.pipe()
    if (pid := os.fork()) == 0:
        status = 1
        try:
            process = start("")
            os.write(writing, str(server_of(process).pid).encode())
            status = process.wait()
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading) as told:
        assert int(told.read()) == here.pid
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_programs_share_a_server_that_is_kept_for_them_and_their_stages_end_with_them_alone(start, light, tmp_path):
    own = {"OMP_NUM_THREADS": "5"}  # what no server of these tests has been started with
    with StageServer(light | own) as kept:
        assert Path(kept.folder).stat().st_mode & 0o077 == 0
        mine = start(LONG, **own, **kept.variable)
        with another_program(tmp_path, light | own | kept.variable) as (program, theirs):
            assert theirs.parent().pid == server_of(mine).pid == kept.process.pid
            # Another variable that libraries read: a server of its own, as without this one.
            differs = start("", OMP_NUM_THREADS="3", **kept.variable)
            assert server_of(differs).pid != kept.process.pid
            assert differs.wait() == 0
            program.kill()
        wait_for(lambda: not runs(theirs))
        kept.process.kill()
        with pytest.raises(TimeoutError):
            mine.wait(0.5)
        mine.kill()
    alone = start("", **own, **kept.variable)  # the kept server is gone, and stages start without it
    assert alone.wait() == 0


@pytest.mark.parametrize("when", ["at once", "in its work"])
def test_all_stages_of_a_process_can_be_asked_to_end(start, tmp_path, when):
    process = start(LONG)
    if when == "in its work":
        wait_for((tmp_path / "began").is_file)
    server_of(process).terminate()  # as Prefect cancels a run: the process group, and so the server hears it, too
    terminate_forked()
    assert process.wait() == INTERRUPTED
    assert start("").wait() == 0


def test_a_stage_draws_on_the_terminal_that_it_is_given(start):
    ours, theirs = pty.openpty()
    drawing = f"import os\nshown = int(os.environ['{PROGRESS_VARIABLE}'])\nos.isatty(shown) and os.write(shown, b'bar')"
    process = start(drawing, progress=[theirs])
    os.close(theirs)
    assert process.wait() == 0
    assert os.read(ours, 64) == b"bar"
    os.close(ours)


def test_neither_a_stage_nor_its_server_outlives_a_killed_starter(light, tmp_path):
    with another_program(tmp_path, light) as (program, stage):
        server = stage.parent()
        [folder] = {Path(one.laddr).parent for one in server.net_connections("unix") if one.laddr}
        program.kill()
    wait_for(lambda: not runs(stage) and not runs(server) and not folder.exists())


def test_a_stage_has_its_libraries_and_takes_a_gpus_memory_in_segments_that_grow_unless_the_user_says_how(
    start, tmp_path
):
    """As torch reads it, at its first request for memory: after the import, which the server has done."""
    refused = {"stage": "prepare", "arguments": {"seed": 0, "data": {"source": "absent.jsonl"}}, "out": str(tmp_path)}
    (tmp_path / "refused.json").write_text(json.dumps(refused))
    program = """
import os, sys
assert "torch" in sys.modules and "peft" in sys.modules
os.environ.pop("PYTORCH_ALLOC_CONF", None)
os.environ |= {given}
from rmcore.stages.run import run_from_file
status = run_from_file("refused.json")
import torch
print(torch._C._accelerator_getAllocatorSettings())
"""
    heavy = probe_variables(tmp_path, light=False)
    for given in (None, "max_split_size_mb:64"):
        said = {} if given is None else {"PYTORCH_ALLOC_CONF": given}
        assert start(program.format(given=said), environment=heavy).wait() == DELIBERATE_ERROR
        assert (tmp_path / "log").read_text().split()[-1] == (given or "expandable_segments:True")
        assert "absent.jsonl" in json.loads((tmp_path / ERROR_FILE).read_text())["message"]
