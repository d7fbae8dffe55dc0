"""Files as other programs and public data sets write them give the pairs that a reader of them would write down.

The files are in `fixtures/`; their rows are invented.
"""

import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rmcore.core.errors import DataError
from rmcore.data.pair import Message
from rmcore.data.readers.columns import USUAL_COLUMNS, ColumnMap
from rmcore.data.readers.fields import RowRejected
from rmcore.data.readers.files import read_file
from rmcore.data.readers.layouts import recognise
from rmcore.data.readers.sources import load_pairs
from source_sample import pair_of, pairs_of

FIXTURES = Path(__file__).with_name("fixtures")
FRUIT, TOOL, BIRD = "Name a fruit.", "Name a tool.", "Name a bird."


def fruit(chosen="An apple.", rejected="A chair.", margin=None, *, prompt=FRUIT):
    return prompt, chosen, rejected, margin


def tool(chosen="A hammer.", rejected="A cloud.", margin=None, *, prompt=TOOL):
    return prompt, chosen, rejected, margin


def dialogue(*turns):
    """A text is the user's turn."""
    return tuple(Message(*turn) if isinstance(turn, tuple) else Message("user", turn) for turn in turns)


BRIEF, THING = ("system", "Be brief."), "Name a thing.\na fruit"
STRINGS, LISTS, RANKED, TWO = "plain strings", "message lists", "ranked answers", "two answers and a winner"
EXPECTED = {
    "capitals.csv": (STRINGS, [fruit(margin=2.0), tool(rejected="A cloud, maybe.", margin=1.0)], {}),
    "semicolons.csv": (STRINGS, [fruit("An apple, for one."), tool(rejected="A cloud; maybe.")], {}),
    "tabs.csv": (STRINGS, [fruit("An apple, for one.")], {}),
    "tabs.tsv": (STRINGS, [fruit("An apple; or a pear.")], {}),
    "one_message.jsonl": (LISTS, [fruit()], {}),
    "alpaca.jsonl": (STRINGS, [fruit(prompt=THING), tool(), tool()], {"wrong type": 1}),
    "alpaca_ranked.jsonl": (RANKED, [fruit(prompt=THING, margin=2.0)], {}),
    "sharegpt.jsonl": (LISTS, [fruit(), tool(prompt=dialogue(BRIEF, TOOL))], {"missing value": 1}),
    "messages_asked.jsonl": (STRINGS, [fruit()], {}),
    "swift.jsonl": ("ms-swift", [fruit(prompt=dialogue(BRIEF, FRUIT)), fruit()],
                    {"empty rejected": 1, "no final assistant turn": 1, "one side twice": 1}),
    "several_rejected.jsonl": ("one chosen and several rejected",
                               [fruit(), fruit(rejected="A road."), tool(), tool()],
                               {"fewer than two answers": 1, "missing value": 1}),
    "role_names.jsonl": (LISTS, [fruit(), tool()], {}),
    "openai.jsonl": ("OpenAI preferences", [fruit(prompt=dialogue(BRIEF, FRUIT)), tool()], {"empty rejected": 1}),
    "ultrafeedback.jsonl": ("raw UltraFeedback", [fruit(margin=4.0), fruit("A pear.", margin=4.0)], {}),
    "ultrafeedback_scores.json": ("raw UltraFeedback", [fruit(margin=6.5)], {}),
    "nectar.jsonl": ("Nectar", [fruit(rejected="A pear."), fruit("A pear."), fruit(),
                                tool(prompt=dialogue("Hello.", ("assistant", "Hi."), TOOL))],
                     {"fewer than two answers": 1, "missing value": 1}),
    "label_studio.json": ("Label Studio", [fruit(), fruit("A chair.", "An apple."), tool()], {"not labelled": 2}),
    "argilla.json": ("Argilla", [fruit(rejected="A pear."), fruit(), fruit("A pear."), fruit("A pear."), fruit()],
                     {"not labelled": 1}),
    "argilla_ratings.jsonl": ("Argilla", [fruit(margin=4.0)], {"not labelled": 1}),
    "argilla_choice.json": ("Argilla", [fruit()], {}),
    "lmarena_55k.csv": ("LMArena", [fruit(), fruit("A pike.", "A fork.", prompt=dialogue(
        "Name a fish.", ("assistant", "A carp."), "Another."))], {"prompts differ": 1, "empty rejected": 1}),
    "lmarena_winner.jsonl": (TWO, [fruit(), tool()], {}),
    "lmarena_conversations.jsonl": (TWO, [fruit()], {}),
    "a_b.csv": (TWO, [fruit(), tool()], {"winner not understood": 1, "not labelled": 1, "empty rejected": 1,
                                         "identical sides": 1}),
    "answers_preference.jsonl": (TWO, [fruit(), tool()], {}),
    "helpsteer2.jsonl": ("HelpSteer preferences", [fruit(margin=3.0), tool(margin=1.0)], {}),
    "helpsteer3.jsonl": ("HelpSteer preferences", [fruit(margin=2.0, prompt=dialogue(
        FRUIT, ("assistant", "A pear."), "Another."))], {}),
    "ranks.jsonl": (RANKED, [fruit(), tool(), tool("A saw."), (BIRD, "A robin.", "A stone.", None)],
                    {"answers and ranks differ in number": 1}),
    "helpsteer2_grades.jsonl": ("graded answers", [fruit(margin=4.0), tool(margin=2.0)],
                                {"grade is not a finite number": 1, "not labelled": 1}),
    "kto.jsonl": ("graded answers", [fruit(margin=1.0)], {"empty answer": 1}),
    "best_of_k.jsonl": ("best of K", [fruit(), fruit(rejected="A road."), tool()],
                        {"the best answer is none of the answers": 1}),
    "annotators.csv": (TWO, [tool(), fruit()], {"weight is not a finite number above 0": 1}),
}  # fmt: skip


