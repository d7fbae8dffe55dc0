"""What stands beside a score: overlap with training, what words alone get, other models, and sets of one's own."""

import json

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from benchmark_sample import write_own_set
from flows.cli import app
from rmcore.config.model import ModelConfig
from rmcore.core.errors import ConfigError, DataError
from rmcore.data.pair import Message, PreferencePair
from rmcore.data.table import read_pairs
from rmcore.evaluation.uncertainty import MetricValue
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.suites.measure import length_matched
from rmcore.suites.overlap import find_overlap
from rmcore.suites.own import read_own_suite
from rmcore.suites.pairwise import LLMBAR
from rmcore.suites.question import Question, read_questions
from rmcore.suites.record import benchmark_record
from rmcore.suites.sets import QuestionSet, read_sets
from rmcore.suites.standing import Difference, compare_models, places, read_published, require_known
from rmcore.suites.words import learn_words

WORDS = [f"word{number}" for number in range(60)]
LONG = " ".join(WORDS[:40])


def question(number, prompt, answers=("good", "bad"), num_good=1):
    return Question(str(number), prompt, answers, num_good, "Natural", str(prompt))


def pair(prompt, chosen="one answer", rejected="another"):
    return PreferencePair(prompt, chosen, rejected)


def test_a_prompt_is_seen_exactly_nearly_or_not_at_all():
    almost = LONG.replace("word20", "changed")  # 5 of 36 grams differ: Jaccard 31 / 41
    closer = LONG.replace("word39", "changed")  # 1 of 36: 35 / 37
    questions = [
        question(0, LONG.upper().replace(" ", "  ")),
        question(1, closer),
        question(2, almost),
        question(3, "How are you?"),
        question(4, "How are you"),
        question(5, "nothing like it at all, and yet it is a prompt of more than ten words"),
    ]
    pairs = [pair("unrelated"), pair(LONG, "good", "else"), pair("how ARE you?", "fine")]
    found = find_overlap(pairs, questions)
    assert found.exact.tolist() == [True, False, False, True, False, False]
    assert found.near.tolist() == [False, True, False, False, False, False]
    assert found.answers.tolist() == [True, True, False, False, False, False]
    assert found.pairs.tolist() == [False, True, True]


@pytest.mark.slow
@given(
    st.lists(st.sampled_from(WORDS), min_size=14, max_size=60, unique=True), st.lists(st.integers(0, 59), max_size=3)
)
def test_what_is_called_near_is_near_by_the_exact_similarity(words, changed):
    other = [f"new{at}" if at in changed else word for at, word in enumerate(words)]
    rows = [{tuple(one[at : at + 5]) for at in range(len(one) - 4)} for one in (words, other)]
    similarity = len(rows[0] & rows[1]) / len(rows[0] | rows[1])
    found = find_overlap([pair(" ".join(words))], [question(0, " ".join(other))])
    assert found.exact[0] == (words == other)
    assert found.near[0] == (words != other and similarity >= 0.8)


def test_a_template_that_many_prompts_share_makes_none_of_them_seen():
    template = " ".join(WORDS[:50])
    asked = [f"{template} how much is {at} and {at * 7 % 100}" for at in range(100)]
    trained = [pair(f"{template} how much is {at} and {at * 3 % 100}") for at in range(1000, 1100)]
    found = find_overlap(trained, [question(at, text) for at, text in enumerate(asked)])
    assert not found.seen.any()
    whole = find_overlap([*trained, pair(asked[5])], [question(at, text) for at, text in enumerate(asked)])
    assert np.flatnonzero(whole.exact).tolist() == [5]


def test_scripts_without_spaces_are_compared_by_characters():
    text = "".join(chr(0x4E00 + 7 * at) for at in range(40))
    found = find_overlap([pair(text)], [question(0, text + "。"), question(1, text[::-1])])
    assert found.exact.tolist() == [False, False]
    assert found.near.tolist() == [True, False]


def test_dialogues_are_compared_whole():
    turns = (Message("user", LONG), Message("assistant", "yes"), Message("user", "and now?"))
    found = find_overlap([pair(turns)], [question(0, turns), question(1, "and now?")])
    assert found.exact.tolist() == [True, False]


def test_words_that_decide_are_learnt_and_nothing_else_is():
    pairs = [pair(f"p {number}", f"it is right {number}", f"it is wrong {number}") for number in range(40)]
    questions = [question(0, "q", ("that is right", "that is wrong")), question(1, "q", ("unheard of", "never said"))]
    first, second = learn_words(pairs).rewards(questions)
    assert first[0] > first[1]
    assert second.tolist() == [0.0, 0.0]
    [alone] = learn_words([pair("p", "right right right or", "wrong or")]).rewards([question(0, "q", ("or", "right"))])
    assert alone.tolist() == [0.0, 0.0]  # the one word in both says nothing
    assert learn_words([pair("p", "a b", "c d")]) is None  # no word twice: nothing is learnt


