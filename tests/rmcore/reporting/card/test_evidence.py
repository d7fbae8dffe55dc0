"""What each kind of result tells a card."""

import pytest

import report_sample
from rmcore.core.errors import DataError
from rmcore.reporting.card.evidence import KINDS, highest, public_name, read_evidence
from rmcore.reporting.html.blocks import markdown


def shown(found):
    """All sections as the card shows them."""
    return "\n".join(markdown(section, 2, is_whole=True) for section in found.sections)


@pytest.mark.slow
def test_a_run_tells_metrics_and_verdict():
    results = report_sample.results()
    found = read_evidence(results, "run demo")
    judgement = highest(found)
    assert judgement.headline == results["verdict"]["headline"]
    assert judgement.rung == results["verdict"]["rung"]
    assert found[0].results[0].metric_value == round(results["metrics"]["pairwise_accuracy"]["value"], 4)
    (checks,) = [one for part in found for one in part.sections if one.title.startswith("Checks of evidence level")]
    assert len(checks.tables[0].rows) == len(results["gate"])


def verdict(rung, status="passes", **more):
    told = {"rung": rung, "status": status, "headline": f"rung {rung}", "evidence": "e", "reasons": []}
    return {"verdict": told, "gate": [], "next_rung": None, **more}


def test_the_highest_rung_stands_and_of_two_there_the_last():
    records = [
        verdict(1, "fails"),
        verdict(3, "ready", readiness={"plan": {"kl": 3, "optimizer": "best_of_n"}}),
        verdict(3, "not_ready", readiness={"plan": {"kl": 5, "optimizer": "kl_optimum"}}),
        verdict(2),
    ]
    found = [one for record in records for one in read_evidence(record, "f.json")]
    judgement = highest(found)
    assert (judgement.rung, judgement.status, judgement.kl) == (3, "not_ready", 5.0)
    assert judgement.method == "RL with a KL penalty"
    assert highest([]) is None
    (served,) = read_evidence(verdict(4, "gained", n=64, kl=3.17), "confirm.json")
    assert (served.judgement.kl, served.judgement.method) == (3.17, "best-of-64")


@pytest.mark.parametrize(
    "broken", [{"other": 1}, {"metrics": {}}, {"suites": {"a": {}}}, {"verdict": {}}, {"suites": {"a": 3}}]
)
def test_a_file_of_no_kind_or_of_another_form_is_refused(broken):
    says = r"x\.json holds none of " + ", ".join(KINDS) if "other" in broken else "not as the command wrote it"
    with pytest.raises(DataError, match=says):
        read_evidence(broken, "x.json")


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("/home/alice/secret-project/pairs.jsonl", "pairs.jsonl"),
        ("s3://bucket/deep/pairs.parquet", "pairs.parquet"),
        ("https://host/pairs.jsonl?X-Amz-Signature=abc", "pairs.jsonl"),
        ("stanfordnlp/SHP", "stanfordnlp/SHP"),
        ("pairs/", "pairs"),
        (None, "pairs that are not named"),
    ],
)
def test_strangers_read_names_and_no_places(source, shown):
    assert public_name(source) == shown