def texts(loaded):
    return [(pair.prompt, pair.chosen, pair.rejected, pair.target_margin) for pair in loaded.pairs]


@pytest.mark.parametrize("name", EXPECTED)
def test_a_file_of_each_kind_gives_its_pairs_and_counts_the_rest(name):
    layout, pairs, rejected = EXPECTED[name]
    weighted = ColumnMap(weight="weight") if name == "annotators.csv" else USUAL_COLUMNS
    loaded = load_pairs(str(FIXTURES / name), columns=weighted)
    assert loaded.layout == layout
    assert sorted(texts(loaded), key=str) == sorted(pairs, key=str)
    assert Counter(row.reason for row in loaded.rejected) == rejected


def test_what_belongs_to_a_side_follows_it():
    assert {path.name for path in FIXTURES.iterdir()} == EXPECTED.keys() | {"cp1252.csv", "other_names.csv"}
    first, second = load_pairs(str(FIXTURES / "lmarena_winner.jsonl")).pairs
    assert first.metadata == {"id": "1", "chosen_model": "m1", "rejected_model": "m2", "language": "English"}
    assert (second.metadata["chosen_model"], second.metadata["rejected_model"]) == ("m2", "m1")
    assert load_pairs(str(FIXTURES / "label_studio.json")).pairs[0].metadata == {"subset": "food", "annotator": 1}


def test_another_encoding_is_refused_with_the_command_that_converts_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my file.csv").write_bytes((FIXTURES / "cp1252.csv").read_bytes())
    with pytest.raises(
        DataError, match=r"my file\.csv is not UTF-8: 2 of 3 rows hold other bytes, row 1 first"
    ) as caught:
        load_pairs("my file.csv")
    command = "iconv -f CP1252 -t UTF-8 'my file.csv' > 'my file.utf8.csv'"
    assert command in str(caught.value)
    if shutil.which("iconv"):
        subprocess.run(command, shell=True, check=True)  # noqa: S602 - as a user pastes it
        assert load_pairs("my file.utf8.csv").pairs[0].chosen == "Öl ist keine."


