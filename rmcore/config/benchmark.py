"""Settings of the measurement on public benchmarks."""

from rmcore.config.base import Settings


class BenchmarkConfig(Settings):
    """Public benchmarks, and sets of your own, that the trained model is measured on."""

    suites: tuple[str, ...] = ()
    """Which, as `rm-opt benchmark --suite` names them: judgebench, llmbar=FOLDER, mine.yaml, all."""
