"""The audit counts what is there, on data made with known faults and on the public data."""

from operator import eq

import pytest

from rmcore.data.audit import audit, format_audit, longer_wins
from rmcore.data.pair import Message, PreferencePair
from rmcore.data.readers.records import RejectedRow
from rmcore.data.readers.sources import LoadedPairs

CLEAN = [
    PreferencePair(f"prompt {i}", f"chosen {i}" + "x" * (i % 2), f"reject {i}" + "x" * ((i + 1) % 2)) for i in range(10)
]


def test_clean_data_has_no_warnings():
    result = audit({"train": CLEAN[:7], "test": CLEAN[7:]}, [])
    assert result["warnings"] == []
    assert (result["num_pairs"], result["num_prompts"], result["num_rows"]) == (10, 10, 0)
    assert result["duplicates"] == {"num_exact": 0, "num_contradictory": 0}
    assert result["leakage"] == [
        {
            "splits": ["train", "test"],
            "num_prompts": 0,
            "num_conversations": 0,
            "num_completions": 0,
            "share_of_completions": 0.0,
        }
    ]
    assert format_audit(result).startswith("No warnings.")


def test_duplicates_and_contradictions_are_counted():
    pair, other = CLEAN[0], CLEAN[1]
    swapped = PreferencePair(other.prompt, other.rejected, other.chosen)
    alike = PreferencePair("p", "Yes  sir", "yes sir")
    result = audit({"all": [*CLEAN, pair, pair, swapped, alike]}, [])
    assert result["duplicates"] == {"num_exact": 2, "num_contradictory": 1}
    assert result["identical_sides"] == {"num_rejected_rows": 0, "num_pairs_alike": 1}
    assert result["splits"]["all"]["pairs_per_prompt"]["max"] == 3
    assert "both ways round" in "".join(result["warnings"])


def test_pairs_with_the_strings_of_control_tokens_are_counted_by_string():
    typed = [
        PreferencePair("stop<|im_end|>\n<|im_start|>system", "a", "b"),
        PreferencePair((Message("user", "[INST] hi"),), "c </s> </s>", "d <|im_end|>"),
        PreferencePair("if a < b | c > d", "<think>so</think> [1]", "<b>e</b>"),
    ]
    result = audit({"train": typed, "test": CLEAN}, [])
    strings = {"<|im_end|>": 2, "<|im_start|>": 1, "[INST]": 1, "</s>": 1}
    assert result["control_tokens"] == {"num_pairs": 2, "strings": strings}
    assert "2 pairs hold strings of control tokens (<|im_end|> in 2," in "".join(result["warnings"])
    assert "pairs with control tokens as text" in format_audit(result)


DOUBTFUL = {
    "num_answers_with_the_prompt": ("begin with their whole prompt", [("Name it. ", "Name it. A", "Name it.\nB")] * 2),
    "num_words_for_nothing": ("alone for a text", [("p", "a", "nan"), ("p", "None", "b"), ("NULL", "a", "b")]),
    "num_against_scores": (
        "a lower score",
        [
            ("p", "a", "b", None, scores)
            for scores in (
                {"score_chosen": 1, "score_rejected": 2},
                {"chosen-rating": "3.5", "rejected-rating": "4"},
                {"n": 1, "reward_of_chosen": -2.0, "reward_of_rejected": -1.0},
            )
        ],
    ),
    "num_of_equal_scores": ("the same score", [("p", "a", "b", None, {"chosen_score": 3, "rejected_score": 3.0})]),
    "num_negative_margins": ("a negative margin", [("p", "a", "b", margin) for margin in (-0.5, -100.0)]),
}
SUPPORTED = [
    ("Name it.", "Name it", "It is: Name it."),
    ("p", "Nothing.", "null and void", 0.0),
    ("p", "a", "b", 2.0, {"chosen_score": 3, "rejected_score": "?", "chosen_words": 1, "rejected_words": 2}),
    ("p", "a", "b", None, {"score_chosen": 2, "score_rejected": 1, "chosen_rating": None, "rejected_rating": 5}),
]


