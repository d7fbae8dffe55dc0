"""What is said of a model's mistakes: which they are, and that every number is of the model that was given."""

import json

import numpy as np
import pytest

from rmcore.core.errors import DataError
from rmcore.data.pair import Message, PreferencePair
from rmcore.explain import record
from rmcore.explain.record import TrainingData, explain_alone, explain_mistakes, explain_named
from rmcore.models.reward_model import BradleyTerryRM


@pytest.fixture(scope="module")
def rm(tiny_folder):
    return BradleyTerryRM.from_pretrained(tiny_folder, device="cpu", max_seq_len=128)


@pytest.fixture(scope="module")
def training(gold_pairs):
    return TrainingData.drawn(iter(gold_pairs[60:]), 180, most=40, seed=0, label_smoothing=0.05, memory_gib=1)


@pytest.fixture(scope="module")
def found(rm, gold_pairs, training):
    return explain_mistakes(rm, gold_pairs[:60], training, most=3, seed=0)


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


def test_training_pairs_come_with_their_effect_and_their_own_margin(rm, found, training):
    given = {pair.pair_id: pair for pair in training.pairs}
    for pair in found.pairs:
        assert set(pair.behind) == {"weights", "head"}
        for behind in pair.behind.values():
            helpful, harmful = ([one.effect for one in end] for end in (behind.helpful, behind.harmful))
            assert helpful == sorted(helpful, reverse=True)
            assert harmful == sorted(harmful)
            assert min(helpful, default=1) > 0 > max(harmful, default=-1)
            for one in (*behind.helpful, *behind.harmful):
                own = given[one.pair_id]
                assert one.margin == pytest.approx(rm.score_pair(own.prompt, own.chosen, own.rejected), abs=1e-5)


def test_a_part_of_the_training_pairs_has_a_part_of_the_influence(rm, found, gold_pairs, training):
    all_of_them = TrainingData(training.pairs, len(training.pairs), training.label_smoothing)
    pair = next(pair for pair in gold_pairs if pair.pair_id == found.pairs[0].pair_id)
    others = [one for one in gold_pairs[:26] if one.prompt_id != pair.prompt_id]
    part, whole = (
        explain_named(rm, [pair], others, given, seed=0).pairs[0].behind["weights"].helpful[0].effect
        for given in (training, all_of_them)
    )
    assert part == pytest.approx(whole * 40 / 180)


def test_the_record_is_json(found):
    told = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert [pair["kind"] for pair in told["pairs"]] == found.kind_of
    assert told["pairs"][0]["margin"] == found.pairs[0].margin


def test_what_cannot_be_computed_is_said(rm, gold_pairs, training):
    few = explain_named(rm, gold_pairs[:1], gold_pairs[2:10], training, seed=0)
    assert "there are 8" in few.influence_note
    # Of those that were trained on none may choose the damping.
    same = explain_named(rm, gold_pairs[:1], training.pairs, training, seed=0)
    assert same.pairs[0].behind == {}
    assert "there are 0" in same.influence_note
    assert few.pairs[0].behind == {}
    assert "takes 20 held-out pairs" in few.influence_note
    none = explain_named(rm, gold_pairs[:1], gold_pairs[2:40], None, seed=0)
    assert "No training pairs were given" in none.influence_note
    assert TrainingData.drawn([], 0, most=5, seed=0, label_smoothing=0, memory_gib=None) is None


def test_too_little_memory_for_gradients_leaves_the_rest_standing(rm, gold_pairs, training):
    small = TrainingData(training.pairs, 180, 0.05, memory_bytes=1000)
    found = explain_named(rm, gold_pairs[:1], gold_pairs[2:40], small, seed=0)
    assert set(found.pairs[0].behind) == {"head"}
    assert "By all weights: not computed" in found.influence_note
    assert "the memory leaves" in found.influence_note


def test_a_hundred_held_out_pairs_choose_the_damping_and_unreadable_ones_are_left_out(
    rm, gold_pairs, training, monkeypatch
):
    monkeypatch.setattr(record, "NUM_HELD_OUT", 25)
    blank = PreferencePair((Message("nobody", ""),), "a", "b")
    found = explain_named(rm, gold_pairs[:1], [*gold_pairs[2:60], blank], training, seed=0)
    assert set(found.pairs[0].behind) == {"weights", "head"}
    assert "on 25 held-out pairs" in found.influence_note or "on 24 held-out pairs" in found.influence_note


def test_one_answer_alone(rm, gold_pairs):
    pair = gold_pairs[0]
    (answer,) = explain_alone(rm, pair.prompt, pair.chosen).answers
    assert answer.reward == pytest.approx(rm.score([pair.prompt], [pair.chosen])[0], abs=1e-5)
    assert answer.gradients is not None
    assert len(answer.gradients) == len(answer.sentences.spans)


def test_no_pairs_are_refused(rm):
    with pytest.raises(DataError, match="there are no held-out pairs"):
        explain_mistakes(rm, [], None, most=3, seed=0)


def test_of_many_mistakes_the_worst_are_grouped(rm, gold_pairs, monkeypatch):
    monkeypatch.setattr(record, "MOST_GROUPED", 10)
    found = explain_mistakes(rm, gold_pairs[:60], None, most=1, seed=0)
    assert "The 10 worst mistakes" in found.kinds_note
