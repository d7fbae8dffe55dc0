"""The ledger and what is made of it, where the true reward gives the margins and every turned label is known."""

import json

import numpy as np
import pytest

from rmcore.config.data import GoldConfig
from rmcore.data.gold.world import generate_pairs
from rmcore.data.observation import WEIGHT
from rmcore.data.pair import PreferencePair
from rmcore.data.readers.sources import load_pairs
from rmcore.noise.crossfit import deal_folds
from rmcore.noise.ledger import clean, examine, manifest_of, write_cleaned


def ledger_of(rate, seed=0):
    config = GoldConfig(num_prompts=200, pairs_per_prompt=3, flip_rate=rate, temperature=0.3)
    pairs = generate_pairs(config, seed).pairs
    margins = np.array([pair.metadata["gold_chosen"] - pair.metadata["gold_rejected"] for pair in pairs])
    return examine(pairs, margins, deal_folds(pairs, 3, seed=0))


@pytest.fixture(scope="module")
def noisy():
    return ledger_of(0.2)


def test_turned_labels_are_called_and_doubted_first(noisy):
    turned = np.array([pair.metadata["flipped"] for pair in noisy.pairs])
    wrong = noisy.table["called"].to_numpy()
    assert wrong.sum() > 0.6 * turned.sum()
    assert (~turned[wrong]).mean() < 0.3
    assert turned[noisy.doubtful()[:30]].mean() > 0.9
    record = json.loads(json.dumps(noisy.record()))
    assert record["rate"]["low"] <= turned.mean() <= record["rate"]["high"]
    assert record["flags"]["called"] == wrong.sum()


@pytest.mark.slow
def test_a_review_has_each_couple_of_answers_once(noisy):
    first = noisy.pairs[int(noisy.doubtful()[0])]
    both = [*noisy.pairs, PreferencePair(first.prompt, first.rejected, first.chosen)]
    margins = np.append(noisy.table["margin"], -noisy.table["margin"][int(noisy.doubtful()[0])])
    found = examine(both, margins, deal_folds(both, 3, seed=0))
    chosen = found.for_review(40)
    assert len({(one.prompt, frozenset((one.chosen, one.rejected))) for one in chosen}) == 40
    assert found.record()["flags"]["contradicted"] == 2


@pytest.mark.slow
def test_where_no_rate_can_be_told_there_is_no_posterior_and_an_order_by_margins(noisy):
    margins = np.random.default_rng(0).normal(size=len(noisy.pairs))
    found = examine(noisy.pairs, margins, noisy.table["fold"].to_numpy())
    assert found.model.says_nothing
    assert found.table["posterior"].isna().all()
    assert not found.table["called"].any()
    assert found.doubtful().tolist() == np.argsort(found.table["with_others"]).tolist()
    assert found.record()["expected_wrong"] is None


@pytest.mark.parametrize("how", ["drop", "weight"])
def test_the_manifest_has_all_that_was_changed_and_gives_the_file_back(noisy, how, tmp_path):
    out = tmp_path / "cleaned.parquet"
    num_changed, num_written = write_cleaned(noisy, how, out)
    assert num_written == len(noisy.pairs) - (num_changed if how == "drop" else 0)
    rows = [json.loads(line) for line in manifest_of(out).read_text().splitlines()]
    assert len(rows) == num_changed > 0
    was = {row["pair_id"]: row["was"] for row in rows}
    now = load_pairs(str(out)).pairs
    back = {pair.pair_id: pair.to_dict() for pair in now} | was
    assert back == {pair.pair_id: pair.to_dict() for pair in noisy.pairs}
    if how == "drop":
        called_ids = set(noisy.table["pair_id"][noisy.table["called"]])
        assert {pair.pair_id for pair in now} == back.keys() - called_ids


@pytest.mark.slow
def test_weights_are_read_back_as_such_and_multiply_with_those_that_are_there(noisy, tmp_path):
    out = tmp_path / "weighted.parquet"
    write_cleaned(noisy, "weight", out)
    loaded = load_pairs(str(out))
    by_id = {one.observation_id: one.weight for one in loaded.observations}
    expected = dict(zip(noisy.table["pair_id"], 1 - noisy.table["posterior"], strict=True))
    assert by_id == pytest.approx({name: max(0.01, weight) for name, weight in expected.items()}, abs=1e-5)
    twice = [
        PreferencePair(p.prompt, p.chosen, p.rejected, metadata={**p.metadata, WEIGHT: 2.0}, pair_id=p.pair_id)
        for p in noisy.pairs
    ]
    margins = noisy.table["margin"].to_numpy()
    kept, _ = clean(examine(twice, margins, noisy.table["fold"].to_numpy()), "weight")
    assert [one.metadata[WEIGHT] for one in kept[:9]] == pytest.approx(
        [2 * by_id[one.pair_id] for one in kept[:9]], abs=1e-4
    )


@pytest.mark.slow
def test_both_orders_contradict_whatever_the_case_and_another_prompt_does_not(noisy):
    texts = [("p", "good", "bad"), ("p", "Bad ", "good"), ("q", "bad", "good"), ("p", "good", "other")]
    pairs = [*(PreferencePair(*one) for one in texts), *noisy.pairs[:60]]
    found = examine(pairs, np.linspace(-1, 1, len(pairs)), np.zeros(len(pairs), dtype=int)).table["contradicted"]
    assert found.tolist() == [True, True] + [False] * (len(pairs) - 2)
