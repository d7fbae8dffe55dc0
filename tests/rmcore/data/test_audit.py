"""The audit counts what is there, on data made with known faults and on the public data."""

import json
from operator import eq

import pytest

from rmcore.data.audit import audit, format_audit, longer_wins
from rmcore.data.pair import Message, PreferencePair
from rmcore.data.readers.sources import LoadedPairs, RejectedRow, load_pairs

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


def test_lengths_and_margins():
    pairs = [PreferencePair("p", "c" * i, "r", float(i) if i > 5 else None) for i in range(1, 1202)]
    split = audit({"all": pairs}, [])["splits"]["all"]
    assert split["characters"]["chosen"] == {
        "p5": 61.0, "p25": 301.0, "p50": 601.0, "p75": 901.0, "p95": 1141.0, "p99": 1189.0, "mean": 601.0, "max": 1201.0
    }  # fmt: skip
    assert (split["target_margin"]["num_pairs"], split["target_margin"]["max"]) == (1196, 1201.0)


@pytest.mark.slow
def test_public_data_has_its_known_length_bias_and_no_leakage(data_folder):
    folder = data_folder
    train, test = (load_pairs(str(folder / f"alpacaeval_{name}.parquet")) for name in ("train", "test"))
    result = audit({"train": train.pairs, "test": test.pairs}, [train, test])
    assert json.loads(json.dumps(result)) == result
    assert (result["splits"]["train"]["num_pairs"], result["splits"]["train"]["num_prompts"]) == (10_591, 550)
    assert (result["splits"]["test"]["num_pairs"], result["splits"]["test"]["num_prompts"]) == (2_664, 137)
    assert result["splits"]["train"]["longer_wins"]["accuracy"] == pytest.approx(0.755, abs=0.001)
    assert result["leakage"][0]["num_prompts"] == 0
    assert result["control_tokens"] == {"num_pairs": 4, "strings": {"</s>": 4}}  # a policy that wrote its own end
    subjects = [warning.split(":")[0] for warning in result["warnings"][1:]]
    assert subjects == ["length bias in train", "length bias in test"]
