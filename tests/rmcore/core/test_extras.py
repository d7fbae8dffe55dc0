"""What is missing is named with what adds it to this installation."""

import shlex
from pathlib import Path

import pytest

from rmcore.core import extras
from rmcore.core.errors import ConfigError
from rmcore.core.extras import require_extra


def test_a_clone_is_given_the_command_and_another_installation_the_extra(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"^GRPO needs no_such_module, which is not installed: pip") as refused:
        require_extra("no_such_module", "rl", "GRPO")
    *words, place = shlex.split(str(refused.value).partition(": ")[2])
    assert words == ["pip", "install", "-e"]
    assert (Path(place.removesuffix("[rl]")) / "pyproject.toml").is_file()
    monkeypatch.setattr(extras, "ROOT", tmp_path)
    with pytest.raises(ConfigError, match=r"with its extra \[rl\]"):
        require_extra("no_such_module", "rl", "GRPO")
