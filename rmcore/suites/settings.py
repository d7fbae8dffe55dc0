"""Settings of the measurement on public benchmarks."""

from importlib import import_module
from typing import Annotated

from rmcore.config.base import Names, Settings
from rmcore.core.manifests import make_key


def _suites(names: tuple[str, ...]) -> str:
    sets = import_module("rmcore.suites.sets")  # here: it imports readers of data, and most runs name no benchmark
    return make_key(sets.source_digests(names))


class BenchmarkConfig(Settings):
    """Public benchmarks, and sets of your own, that the model is measured on."""

    suites: Annotated[tuple[str, ...], Names(_suites)] = ()
    """Which, as `rm-opt benchmark --suite` names them: judgebench, llmbar=FOLDER, mine.yaml, all."""
