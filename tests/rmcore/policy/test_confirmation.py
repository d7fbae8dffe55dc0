"""Serving best-of-n on fresh prompts: intervals that hold whenever one stops, and an end where it is decided."""

import re
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from rmcore.config.policy import PolicyConfig
from rmcore.core.errors import ConfigError, DataError
from rmcore.evaluation.uncertainty import unseen_share
from rmcore.policy.confirmation import (
    ENOUGH_TO_RISE,
    LEVEL,
    LOOKS,
    MOST_SAMPLES,
    ServedGain,
    require_served_judge,
    smallest_n,
    verdict_of_confirmation,
    wins_of_gain,
)
from rmcore.policy.sampling.best_of_n import nominal_kl

CLIP = 3.0


def served(rng, num_prompts, n, quality):
    """Differences of the chosen and another response, by a proxy whose correlation with gold is `quality`.

    Prompts differ in spread and in how well the proxy sees them, as they do; the unit is their mean spread.
    """
    spread = rng.uniform(0.5, 2, size=num_prompts)
    gold = rng.normal(size=(num_prompts, n + 1))
    own = np.clip(quality + rng.normal(0, 0.2, size=(num_prompts, 1)), -1, 1)
    proxy = own * gold + np.sqrt(1 - own**2) * rng.normal(size=gold.shape)
    best = gold[np.arange(num_prompts), proxy[:, :n].argmax(axis=1)]
    return (best - gold[:, n]) * spread / 1.25


def errors_of(repeats, level=LEVEL):
    """Share of wrong ones that chance allows at this level: three standard errors above it."""
    return level + 3 * (level * (1 - level) / repeats) ** 0.5


@pytest.mark.slow
@pytest.mark.parametrize("quality", [0.0, 0.6])
def test_the_true_gain_is_inside_after_every_pair(quality):
    """However often one looks: also where the end was chosen by what was seen."""
    rng = np.random.default_rng(5)
    truth = np.clip(served(rng, 400_000, 16, quality), -CLIP, CLIP)
    gain, wins = truth.mean(), ((1 + np.sign(truth)) / 2).mean()
    repeats, missed = 80, {"gain": 0, "win_rate": 0}
    for _ in range(repeats):
        known = ServedGain(CLIP, 0.3)
        for difference in served(rng, 150, 16, quality):
            known.see(float(difference))
        low, high = np.array(known.path).T
        missed["gain"] += bool(((low > gain) | (high < gain)).any())
        rate = known.win_rate()
        missed["win_rate"] += not rate.ci_low <= wins <= rate.ci_high
    assert max(missed.values()) / repeats <= errors_of(repeats), missed


@pytest.mark.slow
@pytest.mark.parametrize("passes", [0.995, 0.9, 0.5])
def test_a_chosen_one_that_is_no_better_is_hardly_ever_called_so(passes):
    """A judge of passes and failures, most of which tie: a few prompts must not make a claim."""
    rng = np.random.default_rng(7)
    claimed, repeats = 0, 100
    for _ in range(repeats):
        known = ServedGain(CLIP, 0.3)
        judged = (rng.random((200, 2)) < passes).astype(float)
        for one, other in judged:
            if not known.see(float((one - other) / 0.05)):
                break
        claimed += known.decision != "unclear"
    assert claimed / repeats <= errors_of(repeats)


@pytest.mark.slow
@pytest.mark.parametrize(("quality", "decision"), [(0.9, "rose"), (-0.9, "fell")])
def test_what_is_clear_is_decided_after_few_and_stays_so(quality, decision):
    known, decided = ServedGain(CLIP, 0.3), []
    differences = served(np.random.default_rng(1), 180, 16, quality)
    for difference in differences:
        known.see(float(difference))
        decided.append(known.decision)
    first = decided.index(decision)
    assert first == LOOKS[0] - 1
    assert set(decided[first:]) == {decision}
    ends = np.array(known.path)
    assert (np.diff(ends[:, 0]) >= 0).all()
    assert (np.diff(ends[:, 1]) <= 0).all()
    assert known.gain().value == pytest.approx(np.clip(differences, -CLIP, CLIP).mean())
    assert known.unclipped().value == pytest.approx(differences.mean())
    assert known.clipped_share == pytest.approx((np.abs(differences) > CLIP).mean())
    assert known.win_rate().value == pytest.approx(((1 + np.sign(differences)) / 2).mean())


def test_a_gain_that_is_real_and_less_than_asked_for_ends_it_as_well():
    rng = np.random.default_rng(2)
    known = ServedGain(1.0, 0.4, is_clipped=False)
    with pytest.raises(DataError, match="no pair was judged"):
        known.gain()
    while known.see(float(rng.choice([1.0, -1.0], p=[0.6, 0.4]))):
        assert len(known.differences) < 5000
    low, high = known.interval
    assert 0 < low < high < 0.4
    assert known.decision == "rose"


@pytest.mark.slow
def test_harm_that_few_prompts_turn_is_not_claimed():
    """3 % of prompts gain so much that the mean is zero, and the others lose 0.6; clipped at 3 sd it falls for certain.

    That a gain is not claimed where few prompts lose far more: tests/benchmarks/test_verdict_edges.py.
    """
    rng, repeats, claimed, doubted = np.random.default_rng(11), 40, 0, 0
    for _ in range(repeats):
        known = ServedGain(CLIP, 0.3)
        for number, is_far in enumerate(rng.random(400) < 0.03, 1):
            known.see(0.6 * 0.97 / 0.03 if is_far else float(-0.6 + rng.normal()))
            if number % 8 == 0 and known.is_decided:
                break
        claimed += known.decision == "fell"
        doubted += known.doubt is not None and "are clipped at 3" in known.doubt
    assert stats.binomtest(claimed, repeats, 0.03, alternative="greater").pvalue > 0.001, claimed / repeats
    assert doubted > repeats / 2


