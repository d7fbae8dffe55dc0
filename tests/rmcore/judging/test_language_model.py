"""Scores and utilities from what a language model writes; texts that are judged stay data."""

import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize
from scipy.stats import spearmanr

from judge_server import completion, judge_server
from rmcore.config.judging import JudgingConfig
from rmcore.core.errors import ConfigError, DataError
from rmcore.judging.answers import Reply
from rmcore.judging.comparisons import COMPARISONS_EACH, Comparisons
from rmcore.judging.language_model import LanguageModelJudge
from rmcore.judging.rubrics import SCORES, pair_question, read_choice, rubric_text, score_question
from rmcore.policy.stopping.pair_judges import pair_judge_of

QUALITY = re.compile(r"quality (-?[\d.]+)")


def quality(text):
    return float(QUALITY.search(text)[1])


def reply(text, **fields):
    return Reply(**{"text": text, "model": "m", "logprobs": {}, "tokens_read": 0, "tokens_written": 0} | fields)


SEVEN = (
    *("7", " 7\n", "**7**", '"7".', '{"score": 7}', '{"score": "7"}', '{"score": 7.0}', "[[7]]", "(7)"),
    *("<think>8 or 9?</think>\n7", "<thinking>8</thinking>7"),
)
NO_SCORE = (
    *("<think>surely 8", "7/9", "Score: 7", "10", "0", "7 8", "7.5", "{7}", ""),
    *('{"score": 7, "best": 9}', '{"score": [7]}'),
)
READ = {**dict.fromkeys(SEVEN, "7"), **dict.fromkeys(NO_SCORE)}


def test_an_answer_is_read_whole_or_not_at_all():
    for text, read in READ.items():
        assert read_choice(reply(text), SCORES) == read, text


texts = st.text(max_size=60) | st.sampled_from(["{response_b}", "</text-000000000000>", "{criteria}", "A", "\x00"])


@given(prompt=texts, first=texts, second=texts)
def test_a_text_neither_leaves_its_tags_nor_fills_another_place(prompt, first, second):
    content = pair_question("c", prompt, first, second).messages[0][1]
    tag = re.search(r"<(text-[0-9a-f]{12})>", content)[1]
    assert [part[1:-1] for part in re.split(rf"</?{tag}>", content)[1::2]] == [prompt, first, second]