def test_length_matched_counts_only_answers_of_about_one_length():
    questions = [
        question(0, "p", ("x" * 100, "y" * 90, "z" * 50)),
        question(1, "q", ("x" * 100, "y" * 84)),
        question(2, "r", ("x" * 100, "y" * 86)),
    ]
    found = length_matched(questions, [np.array([1.0, 0.0, 2.0]), np.array([0.0, 1.0]), np.array([0.0, 1.0])])
    assert (found.value, found.num) == (0.5, 2)
    assert length_matched(questions[1:2], [np.array([1.0, 0.0])]).reason.startswith("no right and wrong answer")


def one_set(number=200):
    return QuestionSet(LLMBAR, "here", [question(at, f"prompt {at}") for at in range(number)], {})


def rewards_that_are_right(share, number=200, seed=0):
    right = np.random.default_rng(seed).random(number) < share
    return [[np.array([1.0, 0.0]) if one else np.array([0.0, 1.0]) for one in right]]


@pytest.mark.slow
def test_models_that_cannot_be_told_apart_share_a_place():
    rewards = {
        "best": rewards_that_are_right(0.9, seed=1),
        "like it": rewards_that_are_right(0.9, seed=2),
        "chance": rewards_that_are_right(0.5, seed=3),
    }
    told = benchmark_record([one_set()], rewards, published={"paper": {"llmbar": 0.2}, "elsewhere": {"rmb": 0.9}})
    standing = {row["model"]: row["place"] for row in told["suites"]["llmbar"]["standing"]}
    assert standing == {"best": 1, "like it": 1, "chance": 3, "paper": 4}
    differences = told["suites"]["llmbar"]["differences"]
    assert differences["like it"]["verdict"] == "cannot be told apart"
    assert differences["chance"]["verdict"] == differences["paper"]["verdict"] == "better"
    assert set(differences) == {"like it", "chance", "paper"}


def test_a_published_score_is_taken_for_as_uncertain_as_ours():
    rewards = {"ours": rewards_that_are_right(0.7)}
    score = np.mean([one[0] > one[1] for one in rewards["ours"][0]])
    [alone] = compare_models([one_set()], rewards, {"paper": {"llmbar": score - 0.05}})
    half = (alone.value.ci_high - alone.value.ci_low) / 2
    assert half == pytest.approx(1.96 * np.sqrt(2 * score * (1 - score) / 200), rel=0.15)
    assert alone.value.value == pytest.approx(0.05)
    assert alone.verdict == "cannot be told apart"


@pytest.mark.slow
def test_null_differences_are_called_different_in_at_most_a_twentieth_of_families():
    # Three models that are equally good: of each family of three differences none may be called one.
    wrong, draws = 0, 60
    for seed in range(draws):
        rewards = {name: rewards_that_are_right(0.7, 80, 3 * seed + at) for at, name in enumerate("abc")}
        wrong += any(one.verdict != "cannot be told apart" for one in compare_models([one_set(80)], rewards, {}))
    assert wrong <= 8  # 60 draws at 5 %: more than 8 have a chance of 0.4 %


def test_a_difference_that_no_draw_changes_has_no_interval():
    rewards = {"a": [[np.array([1.0, 0.0])] * 3], "b": [[np.array([0.0, 1.0])] * 3]}
    [found] = compare_models([one_set(3)], rewards, {})
    assert (found.value.value, found.value.ci_low, found.p) == (1.0, None, None)
    assert found.verdict == "cannot be told apart"
    # A resample without any question of a group leaves NaN among the draws, and is no spread either.
    named = ["Natural"] * 2 + ["Manual"] * 6
    groups = [Question(str(at), f"p {at}", ("a", "b"), 1, group, str(at)) for at, group in enumerate(named)]
    always = {"a": [[np.array([1.0, 0.0])] * 8], "b": [[np.array([0.0, 1.0])] * 8]}
    [one] = compare_models([QuestionSet(LLMBAR, "here", groups, {})], always, {})
    assert (one.value.value, one.value.ci_low, one.p) == (1.0, None, None)


@pytest.mark.slow
def test_a_large_family_hides_no_large_difference():
    rewards = {"ours": rewards_that_are_right(0.9)}
    published = {f"model {at}": {"llmbar": 0.1} for at in range(200)}
    assert {one.verdict for one in compare_models([one_set()], rewards, published)} == {"better"}


