"""What a cell measured: values as rmcore.evaluation has them, replicates paired where prompts are shared."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from rmcore.evaluation.report_card import evaluate_pairs
from rmcore.readiness.judged_answers import write_judged_answers
from rmcore.readiness.rank import rank_models
from rmcore.study.cells import ANSWER_METRICS, GAP, NUM_RESAMPLES, TEST_METRICS, first_reaching, read_cell

ACCURACY = "eval/test_pairwise_accuracy"


def with_chances(frame):
    """As the gold world's pairs have them: how likely another label names the same side."""
    return frame.assign(chosen_probability=np.random.default_rng(4).random(len(frame)))


@pytest.mark.parametrize("beta", [1.0, 0.25])
def test_values_are_those_of_the_report_card_by_the_beta_that_the_evaluation_recorded(beta, measure, make_rewards):
    frame = with_chances(make_rewards())
    card = evaluate_pairs(frame, num_resamples=100, beta=beta)
    measured = measure("a", 0, frame, beta=beta)
    for metric, name in TEST_METRICS.items():
        assert measured.value(metric) == pytest.approx(card[name].value), metric
        assert measured.samples[metric].replicates.shape == (NUM_RESAMPLES,)


def test_cells_with_the_same_prompts_are_resampled_together_whatever_the_order_of_rows(measure, make_rewards):
    frame = with_chances(make_rewards())
    one, other = measure("a", 0, frame), measure("b", 1, frame.sample(frac=1, random_state=0))
    assert one.prompts == other.prompts
    for metric in (*TEST_METRICS, GAP):
        difference = one.samples[metric].replicates - other.samples[metric].replicates
        np.testing.assert_allclose(difference, 0, atol=1e-9, err_msg=metric)


def test_what_is_chosen_among_judged_answers_is_what_models_are_ranked_by(write_cell, make_rewards, judged_answers):
    answers, rewards = judged_answers
    metrics = list(ANSWER_METRICS)
    cells = {}
    for arm, own in (("a", rewards), ("b", -rewards), ("few", rewards)):
        folders = write_cell(arm, make_rewards())
        kept = replace(answers, table=answers.table.head(9 * 20)) if arm == "few" else answers
        write_judged_answers(folders["evaluate"], kept, own[: len(kept.table)])
        cells[arm] = read_cell(arm, 0, folders, metrics)
    pools, judged = answers.pools(rewards), answers.pools(answers.table["strength"].to_numpy())
    lengths = [np.ones(len(pool)) for pool in pools]
    found = rank_models(["a"], [pools], judged, lengths, n=4)["models"][0]
    assert cells["a"].value("eval/answers_gain_4") == pytest.approx(found["gain"]["value"])
    assert cells["a"].value("eval/answers_win_rate_4") == pytest.approx(found["win_rate"]["value"])
    sample = cells["a"].samples["eval/answers_gain_4"]
    assert (sample.num_prompts, sample.replicates.shape) == (len(pools), (NUM_RESAMPLES,))
    # What one gains the other one loses, prompt by prompt: common draws show.
    other = cells["b"].samples["eval/answers_gain_4"]
    assert np.corrcoef(sample.replicates, other.replicates)[0, 1] < -0.5
    assert cells["few"].samples.keys() == set()  # nine prompts say nothing
    assert cells["a"].answers == cells["b"].answers != cells["few"].answers


def test_another_model_on_the_same_prompts_is_paired_and_other_prompts_are_independent(measure, make_rewards):
    frame = make_rewards(0, num_pairs=400, num_prompts=50)
    one = measure("a", 0, frame)
    same = measure("b", 0, make_rewards(1, num_pairs=400, num_prompts=50))
    # the very same rewards, but of prompts with other names: only the draw can tell the two apart
    other = measure("c", 0, frame.assign(prompt_id=frame.prompt_id + "x"))
    assert one.prompts == same.prompts != other.prompts

    def correlation(first, second):
        return np.corrcoef(*(cell.samples["eval/test_mean_margin"].replicates for cell in (first, second)))[0, 1]

    # prompts carry most of the spread of a mean over 8 pairs a prompt, so shared draws show
    assert correlation(one, same) > 0.5
    assert abs(correlation(one, other)) < 5 / np.sqrt(NUM_RESAMPLES)


