"""What is missing is named with the command that adds it to this installation, wherever that came from."""

import json
import shlex
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from rmcore.core import extras
from rmcore.core.errors import ConfigError
from rmcore.core.extras import install_command, require_extra


@pytest.mark.parametrize(
    ("origin", "words"),
    [
        (None, ["rm-optimizer[rl]"]),
        ({"url": "file:///a%20b/rm", "dir_info": {"editable": True}}, ["-e", "/a b/rm[rl]"]),
        ({"url": "file:///a%20b/rm", "dir_info": {}}, ["rm-optimizer[rl] @ file:///a%20b/rm"]),
        ({"url": "file:///a/rm.whl", "archive_info": {}}, ["rm-optimizer[rl] @ file:///a/rm.whl"]),
        (
            {
                "url": "https://host/rm.git",
                "vcs_info": {"vcs": "git", "commit_id": "c0ffee", "requested_revision": "x"},
            },
            ["rm-optimizer[rl] @ git+https://host/rm.git@c0ffee"],
        ),
        (
            {"url": "https://host/a.git", "vcs_info": {"vcs": "git", "commit_id": "c0ffee"}, "subdirectory": "b/rm"},
            ["rm-optimizer[rl] @ git+https://host/a.git@c0ffee#subdirectory=b/rm"],
        ),
        (
            {"url": "https://host/a.tar.gz", "archive_info": {}, "subdirectory": "rm"},
            ["rm-optimizer[rl] @ https://host/a.tar.gz#subdirectory=rm"],
        ),
        ({"url": "file:///a", "dir_info": {"editable": True}, "subdirectory": "rm"}, ["-e", "/a/rm[rl]"]),
    ],
    ids=["index", "clone", "folder", "wheel", "commit", "commit of a folder", "archive of a folder", "part of a clone"],
)
def test_the_command_is_for_the_way_that_this_copy_was_installed(tmp_path, monkeypatch, origin, words):
    record = tmp_path / "rm_optimizer-9.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: rm-optimizer\nVersion: 9\n")
    if origin is not None:
        (record / "direct_url.json").write_text(json.dumps(origin))
    monkeypatch.syspath_prepend(tmp_path)
    assert shlex.split(install_command("rl")) == ["pip", "install", *words]
    if len(words) == 1:
        assert Requirement(words[0]).extras == {"rl"}
    with pytest.raises(ConfigError) as refused:
        require_extra("no_such_module", "rl", "GRPO")
    assert str(refused.value) == f"GRPO needs no_such_module, which is not installed: {install_command('rl')}"


def test_sources_that_are_not_installed_are_installed_where_they_are(monkeypatch):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(extras, "distribution", missing)
    *words, place = shlex.split(install_command("rl"))
    assert words == ["pip", "install", "-e"]
    assert (Path(place.removesuffix("[rl]")) / "pyproject.toml").is_file()
