"""What a training against a reward model needs to be there, asked before anything runs. Imports no torch."""

import contextlib
import importlib.util

from rmcore.config.pipeline import PipelineConfig, RlhfConfig
from rmcore.core.errors import ConfigError
from rmcore.core.named_function import load_function
from rmcore.serving.vllm_process import find_vllm

JUDGE_SETTING = "policy.judge"
JUDGE_MEANING = "a function of (prompt, response) that returns a number"


def require_trl() -> None:
    """Refuse where TRL is not installed.

    Raises:
        ConfigError: it is not.
    """
    if importlib.util.find_spec("trl") is None:
        raise ConfigError("GRPO is done by TRL, which is not installed: pip install 'rm-optimizer[rl]'.")


def require_rlhf(config: PipelineConfig) -> RlhfConfig:
    """The training's settings, if everything that they name is there.

    Raises:
        ConfigError: the config has none, TRL or a named vLLM is missing, the judge cannot be imported, or nobody would
            label the pairs of a refresh.
    """
    settings = config.rlhf
    if settings is None:
        raise ConfigError("there is no training of a policy in this config; set rlhf.steps, or start from preset rlhf.")
    require_trl()
    if settings.rewards == "vllm":
        find_vllm()
    judge = None if config.policy is None else config.policy.judge
    if judge is not None:
        load_function(JUDGE_SETTING, judge, JUDGE_MEANING)
    if settings.refresh_every is not None and judge is None and config.data.source != "gold":
        raise ConfigError(
            "rlhf.refresh_every wants labels on new samples, and nobody gives them: only the gold world judges itself. "
            "Name a function of (prompt, response) in policy.judge, or leave refresh_every out."
        )
    return settings


def is_served(settings: RlhfConfig) -> bool:
    """Whether a vLLM reward server gives the rewards."""
    if settings.rewards == "auto" and settings.aggregate == "one":
        with contextlib.suppress(ConfigError):
            find_vllm()
            return True
    return settings.rewards == "vllm"