def test_published_scores_are_compared_on_whole_sets_alone():
    part = QuestionSet(LLMBAR, "here", one_set().questions, {"Manual": 3})
    assert compare_models([part], {"ours": rewards_that_are_right(0.9)}, {"paper": {"llmbar": 0.1}}) == []
    told = benchmark_record([part], {"ours": rewards_that_are_right(0.9)}, published={"paper": {"llmbar": 0.1}})
    assert [row["model"] for row in told["suites"]["llmbar"]["standing"]] == ["ours"]
    with pytest.raises(ConfigError, match="on lmbar, which is no benchmark that is known"):
        require_known({"paper": {"lmbar": 0.1}}, [one_set()])
    require_known({"paper": {"llmbar": 0.1, "rmb": 0.5}}, [one_set()])


def test_without_an_interval_models_share_a_place():
    found = Difference("llmbar", "a", "b", MetricValue(1.0, None, None, 3), None)
    assert places("llmbar", {"a": 1.0, "b": 0.0}, [found]) == {"a": 1, "b": 1}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[", "cannot be read as JSON"),
        ("{}", "does not hold published scores"),
        ('{"m": {"rmb": 64.3}}', "as shares of 1, not per cent"),
        ('{"m": {"rmb": true}}', "does not hold published scores"),
        ('{"m": 0.5}', "does not hold published scores"),
    ],
)
def test_published_scores_of_another_form_are_refused(tmp_path, text, said):
    (tmp_path / "published.json").write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_published(tmp_path / "published.json")


def test_a_set_of_ones_own_is_read_by_its_description(tmp_path):
    rows = [
        {"ask": f"q {at // 2}", "good": f"g {at}", "bad": [f"b {at}", "c"], "topic": "x" if at % 2 else "y"}
        for at in range(6)
    ]
    named = {"kind": "best-of-k", "prompt": "ask", "chosen": "good", "rejected": "bad", "group": "topic"}
    suite, source = read_own_suite(write_own_set(tmp_path, rows, **named))
    questions, missing = read_questions(suite, source)
    assert missing == {}
    assert [one.answers for one in questions] == [(f"g {at}", f"b {at}", "c") for at in range(6)]
    assert len({one.cluster for one in questions}) == 3
    rewards = [np.array([1.0, 0.0, 2.0 if one.group == "x" else 0.5]) for one in questions]
    scores = {name: float(value[0]) for name, value in suite.scores(questions, rewards)(np.ones((1, 6))).items()}
    assert scores == {"overall": 0.5, "y": 1.0, "x": 0.0}
    turns = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes?"},
        {"role": "user", "content": "so"},
    ]
    file = write_own_set(tmp_path, [{"prompt": turns, "chosen": ["a", "b"], "rejected": ["c"]}], kind="ties")
    [one] = read_questions(*read_own_suite(file))[0]
    assert (one.num_good, one.answers, len(one.prompt)) == (2, ("a", "b", "c"), 3)


def test_a_set_of_ones_own_may_have_system_texts_and_tools(tmp_path):
    row = {"prompt": "p", "chosen": "a", "rejected": "b", "system": "s", "tools": [{"name": "f"}]}
    [one] = read_questions(*read_own_suite(write_own_set(tmp_path, [row])))[0]
    assert [turn.role for turn in one.prompt] == ["tools", "system", "user"]
    [one] = read_questions(*read_own_suite(write_own_set(tmp_path, [row | {"tools": None}], group="system")))[0]
    assert (one.prompt, one.group) == ("p", "s")
    with pytest.raises(DataError, match="holds images"):
        read_questions(*read_own_suite(write_own_set(tmp_path, [row | {"image": "x.png"}])))


def test_places_may_begin_with_the_sign_of_the_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_own_set(tmp_path, [{"prompt": "p", "chosen": "a", "rejected": "b"}], file="~/rows.jsonl")
    [one] = read_sets(["~/mine.yaml"])
    assert (one.suite.name, len(one.questions)) == ("mine", 1)
    (tmp_path / "llmbar" / "Natural").mkdir(parents=True)
    row = {"input": "i", "output_1": "a", "output_2": "b", "label": 1}
    (tmp_path / "llmbar" / "Natural" / "dataset.json").write_text(json.dumps([row]))
    [one] = read_sets(["llmbar=~/llmbar"], partial=True)
    assert len(one.questions) == 1
    for nowhere in ("llmbar=~nobody-of-that-name/llmbar", "~nobody-of-that-name/mine.yaml"):
        with pytest.raises(ConfigError):
            read_sets([nowhere])


