import pkgutil
import subprocess
import sys

import pytest

import flows
import rmcore

PROGRAM = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
loaded = {"prefect", "mlflow", "vllm", "flows", "tasks", "experiments"} & sys.modules.keys()
sys.exit(f"rmcore loads {sorted(loaded)}" if loaded else 0)
"""


@pytest.mark.slow
def test_every_rmcore_module_imports_without_an_orchestrator():
    names = [module.name for module in pkgutil.walk_packages(rmcore.__path__, "rmcore.")]
    assert len(names) > 50
    subprocess.run([sys.executable, "-c", PROGRAM, *names], check=True, timeout=120)


@pytest.mark.slow
def test_the_command_line_begins_without_what_few_commands_need():
    heavy = "torch transformers matplotlib jinja2 prefect mlflow"
    program = f"import sys, flows.cli; sys.exit(' '.join(sys.modules.keys() & set('{heavy}'.split())) or 0)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_a_cached_run_pays_for_no_torch_and_no_drawing():
    modules = "rmcore.stages.registry, rmcore.core.store, rmcore.reporting.html.html, rmcore.reporting.html.summary"
    program = f"import sys, {modules}; sys.exit(' '.join(sys.modules.keys() & {{'torch', 'matplotlib'}}) or 0)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_a_flow_pays_for_no_torch_before_a_stage_of_it_runs():
    modules = ", ".join(f"flows.{module.name}" for module in pkgutil.iter_modules(flows.__path__))
    program = f"import sys, {modules}; sys.exit(' '.join(sys.modules.keys() & {{'torch', 'transformers'}}) or 0)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
