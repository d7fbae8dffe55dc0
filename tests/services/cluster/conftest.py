"""A cluster on one machine: PostgreSQL, the servers of a head home on it, a shared folder, and workers with homes."""

import json
import os
import signal
import subprocess
import sys

import httpx
import pytest

from machine import PATIENCE_S, free_ports, wait_for
from pixels.sitecustomize import FOLDER as PIXELS
from postgres import Postgres
from rmcore.core.processes import marked, terminate
from tasks.passwords import basic_authorization, password

COMMAND = [sys.executable, "-P", "-c", "from flows.cli import main; main()"]


def named_host(name):
    """Words before a command that give it a host name of its own; none where that is not allowed."""
    words = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', name]
    return [] if subprocess.run([*words, "true"], capture_output=True, check=False).returncode else words


class Machine:
    """A worker on a machine of its own: a host name, a home, and a process with all its children."""

    def __init__(self, cluster, name):
        self.cluster, self.name = cluster, name
        self.home, self.log = cluster.folder / name, cluster.folder / f"{name}.log"
        self.environment = cluster.inherited | {"RM_OPT_HOME": str(self.home)}
        words = ["worker", "--server", cluster.ui, "--password-file", str(cluster.password_file), "--name", name]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*named_host(name), *COMMAND, *words],
                env=self.environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def said(self):
        return self.log.read_text()

    def kill(self):
        """End everything of it at once, as when its power is cut."""
        mine = marked("RM_OPT_HOME", str(self.home))
        for process in mine:
            process.suspend()
        for process in mine:
            process.kill()
        self.process.wait()

    def end(self):
        """Ask it to end, as before a spot machine is taken away."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(timeout=PATIENCE_S)

    def finished(self, stage):
        """How many artifacts of a stage it has computed."""
        return sum(f"- {stage:<10} done" in line for line in self.said().splitlines())


class Cluster:
    """The head and what belongs to it."""

    def __init__(self, folder, postgres):
        self.folder, self.postgres, self.home = folder, postgres, folder / "head"
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
        self.inherited = kept | {"OMP_NUM_THREADS": "1", "RM_OPT_DEVICE_SLOTS": "1", "COLUMNS": "200"}
        self.inherited["PYTHONPATH"] = PIXELS
        self.environment = self.inherited | postgres.environment
        self.environment |= {"RM_OPT_HOME": str(self.home), "RM_OPT_SHARED": (folder / "shared").as_uri()}
        (folder / "shared").mkdir()
        ports = dict(zip(("prefect", "mlflow"), free_ports(2), strict=True))
        self.ui, self.mlflow = (f"http://127.0.0.1:{ports[name]}" for name in ("prefect", "mlflow"))
        self.api = f"{self.ui}/api"
        flags = [word for name, port in ports.items() for word in (f"--{name}-port", port)]
        self.printed = self.rm_opt("up", "--database", postgres.address, *flags).stdout
        self.password_file = self.home / "services" / "password"
        self.password = password(self.home)
        self.http = httpx.Client(timeout=PATIENCE_S, headers=basic_authorization(self.password))
        self.machines = []
        self.hosts_differ = bool(named_host("another"))

    def rm_opt(self, *words, check=True, environment=None):
        command, environment = [*COMMAND, *map(str, words)], environment or self.environment
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    def begin(self, *words):
        """A command that runs beside the test."""
        return subprocess.Popen(
            [*COMMAND, *map(str, words)],
            env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip

    def worker(self, name):
        machine = Machine(self, name)
        self.machines.append(machine)
        return machine

    def ask(self, path, body):
        return self.http.post(f"{self.api}{path}", json=body).raise_for_status().json()

    def cells(self, **conditions):
        """Flow runs of cells, by their names."""
        found = self.ask("/flow_runs/filter", {"flow_runs": {"tags": {"all_": ["rm-opt-cell"]}} | conditions})
        return sorted(found, key=lambda run: run["name"])

    def wait_for(self, condition):
        return wait_for(condition, lambda: "\n".join(one.said()[-3000:] for one in self.machines))

    def close(self):
        for machine in self.machines:
            if machine.process.poll() is None:
                machine.kill()
        self.rm_opt("down", check=False)


@pytest.fixture(scope="package")
def cluster(tmp_path_factory):
    postgres = Postgres()
    folder = tmp_path_factory.mktemp("cluster")
    try:
        started = Cluster(folder, postgres)
        yield started
        started.close()
    finally:
        terminate(marked("RM_OPT_HOME", str(folder / "head")))
        postgres.close()


@pytest.fixture
def declare(tmp_path, tiny_folder):
    """Writes a declaration of two arms of a small model and gives its file."""

    def write(name, **train):
        declared = {
            "name": name,
            "title": "Two rates",
            "question": "Which of two learning rates is better?",
            "base": {
                "data": {"gold": {"num_prompts": 60, "pairs_per_prompt": 2}},
                "model": {"name": str(tiny_folder), "max_seq_len": 128},
                "train": {"lr": 1e-3, "pairs_per_step": 2, "steps": 4, "eval_every": 2, "log_every": 2} | train,
                "evaluate": {"num_resamples": 100},
            },
            "factors": [{"name": "rate", "levels": {"low": {"train.lr": 1e-4}, "high": {}}}],
            "control": "low",
            "seeds": [0],
            "metrics": ["eval/test_pairwise_accuracy", "eval/test_loss"],
            "hypotheses": [
                {"name": "H1", "claim": "High is better.", "metric": "eval/test_loss", "comparison": "difference",
                 "arm": "high", "direction": "below", "threshold": 0.0},
            ],
            "budget_minutes": 60,
        }  # fmt: skip
        file = tmp_path / f"{name}.yaml"
        file.write_text(json.dumps(declared))  # JSON is YAML
        return file

    return write