def test_a_rubric_is_a_name_a_text_or_a_whole_question(tmp_path):
    file = tmp_path / "mine.txt"
    file.write_text("Rate {response} as an answer to {prompt}.")
    content = score_question(rubric_text(str(file)), "PP", "RR").messages[0][1]
    assert content.index("Rate") < content.index("RR") < content.index("PP")
    with pytest.raises(ConfigError, match=r"places \{prompt\}, \{response\}, .* needs .*response_a"):
        pair_question(rubric_text(str(file)), "p", "a", "b")
    for wrong in ("no such file", tmp_path / "empty.txt", tmp_path / "binary.txt"):
        (tmp_path / "empty.txt").write_text(" ")
        (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\xff")
        with pytest.raises(ConfigError, match="rubric"):
            rubric_text(str(wrong))


def with_logprobs(text, shares):
    alternatives = [{"token": token, "logprob": math.log(share), "bytes": None} for token, share in shares.items()]
    tokens = [{"token": text, "logprob": -0.1, "bytes": None, "top_logprobs": alternatives}]
    return completion(text, choice={"logprobs": {"content": tokens, "refusal": None}})


@pytest.mark.parametrize(
    ("text", "shares", "score"),
    [
        ("7", {"7": 0.5, "8": 0.25, " 8": 0.25}, 7.5),
        ("7", {"7": 0.4, "9": 0.2, "No": 0.3}, (7 * 0.4 + 9 * 0.2) / 0.6),
        ("7", {"7": 0.2, "Well": 0.8}, 7.0),
        ("7", {}, 7.0),
    ],
)
def test_a_score_is_expected_over_the_probabilities_where_they_are_given(text, shares, score, tmp_path):
    with judge_server(lambda one: with_logprobs(text, shares)) as server:
        assert LanguageModelJudge(server.named, JudgingConfig(), tmp_path).rewards(["p"], ["r"]) == pytest.approx(score)


@pytest.mark.slow
def test_an_unread_answer_is_asked_once_more_and_then_counts_as_no_judgement(tmp_path, capsys):
    def behaviour(one):
        is_reminded = len(one.body["messages"]) > 1
        return {"good": "5", "slow": "8" if is_reminded else "Let me see", "never": "I cannot"}[one.texts[1]]

    with judge_server(behaviour) as server:
        judge = LanguageModelJudge(server.named, JudgingConfig(), tmp_path)
        np.testing.assert_array_equal(judge.rewards(["p"] * 3, ["good", "slow", "never"]), [5, 8, np.nan])
        assert (judge.num_read, judge.num_unread, len(server.asked)) == (2, 1, 5)
        assert "1 of 3 answers" in capsys.readouterr().err
    with judge_server(lambda one: "I cannot") as server:
        judge = LanguageModelJudge(server.named, JudgingConfig(), tmp_path / "other")
        with pytest.raises(DataError, match="none of 9 answers"):
            judge.rewards([str(at) for at in range(9)], ["never"] * 9)


def test_a_judge_that_always_takes_the_first_prefers_nothing(tmp_path):
    with judge_server(lambda one: "A") as server:
        judge = LanguageModelJudge(server.named, JudgingConfig(mode="pairwise"), tmp_path)
        assert judge.compare(["p", "q"], ["a", "same"], ["b", "same"]).tolist() == [0, 0]
        assert len(server.asked) == 2
        assert judge.verdicts(["p"], ["a"], ["b"]).tolist() == [[1], [1]]


def test_one_unread_order_leaves_a_pair_without_a_verdict(tmp_path):
    with judge_server(lambda one: "C" if one.texts[1] == "a" else "hm") as server:
        judge = LanguageModelJudge(server.named, JudgingConfig(mode="pairwise"), tmp_path)
        assert np.isnan(pair_judge_of(judge, judge.settings).compare("", ["p"], ["a"], ["b"])).all()


@pytest.mark.slow
def test_utilities_order_answers_as_the_judge_does_and_equal_texts_are_equal(tmp_path):
    def behaviour(one):
        first, second = map(quality, one.texts[1:])
        return "A" if first > second else "B" if second > first else "C"

    values = [3, 1, 2, 5, 4, 3]
    with judge_server(behaviour) as server:
        judge = LanguageModelJudge(server.named, JudgingConfig(mode="pairwise"), tmp_path)
        found = judge.rewards(
            ["p"] * 6 + ["q"] * 2, [f"quality {value}" for value in values] + ["quality 2", "quality 1"]
        )
        assert np.argsort(found[:6], kind="stable").tolist() == np.argsort(values, kind="stable").tolist()
        assert found[0] == found[5]
        assert found[6] > found[7]
        assert len(server.asked) <= COMPARISONS_EACH * 5 + 2


def ask(comparisons, pairs, truth, rng, first_bias=0.3, log_tie=-0.5):
    for prompt, first, second in pairs:
        d = truth[prompt][first] - truth[prompt][second] + first_bias
        weights = np.exp([d / 2, log_tie, -d / 2])
        comparisons.add(prompt, first, second, rng.choice([1.0, 0.5, 0.0], p=weights / weights.sum()))


def test_utilities_are_the_maximum_of_davidsons_likelihood_with_an_effect_of_order():
    """Against scipy's optimiser on the formula as the paper has it, in float64."""
    rng = np.random.default_rng(0)
    rows = [(0, *rng.permutation(4)[:2], rng.choice([0, 0.5, 1])) for _ in range(40)]
    comparisons = Comparisons([4])
    for row in rows:
        comparisons.add(*row)

    def negative(x):
        value = (x[:4] ** 2).sum() / 2**2 / 2 + (x[4:] ** 2).sum() / 2
        for _, first, second, score in rows:
            d = x[first] - x[second] + x[4]
            logits = np.array([d / 2, x[5], -d / 2])
            value -= logits[{1: 0, 0.5: 1, 0: 2}[score]] - np.log(np.exp(logits).sum())
        return value

    best = minimize(negative, np.zeros(6), tol=1e-12).x
    (utilities,), gamma, log_tie = comparisons.fit()
    np.testing.assert_allclose([*utilities, gamma, log_tie], [*(best[:4] - best[:4].mean()), *best[4:]], atol=1e-4)


@pytest.mark.slow
def test_sixteen_answers_are_ordered_by_three_comparisons_each_nearly_as_well_as_by_all():
    """Spearman's correlation with the truth over 60 prompts, for a judge who decides clearly: within 0.05 of that by
    all 120 comparisons; and above that by as many at random.
    """
    rng = np.random.default_rng(1)
    truth = [rng.normal(0, 4, 16) for _ in range(60)]
    chosen, drawn, every = (Comparisons([16] * 60) for _ in range(3))
    while pairs := chosen.next_pairs(rng):
        ask(chosen, pairs, truth, rng)
    all_pairs = [[(at, *rng.permutation([a, b])) for a in range(16) for b in range(a)] for at in range(60)]
    ask(every, [pair for pairs in all_pairs for pair in pairs], truth, rng)
    some = [pairs[place] for pairs in all_pairs for place in rng.permutation(120)[: 16 * COMPARISONS_EACH]]
    ask(drawn, some, truth, rng)

    def correlation(comparisons):
        fitted = comparisons.fit()[0]
        return np.mean([spearmanr(one, own).statistic for one, own in zip(fitted, truth, strict=True)])

    assert correlation(every) - 0.05 < correlation(chosen)
    assert correlation(chosen) > correlation(drawn) + 0.01
