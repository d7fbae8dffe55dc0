"""Who draws a training's samples: as the settings say, and where it pays."""

import sys

import pytest

from rmcore.config.rlhf import RlhfConfig
from rmcore.core.errors import ConfigError
from rmcore.policy.grpo.rlhf_requirements import require_rlhf
from rmcore.policy.grpo.servers import draws_by_vllm

SETTINGS = RlhfConfig()


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
        (SETTINGS, "cpu", 1.0, False),
        (SETTINGS, "cuda", 1.0, True),
        (SETTINGS, "cuda", 2.5, False),
        (of(SETTINGS, rollouts="vllm"), "cpu", 1.0, True),
        (of(SETTINGS, rollouts="generate"), "cuda", 1.0, False),
    ],
)
def test_auto_takes_vllm_where_a_step_is_faster_by_it(installed, settings, device, temperature, expected):
    assert draws_by_vllm(settings, temperature, device) is expected
    with pytest.raises(ConfigError, match=r"policy\.temperature=2\.5"):
        draws_by_vllm(of(SETTINGS, rollouts="vllm"), 2.5, "cpu")


def test_what_cannot_draw_is_refused_where_it_was_named_and_else_not_taken(absent):
    assert not draws_by_vllm(SETTINGS, 1.0, "cuda")
    named = of(SETTINGS, rollouts="vllm")
    with pytest.raises(ConfigError, match="no program"):
        draws_by_vllm(named, 1.0, "cpu")
    with pytest.raises(ConfigError, match="no program"):
        require_rlhf(named, None, None, is_gold=False)  # before anything is computed
