"""A judge that likes length and a reward model that knows length: no verdict takes one for a proof of the other.

The true gain of choosing by length is 0: the judge names the longer response on a share of the pairs, people do not.
"""

import json
import sys

import numpy as np
import pytest

from rmcore.config.evaluate import ReadinessConfig
from rmcore.config.judging import JudgingConfig
from rmcore.data.pair import PreferencePair
from rmcore.judging.audit import audit
from rmcore.policy.judge import HookJudge, audited, judge_identity
from rmcore.policy.overoptimization import overoptimization
from rmcore.readiness.components import JudgedPools, gains_by_length, on_policy_parts
from rmcore.readiness.readiness_v2 import judge_v2

NUM_RESAMPLES, KL, SAMPLES = 200, 1.5, 17


def scored(quality, length, taste):
    """What a judge sees in a response: its quality, and its length as far as it likes that."""
    return quality + taste * np.log(length / 300)


def pairs_of_people(rng, num):
    """Pairs of prompts of their own: people prefer the better response, now and then not; its length is no matter."""
    quality, length = rng.normal(size=(num, 2)), (300 * np.exp(0.5 * rng.normal(size=(num, 2)))).astype(int)
    first = quality[:, 0] - quality[:, 1] + 0.5 * rng.normal(size=num) > 0
    for number in range(num):
        texts = [f"{q:+.4f} ".ljust(n, "x") for q, n in zip(quality[number], length[number], strict=True)]
        yield PreferencePair(f"prompt {number}", *(texts if first[number] else texts[::-1]))


@pytest.fixture
def audit_with(tmp_path, monkeypatch):
    """The audit of a judge with a taste for length, as a verdict takes it: its name and how it is named."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "length_judge.py").write_text("def judge(prompt, response): return 0.0")
    monkeypatch.delitem(sys.modules, "length_judge", raising=False)

    def made(taste, pairs):
        judge = HookJudge("it", lambda _, text: float(scored(float(text[:7]), len(text), taste)))
        record = audit(judge, pairs, num_resamples=NUM_RESAMPLES)
        record["asked"] = judge_identity("length_judge:judge", JudgingConfig())
        (tmp_path / "audit.json").write_text(json.dumps(record))
        return record, ("length_judge:judge", JudgingConfig(audit=str(tmp_path / "audit.json")))

    return made


def verdict(rng, taste, knows, num_prompts=60):
    """The verdict on a reward model of quality and length, and what of it is length; as the stages make them."""
    quality, noise = rng.normal(size=(2, num_prompts, SAMPLES))
    length = 300 * np.exp(0.5 * rng.normal(size=quality.shape))
    rewards = list(knows * (quality + noise) + (1 - knows) * np.log(length))
    pools = JudgedPools(rewards, list(scored(quality, length, taste)), list(length))
    settings = {"num_resamples": NUM_RESAMPLES, "seed": 0}
    plan = overoptimization(pools.rewards, pools.judged, planned_kl=KL, **settings).plan
    parts = {name: value.to_dict() for name, value in on_policy_parts(pools, **settings).items()}
    parts |= {"planned_gain": plan.gain.to_dict(), "planned_fall": plan.fall.to_dict()}
    by_length = gains_by_length(pools, method="best_of_n", planned_kl=KL, **settings)
    told = judge_v2(parts, ReadinessConfig(planned_kl=KL), "it", num_telling=plan.num_telling, reached=plan.reached)
    return told["verdict"], {name: value.to_dict() for name, value in by_length.items()}


@pytest.mark.slow
@pytest.mark.parametrize("taste", [0.8, 2.5])
def test_a_model_of_length_alone_is_not_ready_by_a_judge_that_likes_length(taste, audit_with):
    """Length biases of 0.25 and 0.58; without a look at length 97 to 100 of 100 evaluations say ready."""
    rng = np.random.default_rng(0)
    _, asked = audit_with(taste, list(pairs_of_people(rng, 300)))
    for _ in range(15):
        found, by_length = verdict(rng, taste, knows=0.0)
        assert found["status"] == "ready"  # by the judge's word alone
        told = audited(found, "it", *asked, by_length=by_length)
        assert told["status"] == "unclear"
        assert sum("with length taken out" in reason and "longest" in reason for reason in told["reasons"]) == 1


@pytest.mark.slow
def test_a_model_that_knows_more_than_length_stays_ready_by_a_judge_that_likes_it_little(audit_with):
    rng = np.random.default_rng(1)
    record, asked = audit_with(0.2, list(pairs_of_people(rng, 800)))
    assert record["verdict"] == {"may_decide": True, "reasons": []}
    for _ in range(10):
        found, by_length = verdict(rng, 0.2, knows=0.7)
        assert audited(found, "it", *asked, by_length=by_length)["status"] == found["status"] == "ready"


@pytest.mark.parametrize(("taste", "may"), [(0.0, True), (-2.5, False), (2.5, False)])
def test_a_judge_that_is_moved_by_length_either_way_does_not_decide(taste, may, audit_with):
    record, _ = audit_with(taste, list(pairs_of_people(np.random.default_rng(2), 600)))
    assert record["verdict"]["may_decide"] == may
    assert may or any("length" in reason for reason in record["verdict"]["reasons"])
