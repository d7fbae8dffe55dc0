"""The supervisor ends everything below it however its starter ends: real processes, real signals."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from machine import PATIENCE_S, wait_for

ROOT = Path(__file__).resolve().parents[3]
SERVER = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
                          "print('up', flush=True); time.sleep(600)"], stdout=subprocess.PIPE, start_new_session=True)
child.stdout.readline()
open(sys.argv[1] + ".tmp", "w").write(f"{os.getpid()} {child.pid} {os.environ.get('PYTHONPATH')}")
os.rename(sys.argv[1] + ".tmp", sys.argv[1])
time.sleep(600)
"""
STARTER = """
import os, subprocess, sys, time
reading, writing = os.pipe()
supervisor = subprocess.Popen([sys.executable, "-m", "rmcore.serving.process_supervisor", str(reading),
                           sys.executable, "-c", sys.argv[1], sys.argv[2]], pass_fds=(reading,), start_new_session=True)
os.close(reading)
print(supervisor.pid, flush=True)
supervisor.wait()
"""


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def family(tmp_path):
    """A starter, its supervisor, a server that ignores SIGTERM, and a grandchild in its own session that does too."""
    place = tmp_path / "pids"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, SERVER, place], stdout=subprocess.PIPE, text=True, env=environment
    )
    supervisor = int(starter.stdout.readline())
    wait_for(place.exists)
    server, grandchild, path = place.read_text().split()
    assert path == "None"  # the path of this environment is not the server's
    yield starter, supervisor, int(server), int(grandchild)
    starter.kill()
    starter.wait()
    starter.stdout.close()


@pytest.mark.slow
def test_nothing_is_left_of_a_server_whose_starter_was_killed(family):
    starter, *others = family
    assert all(map(runs, others))
    starter.send_signal(signal.SIGKILL)
    starter.wait()
    wait_for(lambda: not any(map(runs, others)))


def test_nothing_is_left_where_the_server_itself_dies(family):
    _, supervisor, server, grandchild = family
    os.kill(server, signal.SIGKILL)
    wait_for(lambda: not runs(supervisor) and not runs(grandchild))


def test_ctrl_c_in_the_terminal_is_not_for_the_supervisor(family):
    starter, supervisor, server, _ = family
    os.kill(supervisor, signal.SIGINT)
    os.kill(supervisor, signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        starter.wait(timeout=0.5)
    assert runs(supervisor)
    assert runs(server)


def test_the_status_of_the_server_is_the_supervisors(tmp_path):
    reading, writing = os.pipe()
    for command, status in (("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137)):
        done = subprocess.run(
            [sys.executable, "-m", "rmcore.serving.process_supervisor", str(reading), sys.executable, "-c", command],
            pass_fds=(reading,), env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=PATIENCE_S,
        )  # fmt: skip
        assert done.returncode == status
    os.close(reading)
    os.close(writing)
