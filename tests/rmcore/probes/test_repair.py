"""Counterfactual pairs: balanced, of the pairs they were made from, and readable as training data."""

from collections import Counter

import pytest

from rmcore.core.errors import DataError
from rmcore.data.readers.sources import load_pairs
from rmcore.data.table import write_converted
from rmcore.probes.rules import RULE_KEY, RULES, SHARE, repair_pairs


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


def added_by(pairs, rule):
    return [pair for pair in repair_pairs(pairs, [RULES[rule]]) if RULE_KEY in pair.metadata]


def test_a_pair_differs_in_the_edit_alone_and_is_labelled_as_the_rule_expects(gold_pairs):
    answers = {(pair.prompt, text) for pair in gold_pairs for text in (pair.chosen, pair.rejected)}
    rejected = {(pair.prompt, pair.rejected) for pair in gold_pairs}
    padded = added_by(gold_pairs, "padding")
    for pair in padded:
        assert (pair.prompt, pair.chosen) in answers
        assert pair.rejected.startswith(pair.chosen.rstrip())
    assert sum((pair.prompt, pair.chosen) in rejected for pair in padded) == pytest.approx(len(padded) / 2, abs=3)
    both = Counter((pair.prompt, pair.chosen, pair.rejected) for pair in added_by(gold_pairs, "heading"))
    assert both == Counter((prompt, second, first) for prompt, first, second in both.elements())
    assert all((prompt, first) in answers or (prompt, second) in answers for prompt, first, second in both)


def test_a_fault_is_put_into_the_chosen_answer_which_is_preferred_to_it(gold_pairs):
    chosen = {(pair.prompt, pair.chosen) for pair in gold_pairs}
    elsewhere = {
        pair.chosen: {other.prompt for other in gold_pairs if other.chosen == pair.chosen} for pair in gold_pairs
    }
    for pair in added_by(gold_pairs, "off_topic"):
        assert (pair.prompt, pair.chosen) in chosen
        assert elsewhere[pair.rejected] - {pair.prompt}


def test_a_rule_that_applies_to_nothing_is_said(gold_pairs):
    with pytest.raises(DataError, match="item_order applies to none of the 240 pairs"):
        repair_pairs(gold_pairs, [RULES["item_order"]])
