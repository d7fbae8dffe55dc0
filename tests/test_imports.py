import json
import pkgutil
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import flows
import rmcore
from machine import PATIENCE_S
from rmcore.core.capabilities import NAMES, capabilities
from rmcore.core.errors import ConfigError
from rmcore.policy.grpo.rlhf_requirements import require_trl


def said_by(program, *words):
    """What a Python program prints, as JSON."""
    command = [sys.executable, "-P", "-c", program, *words]
    return json.loads(subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE_S).stdout)


STEPS = """
import importlib, json, sys
print(json.dumps([[importlib.import_module(name) and list(sys.modules) for name in step][-1]
                  for step in json.loads(sys.argv[1])]))
"""
"""Imports one module after the other; all that is imported after each step."""
CACHED_RUN = ["rmcore.stages.order", "rmcore.core.store", "rmcore.reporting.html.report"]
TRAINING = ["rmcore.training.loop", "rmcore.models.reward_model", "rmcore.models.lora", "rmcore.training.saving"]
ON_A_TRAINING_NODE = {
    *("torch", "transformers", "peft", "pydantic", "safetensors", "huggingface-hub"),
    *("numpy", "pandas", "pyarrow", "scipy", "psutil", "pyyaml", "jinja2", "nvidia-ml-py"),
}
"""Of the packages that an installation has. jinja2 and nvidia-ml-py are imported by torch."""


def hard_dependencies():
    return tomllib.loads(Path("pyproject.toml").read_text())["project"]["dependencies"]


@pytest.mark.slow
def test_front_door_cached_run_and_training_import_what_they_need():
    """In this order, because each imports what the one before did; lint-imports refuses orchestrators everywhere."""
    door, cached, training = map(set, said_by(STEPS, json.dumps([["rmcore"], CACHED_RUN, TRAINING])))
    assert "torch" not in door
    assert not {"torch", "matplotlib"} & cached
    by_module = packages_distributions()
    top = {name.partition(".")[0] for name in training}
    imported = {one.lower().replace("_", "-") for name in top for one in by_module.get(name, ())}
    assert {"torch", "transformers", "pydantic"} <= imported
    assert imported & {Requirement(one).name for one in hard_dependencies()} <= ON_A_TRAINING_NODE


def test_each_package_is_in_a_layer_or_is_a_capability():
    contracts = tomllib.loads(Path("pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (one["layers"] for one in contracts if one.get("containers") == ["rmcore"])
    named = {name.strip() for layer in layers for name in re.split("[|:]", layer)}
    assert {module.name for module in pkgutil.iter_modules(rmcore.__path__)} == named | {*NAMES}


def test_the_front_door_has_what_it_lists():
    assert len(rmcore.__all__) <= 15
    assert set(rmcore.__all__) <= set(dir(rmcore))
    assert {name for one in capabilities().values() for name in one.public} <= set(rmcore.__all__)
    exec("from rmcore import *", given := {})
    assert given.keys() >= set(rmcore.__all__)


HEAVY = {
    *("torch", "transformers", "prefect", "mlflow", "pandas", "pyarrow", "scipy", "matplotlib", "jinja2"),
    "sklearn",
}
CALLED = """
import contextlib, io, json, sys
from flows.cli import main
found = []
for words in sys.argv[1:]:
    sys.argv = ["rm-opt", *words.split()]
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            main()
        except SystemExit as ended:
            assert not ended.code
    found.append([words, list(sys.modules)])
print(json.dumps(found))
"""


@pytest.mark.slow
def test_a_command_imports_what_it_needs():
    own = (f"{name} --help" for one in capabilities().values() for name in one.commands)
    light = ("--help", "--version", "train --help", "run --help", *own)
    found = said_by(CALLED, *light)
    for words, imported in found:
        assert not HEAVY & set(imported), words
    first = found[0][1]
    assert not [name for name in first if name.startswith(("rmcore.config", "tasks", "experiments", "pydantic."))]


@pytest.mark.slow
def test_a_flow_pays_for_no_torch_before_a_stage_of_it_runs():
    names = [f"flows.{module.name}" for module in pkgutil.iter_modules(flows.__path__)]
    assert not {"torch", "transformers"} & set(said_by(STEPS, json.dumps([names]))[0])


def test_an_extra_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)  # which imports and finds nothing of that name
    with pytest.raises(ConfigError, match=r"GRPO needs trl, which is not installed: pip install .*\[rl\]'?$"):
        require_trl()


def test_an_installation_without_extras_asks_for_few_packages():
    assert len(hard_dependencies()) <= 26