def test_the_gap_is_train_minus_test_with_both_errors(measure, make_rewards):
    test, train = make_rewards(0), make_rewards(5, world=3, gain=2.0)
    cell = measure("a", 0, test, train=train)
    trained = evaluate_pairs(train, num_resamples=100)["pairwise_accuracy"].value
    assert cell.value(GAP) == pytest.approx(trained - cell.value(ACCURACY))
    assert cell.samples[GAP].replicates.std() > cell.samples[ACCURACY].replicates.std()


def tied(frame):
    return frame.assign(reward_chosen=1.0, reward_rejected=1.0)


def test_a_model_with_constant_rewards_is_one_that_guesses(measure, make_rewards):
    """It is measured all the same: a collapsed arm must not take the whole experiment down, nor leave it unseen."""
    cell = measure("a", 0, tied(make_rewards()), train=tied(make_rewards(1, world=2)))
    assert cell.value(ACCURACY) == cell.value("eval/test_length_matched_accuracy") == 0.5
    assert cell.value(GAP) == 0
    assert cell.value("eval/test_loss") == pytest.approx(np.log(2))


def test_what_cannot_be_measured_is_absent(measure, make_rewards):
    frame = make_rewards().assign(chosen_chars=100, rejected_chars=10)
    cell = measure("a", 0, frame, train=pd.DataFrame())
    assert cell.value("eval/test_length_matched_accuracy") is None
    assert GAP not in cell.samples
    assert cell.value(ACCURACY) is not None
    assert measure("b", 0, make_rewards(num_prompts=1)).samples[ACCURACY].replicates is None


def row(step, accuracy=None, seconds=None):
    metrics = {"eval/pairwise_accuracy": accuracy, "cost/train_seconds": seconds}
    return {"step": step, "metrics": {name: value for name, value in metrics.items() if value is not None}}


def test_the_target_is_reached_at_the_first_evaluation_at_or_above_it():
    history = [row(12, 0.9, 6.0), row(4, 0.5, 2.0), row(8, 0.7, 4.0), row(10), row(16, 0.4, 8.0)]
    assert first_reaching(history, 0.7) == (8, 4.0)
    assert first_reaching(history, 0.71) == (12, 6.0)
    assert first_reaching(history, 0.95) is None
    assert first_reaching([{"step": 1, "metrics": {"eval/pairwise_accuracy": None}}], 0.5) is None


def test_a_target_that_was_not_reached_has_no_value(write_cell, make_rewards):
    metrics = ["train/steps_to_target", "cost/seconds_to_target"]
    folders = write_cell("a", make_rewards(), history=[row(4, 0.5, 2.0), row(8, 0.6, 4.0)])
    assert read_cell("a", 0, folders, metrics, target_accuracy=0.9).samples == {}
    reached = read_cell("a", 0, folders, metrics, target_accuracy=0.6)
    assert [reached.value(name) for name in metrics] == [8, 4.0]
    assert read_cell("a", 0, folders, metrics).samples == {}


def test_training_is_read_without_an_evaluation(write_cell, make_rewards):
    folders = write_cell("a", make_rewards(), costs={"cost/train_seconds": 3.5, "cost/peak_training_mib": 8.0})
    wanted = ["train/num_steps", "train/stop_share", "train/best_step", "cost/train_seconds", ACCURACY]
    cell = read_cell("a", 0, {"train": folders["train"]}, wanted)
    assert {name: sample.value for name, sample in cell.samples.items()} == {
        "train/num_steps": 30, "train/stop_share": 0.75, "train/best_step": 20, "cost/train_seconds": 3.5,
    }  # fmt: skip
    assert (cell.prompts, cell.gate) == ("", ())


def test_the_gate_is_judged_on_this_cell(measure, make_rewards):
    card = {"pairwise_accuracy": 0.7, "margin_p50": 1.0, "negative_margin_rate": 0.3, "ece_debiased": 0.1}
    ends = {"ci_low": 0.0, "ci_high": 0.12}
    good = measure("a", 0, make_rewards(), test_card={name: {"value": value} | ends for name, value in card.items()})
    assert all(check.passed for check in good.gate)
    bad = {name: {"value": value} | ends for name, value in (card | {"pairwise_accuracy": 0.59}).items()}
    failed = {check.name for check in measure("b", 0, make_rewards(), test_card=bad).gate if not check.passed}
    # train accuracy is 0.8 in both
    assert failed == {"pairwise_accuracy", "train_test_gap"}
