"""What is said of a model's mistakes: which they are, and that every number is of the model that was given."""

import json

import numpy as np
import pytest

from rmcore.core.errors import DataError
from rmcore.explain import record
from rmcore.explain.record import explain_alone, explain_mistakes
from rmcore.models.reward_model import BradleyTerryRM


@pytest.fixture(scope="module")
def rm(tiny_folder):
    return BradleyTerryRM.from_pretrained(tiny_folder, device="cpu", max_seq_len=128)


@pytest.fixture(scope="module")
def found(rm, gold_pairs):
    return explain_mistakes(rm, gold_pairs[:60], most=3, seed=0)


def test_the_worst_mistakes_are_explained_one_a_prompt(rm, found, gold_pairs):
    rewards = rm.score_pairs(gold_pairs[:60]).astype(np.float64)
    margins = dict(zip((pair.pair_id for pair in gold_pairs), rewards[:, 0] - rewards[:, 1], strict=False))
    wrong = sorted((margin, name) for name, margin in margins.items() if margin < 0)
    assert (found.num_pairs, found.num_mistakes) == (60, len(wrong))
    prompt = {pair.pair_id: pair.prompt_id for pair in gold_pairs}
    worst = list({prompt[name]: name for _, name in reversed(wrong)}.items())[::-1]  # the worst of each prompt
    assert {pair.pair_id for pair in found.pairs} <= {name for _, name in worst}
    shown = [margins[pair.pair_id] for pair in found.pairs]
    assert shown == sorted(shown)
    assert shown[0] == wrong[0][0]
    for pair in found.pairs:
        assert pair.margin == pytest.approx(margins[pair.pair_id], abs=1e-5)
        assert pair.counterfactual.margin == pytest.approx(pair.margin, abs=1e-5)


def test_kinds_part_the_mistakes_and_each_explained_one_has_its_own(found):
    members = sorted(place for kind in found.kinds for place in kind.members)
    assert members == list(range(found.num_mistakes))
    assert found.kind_of[0] == next(place for place, kind in enumerate(found.kinds) if 0 in kind.members)


def test_the_record_is_json(found):
    told = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert [pair["kind"] for pair in told["pairs"]] == found.kind_of
    assert told["pairs"][0]["margin"] == found.pairs[0].margin


def test_one_answer_alone(rm, gold_pairs):
    pair = gold_pairs[0]
    (answer,) = explain_alone(rm, pair.prompt, pair.chosen).answers
    assert answer.reward == pytest.approx(rm.score([pair.prompt], [pair.chosen])[0], abs=1e-5)


def test_no_pairs_are_refused(rm):
    with pytest.raises(DataError, match="there are no held-out pairs"):
        explain_mistakes(rm, [], most=3, seed=0)


def test_of_many_mistakes_the_worst_are_grouped(rm, gold_pairs, monkeypatch):
    monkeypatch.setattr(record, "MOST_GROUPED", 10)
    found = explain_mistakes(rm, gold_pairs[:60], most=1, seed=0)
    assert "The 10 worst mistakes" in found.kinds_note
