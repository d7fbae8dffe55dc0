"""Extras of pyproject.toml: what an installation without them lacks is said where it is wanted, with how to add it."""

import importlib.util
import shlex
from pathlib import Path

from rmcore.core.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


def require_extra(module: str, extra: str, wanted_by: str) -> None:
    """Refuse where a module is not installed that an extra of this package brings.

    Raises:
        ConfigError: it is not; says how it is installed.
    """
    if importlib.util.find_spec(module) is None:
        how = f"install rm-optimizer once more from where it came, with its extra [{extra}]"
        if (ROOT / "pyproject.toml").is_file():  # a clone
            how = shlex.join(["pip", "install", "-e", f"{ROOT}[{extra}]"])
        raise ConfigError(f"{wanted_by} needs {module}, which is not installed: {how}")
