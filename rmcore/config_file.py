"""Settings and experiments that stand in a YAML file."""

from pathlib import Path
from typing import Any

import yaml

from rmcore.errors import ConfigError


def read_mapping(file: Path, advice: str) -> dict[str, Any]:
    """The mapping in a YAML file; `advice` says what to write where it holds something else.

    Raises:
        ConfigError: it cannot be read, or holds no YAML mapping.
    """
    try:
        loaded = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid YAML: {str(error).splitlines()[0]}; fix that line.") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"{file} holds a {type(loaded).__name__}; {advice}.")
    return loaded