@pytest.mark.parametrize("name", DOUBTFUL)
def test_what_casts_doubt_on_labels_is_counted_and_said(name):
    said, fields = DOUBTFUL[name]
    pairs = [PreferencePair(*each) for each in (*fields, *SUPPORTED)]
    result = audit({"train": pairs[:1], "test": pairs[1:]}, [])
    count = len(fields) * (2 if "answers" in name else 1)
    assert result["doubtful"] == dict.fromkeys(DOUBTFUL, 0) | {name: count}
    (sentence,) = [warning for warning in result["warnings"] if said in warning]
    assert sentence.startswith(f"{count} of ")
    assert f"WARNING  {sentence}" in format_audit(result)


def test_sides_and_prompts_that_look_the_same_are_counted_and_said():
    twins = [PreferencePair(prompt, "Café", "cafe\u0301\u200b") for prompt in ("Où ?", "Ou\u0300 \u200b?\ufeff")]
    result = audit({"train": [*CLEAN, twins[0]], "test": twins[1:]}, [])
    assert (result["num_prompts"], result["leakage"][0]["num_prompts"]) == (11, 1)
    assert result["identical_sides"]["num_pairs_alike"] == 2
    assert [warning for warning in result["warnings"] if warning.startswith("2 of 12 pairs have sides that differ in")]


def test_leakage_is_found_through_case_and_white_space():
    leaked = PreferencePair("  PROMPT 1", "an answer of its own", "Chosen  1X")
    result = audit({"train": CLEAN, "validation": [], "test": [leaked]}, [])
    by_splits = {tuple(shared["splits"]): shared for shared in result["leakage"]}
    assert set(by_splits) == {("train", "validation"), ("train", "test"), ("validation", "test")}
    assert by_splits["train", "test"]["num_prompts"] == 1
    assert by_splits["train", "test"]["num_completions"] == 1
    assert by_splits["train", "test"]["share_of_completions"] == 0.5
    assert by_splits["validation", "test"]["num_prompts"] == 0
    text = format_audit(result)
    assert text.startswith("WARNING  1 prompts are in both train and test")


def test_turns_of_one_dialogue_in_two_splits_are_leakage():
    later = (Message("user", "Prompt 1"), Message("assistant", "Hm."), Message("user", "Go on."))
    result = audit({"train": CLEAN, "test": [PreferencePair(later, "an answer", "another")]}, [])
    assert (result["num_prompts"], result["num_conversations"]) == (11, 10)
    assert (result["leakage"][0]["num_prompts"], result["leakage"][0]["num_conversations"]) == (0, 1)
    assert format_audit(result).startswith("WARNING  1 dialogues of test began like one of train")


def test_rejected_rows_are_counted_by_reason_over_all_sources():
    rejected = [RejectedRow(1, "empty prompt", ""), RejectedRow(2, "identical sides", "")]
    loaded = [
        LoadedPairs(CLEAN, rejected, 12, "plain strings", "a.csv"),
        LoadedPairs(CLEAN, rejected[:1], 11, "SHP", "b.csv"),
    ]
    result = audit({"all": CLEAN}, loaded)
    assert result["rejected"] == {"empty prompt": 2, "identical sides": 1}
    assert (result["num_rows"], result["num_rejected"]) == (23, 3)
    assert result["identical_sides"]["num_rejected_rows"] == 1
    assert "3 of 23 rows (13.0%) were set aside" in result["warnings"][0]
    assert "a.csv: plain strings, 12 rows read, 10 pairs, 2 rows set aside" in format_audit(result)


def test_longer_wins_does_not_depend_on_order_and_turns_round_with_the_labels():
    chosen, rejected = [1 + i % 7 for i in range(200)], [1 + i % 5 for i in range(200)]
    forward, backward = longer_wins(chosen, rejected), longer_wins(rejected[::-1], chosen[::-1])
    assert forward["accuracy"] + backward["accuracy"] == pytest.approx(1)
    assert forward["num_ties"] == backward["num_ties"] == sum(map(eq, chosen, rejected)) > 0
    assert longer_wins([2], [2]) == {"accuracy": 0.5, "num_pairs": 1, "num_ties": 1}
    assert longer_wins([], []) == {"accuracy": None, "num_pairs": 0, "num_ties": 0}
