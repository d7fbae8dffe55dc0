import pkgutil
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

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
def test_the_front_door_is_opened_without_torch_and_has_what_it_lists():
    program = "import rmcore, sys; assert 'torch' not in sys.modules; [getattr(rmcore, one) for one in rmcore.__all__]"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
    assert len(rmcore.__all__) <= 15
    assert set(rmcore.__all__) <= set(dir(rmcore))


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_cached_run_pays_for_no_torch_and_no_drawing():
    modules = "rmcore.stages.registry, rmcore.core.store, rmcore.reporting.html.html, rmcore.reporting.html.summary"
    program = f"import sys, {modules}; sys.exit(' '.join(sys.modules.keys() & {{'torch', 'matplotlib'}}) or 0)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.mark.slow
def test_a_flow_pays_for_no_torch_before_a_stage_of_it_runs():
    modules = ", ".join(f"flows.{module.name}" for module in pkgutil.iter_modules(flows.__path__))
    program = f"import sys, {modules}; sys.exit(' '.join(sys.modules.keys() & {{'torch', 'transformers'}}) or 0)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


WITHOUT = """
import sys
sys.modules[sys.argv.pop(1)] = None  # which imports and finds nothing of that name
from flows.cli import main
sys.argv[0] = "rm-opt"
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "words", "extra"),
    [
        ("optuna", "tune --preset smoke --trials 1", "tune"),
        ("sklearn", "explain --prompt a --response b --checkpoint c", "explain"),
    ],
)
def test_a_command_whose_extra_is_not_installed_names_it(module, words, extra):
    done = subprocess.run(
        [sys.executable, "-P", "-c", WITHOUT, module, *words.split()], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert f"pip install 'rm-optimizer[{extra}]'" in done.stderr.replace("\n", " ")


def hard_dependencies():
    return tomllib.loads(Path("pyproject.toml").read_text())["project"]["dependencies"]


ON_A_TRAINING_NODE = {
    *("torch", "transformers", "peft", "pydantic", "safetensors", "huggingface-hub"),
    *("numpy", "pandas", "pyarrow", "scipy", "psutil", "pyyaml", "jinja2"),
}
"""Of the packages that an installation has. accelerate, which transformers imports, and jinja2, which torch imports."""


@pytest.mark.slow
def test_a_training_node_imports_torch_transformers_peft_pydantic_and_little_else():
    modules = "rmcore.training.loop, rmcore.models.reward_model, rmcore.models.lora, rmcore.training.checkpoint"
    program = f"import sys, {modules}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], check=True, capture_output=True, text=True, timeout=120
    )
    by_module = packages_distributions()
    imported = {one.lower().replace("_", "-") for name in done.stdout.split() for one in by_module.get(name, ())}
    ours = {Requirement(one).name for one in hard_dependencies()}
    assert {"torch", "transformers", "pydantic"} <= imported
    assert imported & ours <= ON_A_TRAINING_NODE


def test_an_installation_without_extras_asks_for_few_packages():
    assert len(hard_dependencies()) <= 26
