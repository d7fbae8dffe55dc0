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


HEAVY = {"torch", "transformers", "prefect", "mlflow", "pandas", "pyarrow", "scipy", "matplotlib", "jinja2"}
CALLED = """
import sys
from flows.cli import main
sys.argv[0] = "rm-opt"
try:
    main()
except SystemExit as ended:
    assert not ended.code
print(*sys.modules)
"""


@pytest.mark.parametrize(
    ("words", "needed"),
    [
        ("--help", set()),
        ("--version", set()),
        ("train --help", set()),
        ("score --help", set()),
        ("run --help", set()),
        ("info", {"torch"}),
    ],
)
def test_a_command_imports_what_it_needs(words, needed):
    done = subprocess.run(
        [sys.executable, "-P", "-c", CALLED, *words.split()], check=True, capture_output=True, timeout=120
    )
    imported = done.stdout.decode().splitlines()[-1].split()
    assert HEAVY & set(imported) == needed
    if words == "--help":
        assert not [
            name for name in imported if name.startswith(("rmcore.config", "tasks", "experiments", "pydantic."))
        ]


def test_a_cached_run_pays_for_no_torch_and_no_drawing():
    modules = "rmcore.stages.registry, rmcore.core.store, rmcore.reporting.html.html, rmcore.reporting.html.summary"
    program = f"import sys, {modules}; sys.exit(' '.join(sys.modules.keys() & {{'torch', 'matplotlib'}}) or 0)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_a_flow_pays_for_no_torch_before_a_stage_of_it_runs():
    modules = ", ".join(f"flows.{module.name}" for module in pkgutil.iter_modules(flows.__path__))
    program = f"import sys, {modules}; sys.exit(' '.join(sys.modules.keys() & {{'torch', 'transformers'}}) or 0)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
