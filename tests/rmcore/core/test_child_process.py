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
from rmcore.core import child_process as fork_server
from rmcore.core.child_process import ForkedProcess, StageServer, terminate_forked
from rmcore.core.processes import runs
from rmcore.stages.run import DELIBERATE_ERROR, ERROR_FILE, INTERRUPTED

LONG = {"data": {"gold": {"num_prompts": 200_000, "pairs_per_prompt": 64}}}


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


def server_of(process):
    return psutil.Process(process._pid).parent()


def test_a_stage_that_ends_well_and_one_that_refuses(start, tmp_path):
    assert start().wait() == 0
    assert (tmp_path / "out" / "metrics.jsonl").is_file()
    process = start({"data": {"source": str(tmp_path / "absent.jsonl")}})
    assert process.wait() == DELIBERATE_ERROR
    assert "absent.jsonl" in json.loads((tmp_path / ERROR_FILE).read_text())["message"]
    assert process.wait() == DELIBERATE_ERROR


def test_a_path_is_read_from_the_current_folder_and_not_from_the_servers(start, tmp_path, monkeypatch):
    assert start(out="first").wait() == 0  # its server stays
    (tmp_path / "pairs.csv").write_text("prompt,chosen,rejected\n" + "".join(f"ask {n},good,bad\n" for n in range(40)))
    monkeypatch.chdir(tmp_path)
    assert start({"data": {"source": "pairs.csv"}}).wait() == 0


def test_a_crash_leaves_its_traceback_in_the_log(start, tmp_path):
    assert start(stage="no such stage").wait() == 1
    assert "KeyError: 'no such stage'" in (tmp_path / "log").read_text()


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


def test_forks_of_a_process_share_the_server_that_it_started(start, tmp_path):
    fork_server._server(os.environ)
    here = server_of(start(LONG))
    reading, writing = os.pipe()
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


CLIENT = """
import json, os, sys
from pathlib import Path
from rmcore.core.child_process import ForkedProcess
with open(os.devnull, "w") as log:
    process = ForkedProcess("rmcore.stages.run", Path(sys.argv[1]), log, os.environ)
print(process._pid, flush=True)
sys.exit(process.wait())
"""


@pytest.mark.slow
def test_programs_share_a_server_that_is_kept_for_them_and_their_stages_end_with_either(start, tmp_path):
    environment = os.environ | {"OMP_NUM_THREADS": "5"}  # what no server of these tests has been started with
    with StageServer(environment) as kept:
        assert Path(kept.variable[fork_server.SERVER_VARIABLE]).parent.stat().st_mode & 0o077 == 0
        mine = start(LONG, OMP_NUM_THREADS="5", **kept.variable)
        assert server_of(mine).pid == kept._process.pid
        spec = json.loads((tmp_path / "spec-out.json").read_text()) | {"out": str(tmp_path / "theirs")}
        (tmp_path / "theirs.json").write_text(json.dumps(spec))
        command = [sys.executable, "-c", CLIENT, str(tmp_path / "theirs.json")]
        other = subprocess.Popen(command, env=environment | kept.variable, stdout=subprocess.PIPE, text=True)
        theirs = psutil.Process(int(other.stdout.readline()))
        assert theirs.parent().pid == kept._process.pid
        # Another variable that libraries read: a server of its own, as without this one.
        differs = start(out="differs", OMP_NUM_THREADS="3", **kept.variable)
        assert server_of(differs).pid != kept._process.pid
        assert differs.wait() == 0
        other.kill()
        other.communicate()
        wait_for(lambda: not runs(theirs))
        with pytest.raises(TimeoutError):
            mine.wait(0.01)
        stage = psutil.Process(mine._pid)
        kept._process.kill()
        assert mine.wait() == -signal.SIGKILL  # with the server
        wait_for(lambda: not runs(stage))
    assert not Path(kept.variable[fork_server.SERVER_VARIABLE]).exists()
    alone = start(out="alone", OMP_NUM_THREADS="5", **kept.variable)  # it is gone: nobody needs it
    assert alone.wait() == 0


@pytest.mark.parametrize("is_group", [False, True], ids=["they alone", "their process group"])
def test_all_stages_of_a_process_can_be_asked_to_end(start, tmp_path, is_group):
    process = start(LONG)
    while not (tmp_path / "out").is_dir():  # it has begun, so it has its handler of signals
        with pytest.raises(TimeoutError):
            process.wait(0.05)
    if is_group:  # as Prefect cancels a run: the server hears it, too
        server_of(process).terminate()
    terminate_forked()
    assert process.wait() == INTERRUPTED


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


STARTER = """
import os, sys
from pathlib import Path
from rmcore.core.child_process import ForkedProcess
process = ForkedProcess("rmcore.stages.run", Path(sys.argv[1]), open(sys.argv[2], "w"), os.environ)
print(process._pid, flush=True)
process.wait()
"""


def test_a_stage_does_not_outlive_a_killed_starter(tmp_path):
    spec = {"stage": "prepare", "arguments": {"seed": 0} | LONG, "out": str(tmp_path / "out")}
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    command = [sys.executable, "-c", STARTER, str(tmp_path / "spec.json"), str(tmp_path / "log")]
    starter = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(fork_server.__file__).parents[2])
    stage = psutil.Process(int(starter.stdout.readline()))
    server = stage.parent()
    starter.kill()
    starter.communicate()
    wait_for(lambda: not runs(stage) and not runs(server))


@pytest.mark.parametrize("given", [None, "max_split_size_mb:64"])
def test_a_stage_takes_a_gpus_memory_in_segments_that_grow_unless_the_user_says_how(tmp_path, given):
    """As torch reads it, at its first request for memory: after the import, which the server has done."""
    (tmp_path / "spec.json").write_text(
        json.dumps({"stage": "prepare", "arguments": {"seed": 0, "data": {}}, "out": str(tmp_path / "out")})
    )
    code = (
        "import sys, torch\nfrom rmcore.stages.run import run_from_file\n"
        "assert run_from_file(sys.argv[1]) == 0\nprint(torch._C._accelerator_getAllocatorSettings())"
    )
    inherited = {name: value for name, value in os.environ.items() if name != "PYTORCH_ALLOC_CONF"}
    environment = inherited if given is None else inherited | {"PYTORCH_ALLOC_CONF": given}
    command = [sys.executable, "-c", code, str(tmp_path / "spec.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert done.stdout.split()[-1] == (given or "expandable_segments:True")
