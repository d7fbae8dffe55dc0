"""Which trial was best."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmcore.study.tuning import choose, trial_score

LOSS, ACCURACY = "eval/loss", "eval/pairwise_accuracy"
BOUNDS = (1e-5, 1.0)


def training(folder, rows):
    text = "".join(json.dumps({"step": step, "metrics": metrics}) + "\n" for step, metrics in enumerate(rows))
    (folder / "metrics.jsonl").write_text(text)
    return folder


def test_a_trial_counts_by_its_best_evaluation(tmp_path):
    rows = [{LOSS: 0.9, ACCURACY: 0.6}, {"train/loss": 0.1}, {LOSS: 0.5, ACCURACY: 0.7}, {LOSS: 0.7, ACCURACY: 0.65}]
    folder = training(tmp_path, rows)
    assert (trial_score(folder, LOSS), trial_score(folder, ACCURACY)) == (0.5, 0.7)


def test_a_diverged_trial_has_no_score(tmp_path):
    assert trial_score(training(tmp_path, [{LOSS: None}, {"train/loss": 3.0}]), LOSS) is None
    assert trial_score(tmp_path / "nothing", LOSS) is None


def test_evaluations_that_are_not_finite_do_not_count(tmp_path):
    assert trial_score(training(tmp_path, [{LOSS: None}, {LOSS: 0.8}, {LOSS: None}]), LOSS) == 0.8


scores = st.dictionaries(
    st.floats(1e-5, 1.0), st.none() | st.sampled_from([0.1, 0.2, 0.3, 0.4]), min_size=1, max_size=6
)


@given(scores, st.sampled_from([LOSS, ACCURACY]))
def test_the_best_score_wins_and_of_equals_the_smaller_value(trials, metric):
    found = choose("train.lr", BOUNDS, metric, trials)
    known = {value: score for value, score in trials.items() if score is not None}
    if not known:
        assert found is None
        return
    best = (min if metric == LOSS else max)(known.values())
    assert found["chosen"] == min(value for value, score in known.items() if score == best)
    assert {trial["value"]: trial["score"] for trial in found["trials"]} == trials
    assert [trial["value"] for trial in found["trials"]] == sorted(trials)
    assert (found["setting"], found["low"], found["high"], found["metric"]) == ("train.lr", *BOUNDS, metric)


@pytest.mark.parametrize(
    ("trials", "at_edge"),
    [
        ({0.1: 0.3, 0.2: 0.2, 0.3: 0.3}, False),
        ({0.1: 0.1, 0.2: 0.2, 0.3: 0.3}, True),
        ({0.1: 0.3, 0.2: 0.2, 0.3: 0.1}, True),
        ({0.1: 0.3}, False),
    ],
)
def test_a_best_trial_at_the_edge_is_marked(trials, at_edge):
    assert choose("train.lr", BOUNDS, LOSS, trials)["at_edge"] is at_edge
