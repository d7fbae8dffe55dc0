"""Extras of pyproject.toml: what an installation without them lacks is said where it is wanted, with how to add it."""

import importlib.util
import json
import shlex
from importlib.metadata import distribution
from pathlib import Path

from rmcore.core.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


def require_extra(module: str, extra: str, wanted_by: str) -> None:
    """Refuse where a module is not installed that an extra of this package brings.

    Raises:
        ConfigError: it is not; says how it is installed.
    """
    if importlib.util.find_spec(module) is None:
        how = ["-e", f"{ROOT}[{extra}]"]  # a clone
        if not (ROOT / "pyproject.toml").is_file():
            # Where a wheel came from, if not from an index, is noted next to it (PEP 610).
            origin = json.loads(distribution("rm-optimizer").read_text("direct_url.json") or "{}")
            control = f"{origin['vcs_info']['vcs']}+" if "vcs_info" in origin else ""
            how = [f"rm-optimizer[{extra}]" + (f" @ {control}{origin['url']}" if origin else "")]
        command = shlex.join(["pip", "install", *how])
        raise ConfigError(f"{wanted_by} needs {module}, which is not installed: {command}")
