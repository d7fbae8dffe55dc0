"""Parts of a config that some stages cannot do without; flows ask for them before anything runs. Imports no torch."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from rmcore.config.benchmark import BenchmarkConfig
from rmcore.config.landscape import LandscapeConfig
from rmcore.config.pipeline import PipelineConfig
from rmcore.config.policy import PolicyConfig
from rmcore.config.probe import ProbeConfig
from rmcore.config.rlhf import RlhfConfig
from rmcore.core.errors import ConfigError

Section = TypeVar("Section")


def _given(section: Section | None, refusal: str) -> Section:
    """Return a section of a config.

    Raises:
        ConfigError: the config does without it.
    """
    if section is None:
        raise ConfigError(refusal)
    return section


def required_benchmark(config: PipelineConfig) -> BenchmarkConfig:
    """Return the benchmarks, as `_given`."""
    named = config.benchmark if config.benchmark is not None and config.benchmark.suites else None
    return _given(named, "there is no benchmark in this config; set benchmark.suites, for example to [judgebench].")


def required_policy(config: PipelineConfig) -> PolicyConfig:
    """Return the policy's settings, as `_given`."""
    return _given(
        config.policy,
        "there is no policy in this config, so nothing would be sampled; start from preset policy, or set policy.name "
        "to sft, a folder or a hub name.",
    )


def required_probe(config: PipelineConfig) -> ProbeConfig:
    """Return the settings of the probes, as `_given`."""
    return _given(config.probe, "there are no probes in this config; set probe.pairs_per_prompt, or probe.rules.")


def required_rlhf(config: PipelineConfig) -> RlhfConfig:
    """Return the settings of the policy's training, as `_given`."""
    return _given(
        config.rlhf, "there is no training of a policy in this config; set rlhf.steps, or start from preset rlhf."
    )


def curvature_settings(config: PipelineConfig) -> LandscapeConfig:
    """Return the settings of the curvature; the usual ones where a study of it names none."""
    return config.landscape or LandscapeConfig()


REQUIRED: Mapping[str, Callable[[PipelineConfig], Any]] = {
    "benchmark": required_benchmark,
    "policy": required_policy,
    "probe": required_probe,
    "rlhf": required_rlhf,
}
"""By the section that a stage reads."""