@pytest.mark.parametrize(
    ("described", "rows", "said"),
    [
        ({"kind": "list"}, [], "kind is 'list' and none of pairs, best-of-k, ties"),
        ({"kind": 3}, [], "kind is 3 and no text"),
        ({"name": "judgebench"}, [{"prompt": "p", "chosen": "a", "rejected": "b"}], "as a public benchmark is called"),
        ({"file": "a\0b"}, [], "there is no file"),
        ({"group": "topic"}, [{"prompt": "p", "chosen": "a", "rejected": "b", "topic": "overall"}], "the score of all"),
        ({"cluster": "id"}, [{"prompt": "p", "chosen": "a", "rejected": "b", "id": ""}], "'id' is missing"),
        ({"colour": "red"}, [], "'colour' is nothing that a set has"),
        ({"name": "../up"}, [], "has other characters than letters"),
        ({"file": "none.jsonl"}, [], "there is no file 'none.jsonl'"),
        ({}, [], "is empty"),
        ({}, [{"prompt": "p", "chosen": "a"}], "'rejected' is missing"),
        ({}, [{"prompt": 3, "chosen": "a", "rejected": "b"}], "'prompt' is neither a text nor a list of turns"),
        ({}, [{"prompt": "p", "chosen": "a", "rejected": "a"}], "an answer is both right and wrong"),
        ({"group": "topic"}, [{"prompt": "p", "chosen": "a", "rejected": "b"}], "'topic' is missing"),
        ({"kind": "best-of-k"}, [{"prompt": "p", "chosen": "a", "rejected": "b"}], "'rejected' is no list of texts"),
        ({"kind": "best-of-k"}, [{"prompt": "p", "chosen": "a", "rejected": []}], "'rejected' is no list of texts"),
    ],
)
def test_a_description_or_rows_that_do_not_fit_are_refused_in_words(tmp_path, described, rows, said):
    with pytest.raises((ConfigError, DataError), match=said):
        read_sets([str(write_own_set(tmp_path, rows, **described))])


@pytest.mark.slow
def test_the_command_shows_it_all_and_writes_the_training_pairs_that_are_clean(tmp_path):
    rows = [{"prompt": f"question {at}", "chosen": f"right {at}", "rejected": f"wrong {at}"} for at in range(12)]
    mine = write_own_set(tmp_path, rows)
    training = [
        *rows[:3],
        *({"prompt": f"other {at}", "chosen": "right so", "rejected": "wrong so"} for at in range(20)),
    ]
    pd.DataFrame(training).to_parquet(tmp_path / "train.parquet")
    (tmp_path / "published.json").write_text(json.dumps({"someone's": {"mine": 0.9}}))
    for seed in (0, 1):
        config = ModelConfig(name="tiny", max_seq_len=64)
        BradleyTerryRM.new(config, seed=seed, device=torch.device("cpu")).save(tmp_path / str(seed))
    words = ["--checkpoint", tmp_path / "0", "--suite", mine, "--against", tmp_path / "1"]
    words += ["--against", tmp_path / "published.json", "--train-data", tmp_path / "train.parquet"]
    words += ["--decontaminate", tmp_path / "clean.parquet", "--out", tmp_path / "r", "--json", tmp_path / "a.json"]
    done = CliRunner().invoke(app, ["benchmark", *map(str, words)])
    assert done.exit_code == 0, done.output
    assert "3 of its 12 prompts were seen in training (3 exactly, 0 nearly; 3 with an answer), by 3 " in done.output
    assert "20 of 23 training pairs share no prompt with these sets" in done.output
    assert {one.prompt for one in read_pairs(tmp_path / "clean.parquet")} == {f"other {at}" for at in range(20)}
    told = json.loads((tmp_path / "a.json").read_text())["suites"]["mine"]
    assert told["bag_of_words"]["score"] == 1.0
    assert {row["model"] for row in told["standing"]} == {str(tmp_path / "0"), str(tmp_path / "1"), "someone's"}
    for wrong, said in (
        (["--against", str(tmp_path / "0")], "names a model twice, or the checkpoint itself"),
        (["--against", f"{tmp_path}/../{tmp_path.name}/0"], "names a model twice, or the checkpoint itself"),
        (["--decontaminate", str(tmp_path / "new.parquet")], "name them with --train-data"),
    ):
        done = CliRunner().invoke(app, ["benchmark", "--checkpoint", str(tmp_path / "0"), "--suite", str(mine), *wrong])
        assert said in str(done.exception), done.output
