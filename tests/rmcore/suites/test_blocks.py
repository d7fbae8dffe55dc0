"""What cards show of benchmarks."""

import pytest

import report_sample
from rmcore.reporting.card import read_evidence
from rmcore.reporting.html.blocks import markdown


def shown(found):
    """All sections as the card shows them."""
    return "\n".join(markdown(section, 2, is_whole=True) for section in found.sections)


def score(value, num=100):
    return {"value": value, "ci_low": value - 0.1, "ci_high": value + 0.1, "num": num, "reason": None}


def suites(missing, **more):
    told = {
        "title": "JudgeBench", "rule": "strictly above", "terms": "MIT", "hub": "ScalerLab/JudgeBench",
        "source": "/home/me/gpt.jsonl", "missing": {"knowledge": missing} if missing else {},
        "scores": {"overall": score(0.6), "math": score(0.5, 20)}, "longer_wins": 0.5, "over_longer_wins": score(0.1),
        "num_questions": 100, "num_unreadable": 3,
    }  # fmt: skip
    return {"suites": {"judgebench": told | more}}


def test_a_whole_benchmark_goes_to_the_hub_with_its_interval():
    (found,) = read_evidence(suites(0), "b.json")
    (result,) = found.results
    assert (result.dataset_type, result.metric_value) == ("ScalerLab/JudgeBench", 0.6)
    assert result.metric_args == {"ci_low": 0.5, "ci_high": 0.7, "level": 0.95, "n": 100}
    assert "| math (20 questions) | 50.0\u00a0% (40.0 to 60.0\u00a0%) |" in shown(found)
    assert "3 answers could not be read by the model and count as wrong" in shown(found)


OVERLAP = {"num_seen": 7, "num_with_answer": 2, "num_training_pairs": 1200, "score_without": 0.55}


@pytest.mark.parametrize(
    ("missing", "overlap", "says", "goes_to_the_hub"),
    [
        (250, None, "250 of its 350 questions are missing", False),
        (0, None, "JudgeBench: not compared with the training pairs", True),
        (0, OVERLAP | {"num_seen": 0}, "none of its 100 prompts was seen in training", True),
        (0, OVERLAP, "7 of its 100 prompts were seen in training (2 with an answer)", False),
        (0, OVERLAP, "score without them: 55.0\u00a0%", False),
        (0, OVERLAP | {"score_without": None}, "score without them: not known", False),
    ],
)
def test_what_is_missing_or_was_seen_in_training_is_told_and_goes_to_no_leaderboard(
    missing, overlap, says, goes_to_the_hub
):
    (found,) = read_evidence(suites(missing, **({} if overlap is None else {"overlap": overlap})), "b.json")
    assert says in shown(found)
    assert bool(found.results) == goes_to_the_hub


def test_a_run_tells_its_benchmarks():
    assert "RM-Bench" in "".join(map(shown, read_evidence(report_sample.results(), "run demo")))
