"""Counterfactual pairs: balanced, of the pairs they were made from, and readable as training data."""

from collections import Counter

import pytest

from rmcore.core.errors import DataError
from rmcore.data.readers.sources import load_pairs
from rmcore.data.table import write_converted
from rmcore.probes.repair import RULE_KEY, SHARE, repair_pairs
from rmcore.probes.rules import RULES


def test_pairs_stay_and_each_rule_gets_its_share(gold_pairs, tmp_path):
    rules = [RULES[name] for name in ("padding", "bullets", "off_topic")]
    mixed = repair_pairs(gold_pairs, rules)
    assert mixed == repair_pairs(gold_pairs, rules)
    assert mixed != repair_pairs(gold_pairs, rules, seed=1)
    added = [pair for pair in mixed if RULE_KEY in pair.metadata]
    assert sorted(pair.pair_id for pair in mixed if RULE_KEY not in pair.metadata) == sorted(
        pair.pair_id for pair in gold_pairs
    )
    assert Counter(pair.metadata[RULE_KEY] for pair in added) == dict.fromkeys(
        (rule.name for rule in rules), round(SHARE * len(gold_pairs))
    )
    for kind in ("parquet", "jsonl"):
        write_converted(mixed, tmp_path / f"mixed.{kind}")
        assert list(load_pairs(str(tmp_path / f"mixed.{kind}")).pairs) == mixed


def test_manner_is_edited_on_either_side_alike_and_the_label_stays(gold_pairs):
    originals = {pair.prompt: [] for pair in gold_pairs}
    for pair in gold_pairs:
        originals[pair.prompt].append((pair.chosen, pair.rejected))
    added = [pair for pair in repair_pairs(gold_pairs, [RULES["padding"]]) if RULE_KEY in pair.metadata]
    on_rejected = 0
    for pair in added:
        kept = [
            "rejected" if pair.chosen == chosen else "chosen"
            for chosen, rejected in originals[pair.prompt]
            if (pair.chosen == chosen and pair.rejected.startswith(rejected.rstrip()))
            or (pair.rejected == rejected and pair.chosen.startswith(chosen.rstrip()))
        ]
        assert kept
        on_rejected += kept[0] == "rejected"
    assert abs(2 * on_rejected - len(added)) <= 1


def test_a_fault_is_put_into_the_chosen_answer_which_is_preferred_to_it(gold_pairs):
    chosen = {(pair.prompt, pair.chosen) for pair in gold_pairs}
    elsewhere = {
        pair.chosen: {other.prompt for other in gold_pairs if other.chosen == pair.chosen} for pair in gold_pairs
    }
    added = [pair for pair in repair_pairs(gold_pairs, [RULES["off_topic"]]) if RULE_KEY in pair.metadata]
    assert added
    for pair in added:
        assert (pair.prompt, pair.chosen) in chosen
        assert elsewhere[pair.rejected] - {pair.prompt}


def test_a_rule_that_applies_to_nothing_is_said(gold_pairs):
    with pytest.raises(DataError, match="item_order applies to none of the 240 pairs"):
        repair_pairs(gold_pairs, [RULES["item_order"]])
