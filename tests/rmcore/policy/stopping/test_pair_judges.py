"""Judges of pairs: the unit of scores, and people's files there and back."""

import stat

import numpy as np
import pytest

from label_sheets import fill, rows_of
from rmcore.core.errors import DataError, JudgementsWantedError
from rmcore.data.pair import Message
from rmcore.policy.judge import HookJudge
from rmcore.policy.stopping.pair_judges import PeopleJudge, ScoreJudge, WinJudge, judge_in_turns

PROMPTS = ["What is 2 + 2?", "=1+1", (Message("user", "Hi"), Message("assistant", "?"), Message("user", "A"))]
NEW, OLD = ["four", "two, I think", "B"], ["five", "2", "B"]


def by_length():
    return ScoreJudge(HookJudge("test:judge", lambda prompt, response: len(response)))


def test_scores_are_in_deviations_of_the_start_and_clipped():
    judge = by_length()
    judge.calibrate(["p", "q"], ["aa", "a"], ["aaaa", "aaaaa"])
    assert judge.scale == pytest.approx(np.sqrt((2 + 8) / 2))
    found = judge.compare("any", ["p", "q"], ["aaaa", "a" * 99], ["aa", "a"])
    np.testing.assert_allclose(found, [2 / judge.scale, 98 / judge.scale])  # as they are: who bets clips
    with pytest.raises(DataError, match="equally good"):
        ScoreJudge(HookJudge("test:judge", lambda prompt, response: 1.0)).calibrate(["p"], ["a"], ["c"])


def test_the_error_of_the_unit_is_that_of_repeated_units():
    rng = np.random.default_rng(4)

    def unit():
        lengths = rng.lognormal(3, 0.6, size=(2, 24)).round().astype(int)
        return by_length().unit_of(["p"] * 24, *(["a" * one for one in side] for side in lengths))

    scales, errors = np.array([unit() for _ in range(600)]).T
    # Heavy tails are seen too rarely in 24 pairs, so it is a little low.
    assert 0.7 * scales.std() / scales.mean() < errors.mean() < 1.1 * scales.std() / scales.mean()


def test_a_judge_who_ties_most_of_the_time_has_no_unit_either():
    """Passes and failures: an average over ties and a few differences of one size would be called a deviation."""
    few = by_length().unit_of(["p"] * 4, ["aa", "aa", "aa", "b"], ["aa", "aa", "bb", "aaa"])
    assert few is None
    more = by_length().unit_of(["p"] * 4, ["aa", "a", "aa", "b"], ["aa", "aa", "b", "aaa"])
    assert more[0] == pytest.approx(np.sqrt((0.5 + 0.5 + 2) / 4))
    wins = WinJudge(HookJudge("test:judge", lambda prompt, response: len(response)))
    assert wins.compare("any", ["p"] * 3, ["aaaa", "a", "bb"], ["aa", "aa", "aa"]).tolist() == [1, -1, 0]


class Asked(ScoreJudge):
    """Counts the pairs that it is asked about."""

    def __init__(self, at_once):
        super().__init__(HookJudge("test:judge", lambda prompt, response: len(response)))
        self.at_once, self.scale, self.pairs = at_once, 1.0, []

    def compare(self, asked, prompts, later, earlier):
        self.pairs += later
        return super().compare(asked, prompts, later, earlier)


@pytest.mark.parametrize(("at_once", "lines", "asked"), [(2, 0, 5), (2, 3, 2), (2, 5, 0), (None, 3, 5), (None, 5, 0)])
def test_turns_ask_for_what_is_not_kept(tmp_path, at_once, lines, asked):
    """Who is asked about all together, as people with one file, is asked about all of it again."""
    given = (["p"] * 5, [*"abcde"], ["aa", "a", "", "a", "aaa"])
    whole = list(judge_in_turns(Asked(at_once), "any", *given, tmp_path / "whole.jsonl"))
    assert [len(turn) for turn in whole] == ([5] if at_once is None else [2, 2, 1])
    kept = (tmp_path / "whole.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "cut.jsonl").write_text("".join(kept[:lines]) + ('{"differ' if lines < 5 else ""))
    judge = Asked(at_once)
    assert list(judge_in_turns(judge, "any", *given, tmp_path / "cut.jsonl")) == whole
    assert judge.pairs == given[1][5 - asked :]
    assert (tmp_path / "cut.jsonl").read_text().splitlines(keepends=True) == kept


def test_people_are_asked_and_their_answers_come_back_the_right_way_round(tmp_path):
    judge = PeopleJudge(tmp_path)
    with pytest.raises(JudgementsWantedError, match="2 of 2 pairs wait") as wanted:
        judge.compare("step5-seed0", PROMPTS, NEW, OLD)
    file = tmp_path / "step5-seed0.csv"
    assert str(file) in str(wanted.value)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    fill(file, lambda row: "a" if row["response_a"] in NEW else "b")
    assert judge.compare("step5-seed0", PROMPTS, NEW, OLD).tolist() == [1, 1, 0]  # equal responses: nobody is asked
    fill(file, lambda row: "B " if row["response_a"] in NEW else " A")
    assert judge.compare("step5-seed0", PROMPTS, NEW, OLD).tolist() == [-1, -1, 0]
    fill(file, lambda row: "tie")
    assert judge.compare("step5-seed0", PROMPTS, NEW, OLD).tolist() == [0, 0, 0]


def test_the_file_does_not_say_whose_a_response_is(tmp_path):
    judge = PeopleJudge(tmp_path)
    new, old = [f"new {number}" for number in range(60)], [f"old {number}" for number in range(60)]
    with pytest.raises(JudgementsWantedError):
        judge.compare("look", ["p"] * 60, new, old)
    first = [row["response_a"] in new for row in rows_of(tmp_path / "look.csv")]
    assert 15 < sum(first) < 45
    with pytest.raises(JudgementsWantedError, match="1 of 1"):
        judge.compare("empty", ["p", "q"], ["", " "], ["text", "\n"])
    assert "an empty answer" in (tmp_path / "empty.csv").read_text()


def test_half_an_answer_an_odd_one_and_another_trainings_file_are_named(tmp_path):
    judge = PeopleJudge(tmp_path)
    with pytest.raises(JudgementsWantedError):
        judge.compare("look", PROMPTS, NEW, OLD)
    file = tmp_path / "look.csv"
    fill(file, lambda row: "a" if row["pair_id"].endswith("-1") else "")
    with pytest.raises(JudgementsWantedError, match="1 of 2"):
        judge.compare("look", PROMPTS, NEW, OLD)
    fill(file, lambda row: "the first")
    with pytest.raises(DataError, match="another answer than a, b or tie"):
        judge.compare("look", PROMPTS, NEW, OLD)
    fill(file, lambda row: "a")
    with pytest.raises(DataError, match=r"other responses .*belongs to another run"):
        judge.compare("look", PROMPTS, ["six", *NEW[1:]], OLD)
    file.write_text("\n".join(file.read_text().splitlines()[:2]) + "\n")
    with pytest.raises(DataError, match="lacks 1 of 2"):
        judge.compare("look", PROMPTS, NEW, OLD)
