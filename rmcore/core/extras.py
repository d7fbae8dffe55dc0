"""Extras of pyproject.toml: what an installation without them lacks is said where it is wanted, with how to add it."""

import importlib.util
import json
import shlex
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from rmcore.core.errors import ConfigError

DISTRIBUTION = "rm-optimizer"


def require_extra(module: str, extra: str, wanted_by: str) -> None:
    """Refuse where a module is not installed that an extra of this package brings.

    Raises:
        ConfigError: it is not; names the command that installs it.
    """
    if importlib.util.find_spec(module) is None:
        raise ConfigError(f"{wanted_by} needs {module}, which is not installed: {install_command(extra)}")


def install_command(extra: str) -> str:
    """Return the command that adds an extra to this installation, from where this copy was installed.

    Its place is that of `direct_url.json` (PEP 610): a clone that is edited, a file, a folder or a commit, or a
    subdirectory of one; an installation without that file came from an index. Where nothing is installed, Python has
    found the sources by its path, and their folder is installed as a clone that is edited.
    """
    try:
        installed = distribution(DISTRIBUTION)
    except PackageNotFoundError:
        return _editable(Path(__file__).parents[2], extra)
    origin = json.loads(installed.read_text("direct_url.json") or "{}")
    named, url, inside = f"{DISTRIBUTION}[{extra}]", origin.get("url"), origin.get("subdirectory", "")
    if origin.get("dir_info", {}).get("editable"):
        return _editable(Path(url2pathname(urlsplit(url).path), inside), extra)
    if version_control := origin.get("vcs_info"):
        url = f"{version_control['vcs']}+{url}@{version_control['commit_id']}"
    place = f"{url}#subdirectory={inside}" if inside else url
    return shlex.join(["pip", "install", named if url is None else f"{named} @ {place}"])


def _editable(folder: Path, extra: str) -> str:
    return shlex.join(["pip", "install", "-e", f"{folder}[{extra}]"])
