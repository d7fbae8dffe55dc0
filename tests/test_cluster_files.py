"""The files of docs/cluster: they can be read, and the commands in them exist with their options."""

import os
import subprocess
from pathlib import Path

import pytest
import typer
import yaml

from flows.cli import app
from machine import PATIENCE_S

FOLDER = Path(__file__).parents[1] / "docs" / "cluster"
ROOT = typer.main.get_command(app)


def check(words):
    """That `rm-opt` with these words is a command with these options."""
    command = ROOT.commands[words[0]]
    known = {flag for one in command.params for flag in one.opts}
    assert {word for word in words[1:] if word.startswith("--")} <= known, words


def test_the_compose_file_starts_a_head_and_workers_that_find_it():
    compose = yaml.safe_load((FOLDER / "compose.yaml").read_text())
    services = compose["services"]
    for name in ("head", "worker"):
        words = services[name]["command"].split()
        check(words)
        assert services[name]["environment"]["RM_OPT_SHARED"].startswith("s3://")
        assert services[name]["secrets"] == ["password"]
        assert set(services[name]["depends_on"]) <= set(services)
    assert f"--server http://{services['head']['hostname']}:4200" in services["worker"]["command"]
    assert f"--host {services['head']['hostname']}" in services["head"]["command"]
    assert f"@database/{services['database']['environment']['POSTGRES_DB']}" in services["head"]["command"]
    used = {volume.partition(":")[0] for one in services.values() for volume in one.get("volumes", ())}
    assert used == set(compose["volumes"])
    assert all(port.startswith("127.0.0.1:") for one in services.values() for port in one.get("ports", ()))


def test_no_password_stands_in_a_file():
    for file in FOLDER.iterdir():
        for line in file.read_text().splitlines():
            if "PASSWORD:" in line or "SECRET_ACCESS_KEY:" in line:
                assert "${" in line, f"{file.name}: {line}"


def test_the_kubernetes_workers_are_told_what_they_need():
    deployment = yaml.safe_load((FOLDER / "kubernetes.yaml").read_text())
    pod = deployment["spec"]["template"]["spec"]
    [worker] = pod["containers"]
    check(worker["args"])
    assert {"RM_OPT_PASSWORD_FILE", "RM_OPT_SHARED"} <= {one["name"] for one in worker["env"]}
    assert {mount["name"] for mount in worker["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert deployment["spec"]["selector"]["matchLabels"] == deployment["spec"]["template"]["metadata"]["labels"]


def test_the_slurm_script_runs_a_worker_in_a_home_of_its_own(tmp_path):
    program = tmp_path / "srun"
    program.write_text('#!/bin/sh\necho "$RM_OPT_HOME" "$@"\n')
    program.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TMPDIR": str(tmp_path), "SLURM_JOB_ID": "7"}
    environment |= {"SERVER": "http://h:4200", "RM_OPT_PASSWORD_FILE": "p", "RM_OPT_SHARED": "file:///s"}
    done = subprocess.run(
        ["bash", FOLDER / "worker.slurm"], env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    home, program_run, *words = done.stdout.split()
    assert home == f"{tmp_path}/rm-opt-7"
    assert program_run.endswith("rm-opt")
    check(words)


@pytest.mark.parametrize("missing", ["SERVER", "RM_OPT_PASSWORD_FILE", "RM_OPT_SHARED"])
def test_the_slurm_script_refuses_what_it_was_not_told(missing, tmp_path):
    given = {"SERVER": "http://h:4200", "RM_OPT_PASSWORD_FILE": "p", "RM_OPT_SHARED": "file:///s", "SLURM_JOB_ID": "1"}
    environment = {"PATH": os.environ["PATH"], "TMPDIR": str(tmp_path)} | given
    del environment[missing]
    done = subprocess.run(
        ["bash", FOLDER / "worker.slurm"], env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode != 0
    assert missing in done.stderr


def test_the_image_is_made_by_the_makefile_and_runs_as_nobody_special():
    lines = (FOLDER / "Dockerfile").read_text().splitlines()
    assert "RUN make install" in lines
    assert lines.index("USER rm") < lines.index("RUN make install")
