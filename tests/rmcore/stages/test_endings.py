"""The two endings of RLHF in the gold world, small: ready and then better, refused and then worse.

Both start from one policy and see the same texts; the annotators of one name the longer answer in most pairs.
"""

import json

import pytest

import policy_chain
from experiments.presets import PRESETS
from rmcore.config.pipeline import RlhfConfig
from rmcore.core.store import Store

SMALL = policy_chain.changed(
    PRESETS["rlhf"],
    device="cpu",
    data={"gold": PRESETS["rlhf"].data.gold.model_copy(update={"num_prompts": 1400}), "eval_limit": 300},
    train={"steps": 150, "eval_every": 75},
    readiness={"planned_kl": 1.0},
    policy={"sft_examples": 4000, "sft_epochs": 2, "num_prompts": 40, "samples_per_prompt": 16, "gradient_prompts": 0},
    rlhf=RlhfConfig(
        steps=16, learning_rate=1e-4, rewards="local", measure_every=16, num_prompts=40, samples_per_prompt=6
    ),
)
FLAWED = SMALL.data.model_copy(update={"gold": SMALL.data.gold.model_copy(update={"length_bias": 0.9})})


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    return policy_chain.Chain(Store(tmp_path_factory.mktemp("store")), SMALL)


@pytest.fixture(scope="module")
def flawed(honest):
    """Of the same policy and its samples: only the labels differ."""
    same = {name: honest.ref(name) for name in ("policy", "samples")}
    return policy_chain.Chain(honest.store, policy_chain.changed(SMALL, data=FLAWED), same)


def ending(chain):
    """The verdict on samples, and the gold gain of the trained policy."""
    judged = json.loads((chain.folder("readiness_v2") / "readiness.json").read_text())
    trained = json.loads((chain.folder("grpo") / "rlhf.json").read_text())
    return judged, trained["curve"][-1]["gold"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_reward_model_that_is_ready_makes_the_policy_better(honest):
    judged, gold = ending(honest)
    assert judged["verdict"]["status"] == "ready", judged["verdict"]["reasons"]
    assert gold["ci_low"] > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_its_flawed_twin_is_refused_and_makes_the_policy_worse(flawed):
    judged, gold = ending(flawed)
    assert judged["verdict"]["status"] == "not_ready"
    assert {"planned_gain", "headroom"} & {check["name"] for check in judged["gate"] if not check["passed"]}
    assert gold["ci_high"] < 0
