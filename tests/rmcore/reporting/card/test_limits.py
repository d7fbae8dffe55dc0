"""What a card says a model must not be used for."""

from dataclasses import replace

import pytest

from rmcore.reporting.card.evidence import Found, Judgement
from rmcore.reporting.card.limits import limits

READY = Judgement(3, "ready", "Ready", "samples", kl=3.0, method="best-of-n", policy="some/policy", source="a run")


def said(judgement, truncation=None, **measured):
    return limits(judgement, [Found(**measured), Found()], truncation or {}, 128, synthetic=False)


def test_a_ready_model_is_for_its_plan_alone():
    first = said(READY)[0]
    assert "further than 3 nats of KL" in first
    assert "another method than best-of-n" in first
    assert "some/policy" in first


@pytest.mark.parametrize(
    ("rung", "status"), [(1, "passes"), (1, "fails"), (1, "unclear"), (2, "passes"), (3, "not_ready"), (4, "lost"),
                         (4, "unclear")]
)  # fmt: skip
def test_every_other_verdict_allows_no_optimisation(rung, status):
    first = said(replace(READY, rung=rung, status=status))[0]
    assert first.startswith("**Optimising a policy against it**, by reinforcement learning")
    assert "further than" not in first


def test_without_a_verdict_nothing_speaks_for_it():
    assert "Nobody judged" in said(None)[0]


def test_a_good_status_on_a_low_rung_allows_nothing():
    assert "level 2 of 4" in said(replace(READY, rung=2))[0]


def test_failed_checks_forbid_ranking():
    assert any("Ranking answers" in one for one in said(replace(READY, rung=1, status="fails")))
    assert not any("Ranking answers" in one for one in said(replace(READY, rung=1, status="passes")))


@pytest.mark.parametrize(("low", "forbids"), [(-0.107, True), (0.0, True), (None, True), (0.01, False)])
def test_what_is_not_shown_to_beat_length_is_not_for_ranking(low, forbids):
    over = {"value": -0.04 if low is None else low + 0.05, "ci_low": low, "ci_high": 0.2, "num": 300}
    told = [one for one in said(None, over_baseline=over) if "Ranking answers" in one]
    assert bool(told) == forbids
    assert not told or "on 300 pairs" in told[0]


def test_what_was_measured_elsewhere_is_told_with_interval_and_number():
    elsewhere = {"value": 0.61, "ci_low": 0.58, "ci_high": 0.65, "num": 720}
    told = next(one for one in said(READY, elsewhere=elsewhere) if "Prompts unlike" in one)
    assert "61.0 % (58.0 to 65.0 %) of 720 pairs" in told
    assert any("was not measured" in one for one in said(READY) if "Prompts unlike" in one)


def test_cut_texts_are_counted():
    told = next(
        one for one in said(READY, truncation={"num_pairs": 960, "num_cut_sides": 1214}) if "more than 128" in one
    )
    assert "1,214 of the 1,920 texts that it was trained on were longer" in told
