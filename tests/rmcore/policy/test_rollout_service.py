"""Who draws a training's samples: as the settings say, and where it pays."""

import sys

import pytest

from rmcore.config.rlhf import RlhfConfig
from rmcore.core.errors import ConfigError
from rmcore.policy.grpo.rlhf_requirements import require_rlhf
from rmcore.policy.grpo.rollout_service import WORTH_A_START, draws_by_vllm

FEW = RlhfConfig(steps=10, prompts_per_step=2, group_size=4)
MANY = RlhfConfig(steps=WORTH_A_START // 16, num_seeds=2, prompts_per_step=2, group_size=5)


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setenv("RM_OPT_VLLM", sys.executable)


@pytest.fixture
def absent(monkeypatch):
    monkeypatch.setenv("RM_OPT_VLLM", "/nowhere/python")


def of(settings, **changes):
    return settings.model_copy(update=changes)


@pytest.mark.parametrize(
    ("settings", "device", "temperature", "expected"),
    [
        (FEW, "cpu", 1.0, False),
        (MANY, "cpu", 1.0, True),
        (FEW, "cuda", 1.0, True),
        (MANY, "cpu", 2.5, False),
        (of(FEW, rollouts="vllm"), "cpu", 1.0, True),
        (of(MANY, rollouts="generate"), "cuda", 1.0, False),
    ],
)
def test_auto_takes_vllm_where_it_makes_up_for_its_start(installed, settings, device, temperature, expected):
    assert draws_by_vllm(settings, temperature, device) is expected


def test_the_default_training_is_worth_a_start():
    assert RlhfConfig().steps * RlhfConfig().prompts_per_step * RlhfConfig().group_size >= WORTH_A_START


def test_what_cannot_draw_is_refused_where_it_was_named_and_else_not_taken(absent):
    assert not draws_by_vllm(MANY, 1.0, "cpu")
    named = of(MANY, rollouts="vllm")
    with pytest.raises(ConfigError, match="no program"):
        draws_by_vllm(named, 1.0, "cpu")
    with pytest.raises(ConfigError, match="no program"):
        require_rlhf(named, None, None)  # before anything is computed


def test_a_temperature_that_vllm_refuses_is_said(installed):
    with pytest.raises(ConfigError, match=r"policy\.temperature=2\.5"):
        draws_by_vllm(of(FEW, rollouts="vllm"), 2.5, "cpu")
