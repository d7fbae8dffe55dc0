"""What a bare machine with a GPU lacks of the packages that benchmarks/gpu.sh needs, and bringing it there as wheels.

Such a machine has torch, transformers and their company, and reaches no package index. Here, where one is reached,

    benchmarks/gpu.sh --fetch-wheels

puts the pinned versions of what is usually absent into `.wheels` (11 MB, ignored by git). Carried to the machine, they
are installed into a temporary folder, those alone that are missing there: nothing of the machine's own is changed.
Standard library only: this runs before anything is installed.
"""

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLATFORMS = ("2_28", "2_27", "2_24", "2_17", "2_5", "2014", "1")
"""Of manylinux on x86-64, for Python 3.12: pip takes no older one by itself."""
OF_THE_MACHINE = ("torch", "transformers", "numpy", "pandas", "pyarrow", "scipy", "peft", "accelerate", "safetensors")
"""Too large to be carried, or bound to the machine's driver: where one of them is missing nothing can run."""
WANTED = {
    **{"pydantic": "2.14", "pydantic-core": "", "annotated-types": "", "typing-inspection": ""},
    **{"typing-extensions": "4.16", "psutil": "6", "pyyaml": "", "jinja2": ""},
    **{"trl": "1.16", "datasets": "4.4", "dill": "", "multiprocess": "", "xxhash": ""},
    **{"liger-kernel": "0.8", "torchao": "0.18"},
}
"""Distribution and least version, "" for any: of rmcore as it is used here, of TRL, of kernels to compare."""


def missing() -> list[str]:
    """Distributions that are not here, or too old."""
    return [name for name in OF_THE_MACHINE if not _is_here(name, "")] + [
        name for name, least in WANTED.items() if not _is_here(name, least)
    ]


def _is_here(name: str, least: str) -> bool:
    try:
        found = version(name)
    except PackageNotFoundError:
        return False
    return _numbers(found) >= _numbers(least)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text.partition("+")[0])[:3]]


def pinned(names: Iterable[str]) -> list[str]:
    """`name==version` as constraints.txt has it; the name alone where it has none."""
    pins = dict(re.findall(r"^([a-z0-9.-]+)==([^ ;\\]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    return [f"{name}=={pins[name]}" if name in pins else name for name in names]


def fetch(folder: Path) -> int:
    """Download the wheels for Python 3.12 on x86-64 Linux into `folder`; pip's own index is asked. pip's status."""
    platforms = [part for number in PLATFORMS for part in ("--platform", _platform(number))]
    options = ["--no-deps", "--only-binary", ":all:", "--implementation", "cp", "--python-version", "3.12"]
    target = ["--dest", str(folder), *platforms]
    command = [sys.executable, "-m", "pip", "download", *options, *target, *pinned(WANTED)]
    return subprocess.run(command, check=False).returncode


def _platform(number: str) -> str:
    return f"manylinux{number}_x86_64" if "_" not in number else f"manylinux_{number}_x86_64"


def install(names: Sequence[str], folder: Path, site: Path) -> list[str]:
    """Install what `folder` has of `names` into `site`, for this process and those it starts; returns what it lacks."""
    carried = [name for name in names if name not in OF_THE_MACHINE and _wheels(folder, name)]
    if carried and not _pip_install(carried, folder, site):
        carried = [name for name in carried if _pip_install([name], folder, site)]  # one bad wheel stops them all
    if carried:
        importlib.invalidate_caches()
        sys.path.insert(0, str(site))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH", "")]))
    return [name for name in names if name not in carried]


def _wheels(folder: Path, name: str) -> list[Path]:
    return list(folder.glob(f"{re.sub(r'[-_.]+', '_', name)}-*.whl"))


def _pip_install(names: Sequence[str], folder: Path, site: Path) -> bool:
    options = ["--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--quiet", "--root-user-action=ignore"]
    where = ["--upgrade", "--find-links", str(folder), "--target", str(site)]
    command = [sys.executable, "-m", "pip", "install", *options, *where, *pinned(names)]
    return subprocess.run(command, check=False).returncode == 0
