"""The section about judgements of any kind: every number with its interval, and nothing where all are strict pairs."""

import pytest

import judgement_sample
from rmcore.reporting.figures import numbers


@pytest.fixture
def page(report_with):
    return lambda record: report_with(observations=record)


@pytest.mark.slow
def test_every_measurement_is_shown_with_its_interval(page):
    record = judgement_sample.record()
    text = page(record).section("judgements")
    assert "Held out: 20 pairs, 20 ties, 20 rankings, 60 prompts with graded answers; 2 more cannot be read" in text
    assert "3 grades that training does not have are left out" in text
    shares = ("top_accuracy", "tie_probability", "tie_share", "tie_ece")
    for name, metric in record["metrics"].items():
        if name not in ("nats", "nats_gained"):  # of all kinds together: a sum of what is not alike
            shown = numbers.with_interval(metric, "share" if name in shares else "")
            assert shown.replace("\xa0", " ") in text, name
    for part in record["parts"].values():
        assert numbers.with_interval(part["alone"], "share").replace("\xa0", " ") in text
