"""Settings of the measurement on public benchmarks."""

from typing import Annotated

from rmcore.config.base import Names, Settings


class BenchmarkConfig(Settings):
    """Public benchmarks, and sets of your own, that the trained model is measured on."""

    suites: Annotated[tuple[str, ...], Names("suites")] = ()
    """Which, as `rm-opt benchmark --suite` names them: judgebench, llmbar=FOLDER, mine.yaml, all."""
