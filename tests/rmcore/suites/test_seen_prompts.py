"""Which prompts of a set training has seen, and sets of one's own."""

import json
import os
import shutil

import numpy as np
import pandas as pd
import pytest
import torch

from capability_samples import sample_of
from command_line import rm_opt, succeeded
from rmcore.config.model import ModelConfig
from rmcore.core.errors import ConfigError, DataError
from rmcore.core.manifests import FORMAT, FORMAT_FILE
from rmcore.data.pair import Message, PreferencePair
from rmcore.data.table import read_pairs, write_pairs
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.stages.prepared import pairs_of_training, seen_by_checkpoint
from rmcore.suites.question import Question, read_questions
from rmcore.suites.record import find_overlap
from rmcore.suites.sets import read_own_suite, read_sets

write_own_set = sample_of("suites").write_own_set


def question(number, prompt):
    return Question(str(number), prompt, ("good", "bad"), 1, "Natural", str(prompt))


def pair(prompt, chosen="one answer", rejected="another"):
    return PreferencePair(prompt, chosen, rejected)


def test_a_prompt_is_seen_whatever_its_case_space_form_and_punctuation():
    asked = ["How  are YOU?", "Cafe\u0301, please", "3 - 2", "3 + 2", "how are they", "..."]
    turns = (Message("user", "hi"), Message("assistant", "yes"), Message("user", "and now?"))
    questions = [question(number, prompt) for number, prompt in enumerate([*asked, turns, "and now?"])]
    pairs = [
        pair("unrelated"), pair("how are you", "good", "else"), pair("(Caf\u00e9 please!)"), pair("3 - 2?"), pair("?!"),
        pair(turns, "x", "bad"),
    ]  # fmt: skip
    found = find_overlap(pairs, questions)
    assert found.seen.tolist() == [True, True, True, False, False, False, True, False]
    assert found.answers.tolist() == [True, False, False, False, False, False, True, False]
    assert found.pairs.tolist() == [False, True, True, True, False, True]


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


@pytest.mark.parametrize(
    ("described", "rows", "said"),
    [
        ({"kind": "list"}, [], "kind is 'list' and none of pairs, best-of-k, ties"),
        ({"name": "judgebench"}, [{"prompt": "p", "chosen": "a", "rejected": "b"}], "as a public benchmark is called"),
        ({"file": "a\0b"}, [], "there is no file"),
        ({"group": "topic"}, [{"prompt": "p", "chosen": "a", "rejected": "b", "topic": "overall"}], "the score of all"),
        ({"cluster": "id"}, [{"prompt": "p", "chosen": "a", "rejected": "b", "id": ""}], "'id' is missing"),
        ({"kind": 3}, [], "kind is 3 and no text"),
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
    config = ModelConfig(name="tiny", max_seq_len=64)
    BradleyTerryRM.new(config, seed=0, device=torch.device("cpu")).save(tmp_path / "model")
    words = ["benchmark", "--checkpoint", tmp_path / "model", "--suite", mine, "--out", tmp_path / "r"]
    known = ["--train-data", tmp_path / "train.parquet", "--json", tmp_path / "a.json"]
    said = succeeded(*words, *known, "--decontaminate", tmp_path / "clean.parquet")
    assert "3 of its 12 prompts were seen in training (3 with an answer), by 3 " in said
    assert "20 of 23 training pairs share no prompt with these sets" in said
    assert {one.prompt for one in read_pairs(tmp_path / "clean.parquet")} == {f"other {at}" for at in range(20)}
    told = json.loads((tmp_path / "a.json").read_text())["suites"]["mine"]
    assert told["overlap"]["num_seen"] == 3
    assert "name them with --train-data" in rm_opt(*words, "--decontaminate", tmp_path / "new.parquet").err


def test_a_checkpoint_is_known_wherever_it_is_named_from(tmp_path, monkeypatch):
    trained, prepared = tmp_path / "store" / "train" / "a-1", tmp_path / "store" / "prepare" / "b-2"
    trained.mkdir(parents=True)
    prepared.mkdir(parents=True)
    (tmp_path / "store" / FORMAT_FILE).write_text(FORMAT)
    (trained / "MANIFEST.json").write_text(json.dumps({"inputs": {"upstream": {"prepare": "d"}}}))
    (prepared / "MANIFEST.json").write_text(json.dumps({"digest": "d"}))
    write_pairs([pair("Seen?")], prepared / "train.parquet")
    for folder in (tmp_path, tmp_path / "store", trained.parent, trained):
        monkeypatch.chdir(folder)
        for named in (trained / "best", os.path.relpath(trained / "best")):
            assert seen_by_checkpoint(str(named)) == {"seen"}
            assert len(list(pairs_of_training(str(named)))) == 1
    shutil.copytree(trained, tmp_path / "models" / "copy")
    (tmp_path / "store" / FORMAT_FILE).unlink()  # an earlier version's, whose tables may be other ones
    for asked in (seen_by_checkpoint, pairs_of_training):
        with pytest.raises(ConfigError, match=r"written by another version of rm-opt.*from a copy of its folder"):
            asked(str(trained / "best"))
        assert asked(str(tmp_path / "models" / "copy" / "best")) is None
    (tmp_path / "store" / FORMAT_FILE).write_text(FORMAT)
    (prepared / "MANIFEST.json").write_text("{")
    assert seen_by_checkpoint(str(trained / "best")) is None