@pytest.mark.parametrize(("is_clipped", "decision"), [(True, "unclear"), (False, "rose")])
def test_wins_need_no_tail_and_sizes_are_not_claimed_of_few(is_clipped, decision):
    known = ServedGain(1.0, 0.3, is_clipped=is_clipped)
    for _ in range(LOOKS[0] - 1):
        known.see(1.0)
    assert known.decision == decision
    assert (known.doubt is None) == (decision == "rose")
    known.see(1.0)
    assert known.decision == "rose"


def test_wins_of_a_gain_are_those_of_normal_responses():
    rng = np.random.default_rng(3)
    for gain in (0.1, 0.3, 1.0):
        wins = np.sign(gain + rng.normal(size=1_000_000) - rng.normal(size=1_000_000)).mean()
        assert wins_of_gain(gain) == pytest.approx(wins, abs=0.004)


def test_n_is_the_smallest_that_goes_as_far_as_planned_and_a_plan_beyond_is_refused():
    for planned in (0.01, 0.5, 2.0, 3.0, 7.0):
        n = smallest_n(planned)
        assert nominal_kl(n) >= planned
        assert n == 2 or nominal_kl(n // 2) < planned
    with pytest.raises(DataError, match=rf"n = {MOST_SAMPLES}, and 9 are planned"):
        smallest_n(9.0)


def confirmed(low, high, num_prompts=50, **changes):
    """The verdict on best-of-16, of which a gain of 0.3 was required, by the interval of its gain."""
    gain = {"value": (low + high) / 2, "ci_low": low, "ci_high": high}
    record = {"n": 16, "num_prompts": num_prompts, "useful_gain": 0.3, "unit": "sd", "gold": {"gain": gain}}
    return verdict_of_confirmation(record | {"num_allowed": 50, "num_fresh": None, "doubt": None} | changes)


@pytest.mark.parametrize(
    ("low", "high", "num_fresh", "status", "reason"),
    [
        (0.35, 0.6, None, "rose", None),
        (0.1, 0.6, None, "rose", "0.3 sd was required, and is not shown"),
        (0.1, 0.2, None, "rose", "0.3 sd was required, and it is less"),
        (-0.1, 0.2, None, "unclear", "a higher policy.fresh_prompts judges all of them again"),
        (-0.1, 0.3, 51, "unclear", "judges all of them again"),
        (-0.1, 0.3, 50, "unclear", "no more fresh prompts are held out"),
        (-0.4, -0.1, None, "fell", None),
    ],
)
def test_the_interval_decides_and_what_would_narrow_it_is_what_there_is(low, high, num_fresh, status, reason):
    found = confirmed(low, high, num_fresh=num_fresh)
    assert found["status"] == status
    assert "best-of-16 on 50 fresh prompts" in found["headline"]
    assert [reason in one for one in found["reasons"]] == ([] if reason is None else [True])


@pytest.mark.parametrize(("unread", "status"), [(0, "rose"), (2, "rose"), (3, "unclear")])
def test_a_gain_on_the_pairs_that_could_be_read_is_unclear_if_too_many_could_not(unread, status):
    found = confirmed(0.4, 0.6, num_allowed=53, num_unread=unread)
    assert found["status"] == status
    assert any(f"{unread} of {50 + unread} pairs" in one for one in found["reasons"]) == (unread > 0)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({}, "with --people a folder"),
        ({"people": "to_judge"}, "from the root"),
        ({"people": __file__}, "is a file"),
        ({"people": "/nowhere/to_judge", "judge": "json:dumps"}, "one of them judges"),
        ({"judge": "no.such:judge"}, "no.such"),
    ],
)
def test_who_judges_is_known_before_anything_runs(policy, message):
    with pytest.raises(ConfigError, match=message):
        require_served_judge(PolicyConfig(**policy), is_gold=False)


def test_the_loop_of_the_docs_runs_as_it_stands():
    """With functions that the reader has: a policy, a reward, a judge."""
    page = (Path(__file__).parents[3] / "docs" / "readiness.md").read_text(encoding="utf-8")
    (block,) = [one for one in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "ServedGain" in one]
    rng = np.random.default_rng(0)
    names = {
        "n": 16, "prompts": [f"p{one}" for one in range(400)], "other_prompts": [f"q{one}" for one in range(24)],
        "sample": lambda prompt, count: [f"{value:.6f}" for value in rng.normal(size=count)],
        "reward": lambda prompt, response: float(response),
        "my_judge": lambda prompt, response: float(response) + rng.normal(0, 0.3),
    }  # fmt: skip
    exec(compile(block, "readiness.md", "exec"), names)
    assert names["gain"].decision == "rose"
    assert len(names["gain"].differences) == ENOUGH_TO_RISE


@pytest.mark.parametrize("count", [LOOKS[0], ENOUGH_TO_RISE - 1, ENOUGH_TO_RISE])
def test_a_gain_of_few_prompts_is_said_with_its_condition_and_what_share_they_may_not_show(count):
    found = confirmed(0.4, 0.6, count, num_allowed=400, num_fresh=400)
    assert ("(+0.40 to +0.60 if no prompt is a disaster)" in found["headline"]) == (count < ENOUGH_TO_RISE)
    assert f"up to {100 * unseen_share(count):.2g} % of all prompts may be disasters" in found["headline"]
