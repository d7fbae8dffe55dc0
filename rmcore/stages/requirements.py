"""Parts of a config that some stages cannot do without; flows ask for them before anything runs. Imports no torch."""

from collections.abc import Callable, Mapping
from typing import Any

from rmcore.config.benchmark import BenchmarkConfig
from rmcore.config.explain import ExplainConfig
from rmcore.config.landscape import LandscapeConfig
from rmcore.config.pipeline import PipelineConfig
from rmcore.config.policy import PolicyConfig
from rmcore.config.probe import ProbeConfig
from rmcore.config.rlhf import RlhfConfig
from rmcore.core.errors import ConfigError


def required_benchmark(config: PipelineConfig) -> BenchmarkConfig:
    """The benchmarks.

    Raises:
        ConfigError: the config names none.
    """
    if config.benchmark is None or not config.benchmark.suites:
        raise ConfigError("there is no benchmark in this config; set benchmark.suites, for example to [judgebench].")
    return config.benchmark


def required_policy(config: PipelineConfig) -> PolicyConfig:
    """The policy's settings.

    Raises:
        ConfigError: the config names no policy.
    """
    if config.policy is None:
        raise ConfigError(
            "there is no policy in this config, so nothing would be sampled; start from preset policy, or set "
            "policy.name to sft, a folder or a hub name."
        )
    return config.policy


def required_probe(config: PipelineConfig) -> ProbeConfig:
    """The settings of the probes.

    Raises:
        ConfigError: the config has none.
    """
    if config.probe is None:
        raise ConfigError("there are no probes in this config; set probe.pairs_per_prompt, or probe.rules.")
    return config.probe


def required_explain(config: PipelineConfig) -> ExplainConfig:
    """The settings of the explanations.

    Raises:
        ConfigError: the config has none.
    """
    if config.explain is None:
        raise ConfigError("there is nothing to explain in this config; set explain.mistakes, for example to 10.")
    return config.explain


def required_rlhf(config: PipelineConfig) -> RlhfConfig:
    """The settings of the policy's training.

    Raises:
        ConfigError: the config has none.
    """
    if config.rlhf is None:
        raise ConfigError("there is no training of a policy in this config; set rlhf.steps, or start from preset rlhf.")
    return config.rlhf


def curvature_settings(config: PipelineConfig) -> LandscapeConfig:
    """The settings of the curvature; the usual ones where a study of it names none."""
    return config.landscape or LandscapeConfig()


REQUIRED: Mapping[str, Callable[[PipelineConfig], Any]] = {
    "benchmark": required_benchmark,
    "policy": required_policy,
    "probe": required_probe,
    "explain": required_explain,
    "rlhf": required_rlhf,
}
"""By the section that a stage reads."""
