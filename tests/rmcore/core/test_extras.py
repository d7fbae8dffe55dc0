"""What is missing is named with the command that adds it; an installation from a wheel is in tests/services."""

import shlex
from pathlib import Path

import pytest

from rmcore.core.errors import ConfigError
from rmcore.core.extras import require_extra


def test_a_clone_is_given_the_command_that_installs_it_with_the_extra():
    with pytest.raises(ConfigError, match=r"^GRPO needs no_such_module, which is not installed: pip") as refused:
        require_extra("no_such_module", "rl", "GRPO")
    *words, place = shlex.split(str(refused.value).partition(": ")[2])
    assert words == ["pip", "install", "-e"]
    assert (Path(place.removesuffix("[rl]")) / "pyproject.toml").is_file()
