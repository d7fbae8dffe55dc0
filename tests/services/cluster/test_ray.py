"""Experiments on a Ray cluster: each cell once, and nothing lost with a machine of it."""

import json
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from used_homes import begin

pytestmark = [
    pytest.mark.services,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed (rm-optimizer[cluster])"),
]
COMMAND = [sys.executable, "-P", "-c", "from flows.cli import main; main()"]
PROGRAM = Path(__file__).parents[2] / "support" / "ray_machines.py"
LOGIN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "of-the-tests-" * 4, "RAY_worker_niceness": "0"}


class RayMachines:
    """The cluster, in a process of its own."""

    def __init__(self, folder, databases):
        self.folder = folder
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_", "RAY_"))
        }
        self.inherited = kept | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        self.process = subprocess.Popen(
            [sys.executable, PROGRAM, folder],
            env=self.inherited | LOGIN, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.address = self.process.stdout.readline().strip()
        (folder / "shared").mkdir()
        self.environment = self.inherited | LOGIN | {
            "RAY_ADDRESS": self.address,
            "RM_OPT_HOME": str(begin(folder / "head", databases)),
            "RM_OPT_SHARED": (folder / "shared").as_uri(),
        }  # fmt: skip

    def begin(self, *words):
        """A command that runs beside the test."""
        return subprocess.Popen(
            [*COMMAND, *map(str, words)],
            env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def end_the_second(self):
        print("end", file=self.process.stdin, flush=True)
        assert self.process.stdout.readline() == "ended\n"

    def close(self):
        self.process.communicate(timeout=120)


@pytest.fixture(scope="module")
def machines(tmp_path_factory, databases):
    started = RayMachines(tmp_path_factory.mktemp("ray"), databases)
    yield started
    started.close()


@pytest.mark.timeout(900)
def test_a_matrix_on_two_raylets_of_which_one_dies_is_whole(machines, declare, tmp_path):
    summary = tmp_path / "summary.json"
    command = machines.begin("experiment", declare("on_ray", seeds=2), "--runner", "ray", "--summary", summary)
    second = machines.folder / "two"
    while not list(second.glob("store/.wip/train-*/metrics.jsonl")):  # in the midst of a training
        assert command.poll() is None, command.communicate()[0]
        time.sleep(0.02)
    machines.end_the_second()
    said, _ = command.communicate(timeout=800)
    assert command.returncode == 0, said
    outcome = json.loads(summary.read_text())
    assert outcome["failed"] == []
    assert len(outcome["computed"]) == 4
    for stage in ("train", "evaluate"):
        assert len(list((machines.folder / "shared").glob(f"manifests/{stage}/*.json"))) == 4
    assert "4 cells on the Ray cluster at 127.0.0.2" in said


def test_a_store_that_is_missing_is_said_before_anything_is_begun(machines, declare, tmp_path):
    environment = machines.environment | {"RM_OPT_SHARED": "", "RM_OPT_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [*COMMAND, "experiment", declare("nobody", seeds=1), "--runner", "ray"],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 2
    assert "RM_OPT_SHARED names no shared store" in done.stderr
    assert "Traceback" not in done.stderr
