"""What is left out of usable pairs: caps keep the first ones, what is held out is not trained on; all is counted."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmcore.config.data import DataConfig
from rmcore.core.errors import DataError
from rmcore.data.audit import audit, format_audit
from rmcore.data.pair import Message, PreferencePair, cap_pairs
from rmcore.data.readers.layouts import recognise
from rmcore.data.readers.sources import LoadedPairs, cap_prompts, exclude_held_out_conversations, load_pairs
from rmcore.data.table import write_pairs
from rmcore.stages.prepare import load_splits


def pair(prompt, number):
    return PreferencePair(f"prompt {prompt}", f"good {number}", f"bad {number}")


@given(st.lists(st.integers(0, 4), max_size=30), st.integers(1, 5))
def test_each_prompt_keeps_its_first_pairs_in_order(prompts, most):
    pairs = [pair(prompt, number) for number, prompt in enumerate(prompts)]
    capped = cap_prompts(LoadedPairs(pairs, [], len(pairs), "plain", "x"), most)
    counts = Counter(one.prompt for one in pairs)
    assert Counter(one.prompt for one in capped.pairs) == {name: min(most, count) for name, count in counts.items()}
    assert capped.pairs == [one for one in pairs if one in capped.pairs]
    assert capped.num_over_cap == len(pairs) - len(capped.pairs)
    assert cap_pairs(pairs, most) == capped.pairs
    assert cap_pairs(pairs, None) == pairs
    for prompt in counts:
        own = [one for one in pairs if one.prompt == prompt]
        assert [one for one in capped.pairs if one.prompt == prompt] == own[:most]


@pytest.mark.parametrize(("most", "expected"), [(None, (40, 40)), (2, (20, 40))])
def test_held_out_pairs_of_their_own_source_are_not_capped(tmp_path: Path, most, expected):
    pairs = [pair(number % 10, number) for number in range(40)]
    held_out = [PreferencePair(f"other {number % 10}", f"good {number}", "bad") for number in range(40)]
    write_pairs(pairs, tmp_path / "a.parquet")
    write_pairs(held_out, tmp_path / "b.parquet")
    config = DataConfig(
        source=str(tmp_path / "a.parquet"), eval_source=str(tmp_path / "b.parquet"), pairs_per_prompt=most
    )
    splits, _ = load_splits(config, seed=0)
    assert (len(splits["train"]) + len(splits["validation"]), len(splits["test"])) == expected


@pytest.mark.parametrize("extra", [{}, {"test_seed": 3}, {"eval_limit": 9}])
def test_held_out_prompts_of_the_same_source_keep_their_pairs_whatever_the_cap(tmp_path: Path, extra):
    write_pairs([pair(number % 30, number) for number in range(120)], tmp_path / "a.parquet")
    config = DataConfig(source=str(tmp_path / "a.parquet"), test_fraction=0.3, **extra)
    every, _ = load_splits(config, seed=0)
    for most in (1, 2):
        splits, (loaded,) = load_splits(config.model_copy(update={"pairs_per_prompt": most}), seed=0)
        assert splits["test"] == every["test"]
        for name in ("train", "validation"):
            assert splits[name] == cap_pairs(every[name], most)
        if "eval_limit" not in extra:
            assert loaded.num_over_cap == sum(len(every[name]) - len(splits[name]) for name in ("train", "validation"))


def dialogue(number, *, later):
    turns = (Message("user", f"prompt {number}"), Message("assistant", "Hm."), Message("user", "Go on."))
    return PreferencePair(turns if later else turns[:1], f"good {number}", "bad")


def test_a_cap_is_of_prompts_and_not_of_conversations():
    pairs = [dialogue(1, later=later) for later in (False, True, True)]
    capped = cap_prompts(LoadedPairs(pairs, [], 3, "message lists", "x"), 1)
    assert (capped.pairs, capped.num_over_cap) == (pairs[:2], 1)


@given(st.sets(st.integers(0, 59), max_size=40), st.booleans())
def test_training_pairs_of_held_out_conversations_are_taken_out_and_counted(tested, later):
    training = LoadedPairs([pair(number, number) for number in range(60)], [], 60, "plain", "a")
    held_out = LoadedPairs([dialogue(number, later=later) for number in tested], [], len(tested), "message lists", "b")
    left = exclude_held_out_conversations(training, held_out)
    assert left.pairs == [one for one in training.pairs if int(one.prompt.split()[1]) not in tested]
    assert left.num_held_out == len(tested)
    assert left.notices() == (
        [f"{len(tested)} of 60 pairs of a share their prompt, or a dialogue's first user turn, with held-out pairs: "
         "taken out of training."]
        if tested
        else []
    )  # fmt: skip


def test_too_little_left_to_train_on_is_refused():
    training = LoadedPairs([pair(number, number) for number in range(30)], [], 30, "plain", "a.csv")
    few = replace(training, pairs=training.pairs[:5])
    other = LoadedPairs([PreferencePair("other", "good", "bad")], [], 1, "plain", "b.csv")
    assert exclude_held_out_conversations(few, other) == few  # few, but nothing was taken out
    with pytest.raises(DataError, match=r"11 of 30 pairs of a.csv .* Without them 19 prompts are left"):
        exclude_held_out_conversations(training, replace(training, pairs=training.pairs[:11], source="b.csv"))


def test_prepared_data_say_what_was_taken_out(tmp_path: Path):
    write_pairs([pair(number, number) for number in range(60)], tmp_path / "a.parquet")
    write_pairs([dialogue(number, later=True) for number in range(5)], tmp_path / "b.parquet")
    config = DataConfig(source=str(tmp_path / "a.parquet"), eval_source=str(tmp_path / "b.parquet"))
    splits, loaded = load_splits(config, seed=0)
    found = audit(splits, loaded)
    assert (len(splits["train"]) + len(splits["validation"]), len(splits["test"])) == (55, 5)
    assert [one["num_held_out"] for one in found["sources"]] == [5, 0]
    assert [one["num_conversations"] for one in found["leakage"]] == [0, 0, 0]
    assert "NOTE     5 of 60 pairs of" in format_audit(found)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_a_cap_on_a_rows_pairs_draws_the_same_wherever_the_row_stands(tmp_path: Path, order):
    rows = [{"prompt": f"p{i}", "answers": list("abcdefgh"), "ranks": [*range(8)]} for i in range(3)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(rows[place]) + "\n" for place in order))
    loaded = load_pairs(str(tmp_path / "a.jsonl"), pairs_per_row=5)
    alone = {row["prompt"]: recognise(row, most=5).parse(row).pairs for row in rows}
    assert loaded.pairs == [pair for place in order for pair in alone[f"p{place}"]]
    assert loaded.num_over_row_cap == 3 * (28 - 5)
    (notice,) = audit({"all": loaded.pairs}, [loaded])["notices"]
    assert notice.startswith("69 of 84 pairs of")


def test_a_row_gives_at_most_all_pairs_of_nine_answers(tmp_path: Path):
    rows = [{"prompt": f"p{i}", "answers": list("abcdefghij"), "ranks": [*range(10)]} for i in range(3)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(source=str(tmp_path / "a.jsonl"), test_fraction=0.4)
    assert sum(map(len, load_splits(config, seed=0)[0].values())) == 3 * 36