@pytest.mark.parametrize("bad", [1, 2])
def test_few_rows_of_other_bytes_are_damage_that_is_told(tmp_path, bad):
    path = tmp_path / "data.csv"
    rows = [f"p {i},{'ä' if i < bad else 'a'},b\n" for i in range(60)]
    path.write_bytes(("prompt,chosen,rejected\n" + "".join(rows)).encode("cp1252"))
    loaded = load_pairs(str(path))
    assert len(loaded.pairs) == 60 - bad
    assert [s for s in loaded.notices() if f"{bad} of 60 rows" in s and "iconv -f CP1252" in s]


PASTED = "--set data.prompt_column=question --set data.chosen_column=good --set data.rejected_column=bad"


def test_what_is_not_recognised_comes_with_a_mapping_to_paste():
    path = str(FIXTURES / "other_names.csv")
    with pytest.raises(DataError) as caught:
        load_pairs(path)
    assert PASTED in str(caught.value)
    named = dict(option.split(".")[1].split("=") for option in PASTED.split() if "=" in option)
    columns = ColumnMap(named["prompt_column"], named["chosen_column"], named["rejected_column"])
    assert texts(load_pairs(path, columns=columns)) == [fruit()]


def test_a_mapping_wins_over_recognition():
    row = {"prompt": "p", "response_a": "a", "response_b": "b", "winner": "a"}
    columns = ColumnMap(chosen="response_b", rejected="response_a")
    (pair,) = pairs_of(row, columns)
    assert (recognise(row, columns).name, pair.chosen, pair.rejected) == ("plain strings", "b", "a")
    row = {"history": "p", "human_ref_A": "a", "human_ref_B": "b", "labels": 1, "question": "q", "context": "c"}
    assert recognise(row).name == "SHP"  # columns that another layout does not read are no two prompts
    row = {"q": "p", "a": "x", "b": "y", "winner": "B"}
    (pair,) = pairs_of(row, ColumnMap(prompt="q"))
    assert (pair.prompt, pair.chosen) == ("p", "y")


@pytest.mark.parametrize("name", ["lmarena_winner.jsonl", "helpsteer2.jsonl", "swift.jsonl"])
def test_a_further_column_is_metadata_whatever_it_is_called(name):
    row = next(read_file(FIXTURES / name)).fields
    further = {"responses": ["x", "y"]}
    plain, pair = pair_of(row), pair_of(row | further)
    assert (pair.prompt, pair.chosen, pair.rejected) == (plain.prompt, plain.chosen, plain.rejected)
    assert pair.metadata == plain.metadata | further


@pytest.mark.parametrize("winner", [True, "A > B", "response_c", "(1)", {"a": 1}])
def test_a_winner_that_means_nothing_costs_its_row(winner):
    row = {"prompt": "p", "answer_1": "a", "answer_2": "b", "winner": winner}
    with pytest.raises(RowRejected, match="winner not understood"):
        pairs_of(row)


keys = st.sampled_from(["messages", "role", "content", "response", "Rating", "selected", "value", "rank", "x"])
values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | st.sampled_from(["", "a", "left", "tie", "[1]"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=6,
)
ROWS = [record.fields for name in sorted(EXPECTED) for record in read_file(FIXTURES / name)]


def damaged(value, data):
    """The value with another one somewhere in it, or with something missing."""
    if isinstance(value, dict) and value and data.draw(st.integers(0, 4)):
        key = data.draw(st.sampled_from(sorted(value)))
        if not data.draw(st.integers(0, 9)):
            return {name: item for name, item in value.items() if name != key}
        return {**value, key: damaged(value[key], data)}
    if isinstance(value, list) and value and data.draw(st.integers(0, 4)):
        place = data.draw(st.integers(0, len(value) - 1))
        return [*value[:place], damaged(value[place], data), *value[place + 1 :]]
    return data.draw(values)


@pytest.mark.slow
@settings(max_examples=300)
@given(st.data())
def test_a_damaged_row_gives_pairs_or_is_refused(data):
    whole = data.draw(st.sampled_from(ROWS))
    row = damaged(whole, data)
    for sample in (whole, row):
        if not isinstance(row, dict):  # set aside by the reader of the file
            return
        try:
            layout = recognise(sample)
            for label in layout.unfold(layout.columns.rename(row)):
                found = layout.parse(label)
                assert found.pairs or found.observation
        except DataError:  # RowRejected, no layout, or two meanings
            continue
