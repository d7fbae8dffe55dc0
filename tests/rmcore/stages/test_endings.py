"""Both endings in the synthetic benchmark, small: ready and then better for certain, refused and then no better.

The policy is the synthetic benchmark's writer, and best-of-n carries the plan out; the texts of both are the same,
and the annotators of one name the longer answer, whatever it says. (GRPO against both: experiments/log/rlhf.md.) By
day tests/rmcore/readiness show on simulated rewards what is refused.
"""

import json

import pytest

import policy_chain
from experiments.presets import PRESETS
from rmcore.config.policy import PolicyConfig
from rmcore.core.store import Store

GOLD = PRESETS["rlhf"].data.gold.model_copy(update={"num_prompts": 1000})
HONEST = policy_chain.changed(
    PRESETS["rlhf"],
    device="cpu",
    data={"gold": GOLD, "eval_limit": 300},
    model={"name": "tiny-small"},
    train={"steps": 120, "eval_every": 60},
    readiness={"planned_optimizer": "best_of_n", "planned_kl": 2.0},
    policy=PolicyConfig(name="world", num_prompts=60, samples_per_prompt=32, fresh_prompts=160),
    rlhf=None,
)
FLAWED = policy_chain.changed(HONEST, data={"gold": GOLD.model_copy(update={"length_bias": 1.0})})


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return Store(tmp_path_factory.mktemp("store"))


def ending(store, config):
    """The verdict on samples with the checks that failed, and what serving best-of-n came to."""
    chain = policy_chain.Chain(store, config)
    judged = json.loads((chain.folder("readiness_v2") / "readiness.json").read_text())
    served = json.loads((chain.folder("confirmation") / "confirmation.json").read_text())
    return judged["verdict"], {check["name"] for check in judged["gate"] if not check["passed"]}, served


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_is_ready_gains(store):
    verdict, _, served = ending(store, HONEST)
    assert verdict["status"] == "ready", verdict["reasons"]
    assert served["verdict"]["status"] == "rose", served["verdict"]["headline"]


@pytest.mark.night
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_is_refused_for_its_flaw_gains_nothing_that_is_shown(store):
    verdict, failed, served = ending(store, FLAWED)
    assert verdict["status"] in ("not_ready", "unclear")
    assert failed & {"planned_gain", "worthwhile_gain"}
    assert served["verdict"]["status"] != "rose", served["verdict"]["headline"]
    assert served["gold"]["gain"]["value"] < ending(store, HONEST)[2]["gold"]["gain"]["ci_low"]
