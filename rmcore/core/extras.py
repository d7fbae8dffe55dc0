"""Extras of pyproject.toml: what an installation without them lacks is said where it is wanted."""

import importlib.util

from rmcore.core.errors import ConfigError


def require_extra(module: str, extra: str, wanted_by: str) -> None:
    """Refuse where a module is not installed that an extra of this package brings.

    Raises:
        ConfigError: it is not.
    """
    if importlib.util.find_spec(module) is None:
        raise ConfigError(f"{wanted_by} needs {module}, which is not installed: pip install 'rm-optimizer[{extra}]'.")
