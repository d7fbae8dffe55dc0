"""The study of real answers, small: it resumes, keeps test prompts out, and finds what was planted."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
study = importlib.import_module("real_answers")
ranks_of = importlib.import_module("real_answers_ranks")
verdict = importlib.import_module("real_answers_verdict")
policy = importlib.import_module("real_answers_policy")
GOOD, BAD, FILLER = (
    ["precise", "helpful", "exact", "careful"],
    ["wrong", "vague", "empty", "broken"],
    ["so", "and", "then", "well"],
)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Answers of 54 models whose judge counts good words less bad ones; length decides nothing."""
    folder, rng = tmp_path_factory.mktemp("real"), np.random.default_rng(0)

    def answers(prompts):
        rows = []
        for prompt in prompts:
            for model in range(54):
                good, bad = rng.poisson(1 + model / 12), rng.poisson(3)
                words = [*rng.choice(GOOD, good), *rng.choice(BAD, bad), *rng.choice(FILLER, rng.integers(4, 20))]
                text = " ".join([*rng.permutation(words), f"of {model}"])
                rows.append((prompt, text, f"m{model:02}", float(good - bad), "made"))
        return pd.DataFrame(rows, columns=["prompt", "response", "model", "judge", "source"])

    def pairs(frame, number):
        found = []
        for _, own in frame.groupby("prompt"):
            for _ in range(number):
                one, other = (own.iloc[place] for place in rng.choice(len(own), 2, replace=False))
                good, bad = (one, other) if one["judge"] >= other["judge"] else (other, one)
                found.append((good["prompt"], good["response"], bad["response"], good["model"], bad["model"]))
        return pd.DataFrame(found, columns=["prompt", "chosen", "rejected", "chosen_model", "rejected_model"])

    train, test = (
        answers([f"{part} {number}" for number in range(size)]) for part, size in (("train", 24), ("test", 40))
    )
    train.to_parquet(folder / "alpacaeval_answers_train.parquet")
    test.to_parquet(folder / "alpacaeval_answers_test.parquet")
    pairs(train, 25).to_parquet(folder / "alpacaeval_train.parquet")
    pairs(test, 10).to_parquet(folder / "alpacaeval_test.parquet")
    return folder


RECIPES = (
    study.Recipe("length", "length", pairs=0),
    study.Recipe("words", "words", pairs=500),
    study.Recipe("words few", "words", pairs=20),
    study.Recipe("words flipped", "words", pairs=500, flipped=0.9),
    study.Recipe("style", "style", pairs=300),
    study.Recipe("tiny", "tiny", "full", tokens=32, pairs=32),
    study.Recipe("tiny", "tiny", "full", tokens=32, pairs=32, stop=0.5),
)


@pytest.mark.slow
def test_the_study_goes_on_where_it_ended_and_judges_what_was_planted(world, tmp_path):
    data, pairs = study.read_data(world), pd.read_parquet(world / "alpacaeval_test.parquet")
    assert study.collect(data, tmp_path, RECIPES, minutes=0) == 0  # registered, nothing scored
    own = study.Study(data, tmp_path)
    own.run(RECIPES[1])
    first = own.scores(RECIPES[1])
    assert study.collect(data, tmp_path, RECIPES, minutes=60) == len(RECIPES)
    np.testing.assert_array_equal(own.scores(RECIPES[1]), first)
    assert len(list((tmp_path / "registration").glob("*.json"))) == 1

    result = verdict.analyse(data, pairs, tmp_path, RECIPES, num=40, num_splits=(3, 1))
    assert not result["enough"]
    models = {one["name"]: one for one in result["models"]}
    words, flipped = models[RECIPES[1].name], models[RECIPES[3].name]
    assert min(words["gain_16"]) > 0.5
    assert max(flipped["gain_16"]) < 0
    assert words["pair_accuracy"][0] > 0.75
    assert flipped["pair_accuracy"][0] < 0.5
    frame = verdict.with_other_half(verdict.read_json_lines(tmp_path / "verdicts.jsonl"))
    assert set(frame[frame["model"] == RECIPES[3].name]["status"]) == {"not_ready"}
    assert {row["verdict"] for row in result["claims"]} <= {"supported", "refuted", "inconclusive"}
    assert "R1" in verdict.markdown(result)
    assert (tmp_path / "real_answers.png").is_file()


def test_a_test_prompt_among_the_training_pairs_ends_the_study(world, tmp_path):
    for file in world.glob("*.parquet"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    pd.read_parquet(world / "alpacaeval_test.parquet").to_parquet(tmp_path / "alpacaeval_train.parquet")
    with pytest.raises(SystemExit, match="test prompts are in the training pairs"):
        study.read_data(tmp_path)


def test_recipes_have_names_of_their_own_and_kinds_enough():
    names = [recipe.name for recipe in study.RECIPES]
    assert len(set(names)) == len(names) >= study.FEWEST_MODELS
    assert len({recipe.kind for recipe in study.RECIPES}) >= 15


@pytest.mark.slow
def test_the_policy_among_answers_is_where_policy_gradients_end():
    rng = np.random.default_rng(0)
    rewards, judged = ([rng.normal(size=7) for _ in range(5)] for _ in range(2))
    kl = 0.4
    gain = policy.optimised(rewards, judged, kl)
    strength = policy.strength_for(rewards, kl)
    reached = []
    for pool in rewards:
        logits = np.zeros(len(pool))
        for _ in range(4000):  # the exact gradient of E[reward] - KL / strength, by the softmax's logits
            weights = np.exp(logits - logits.max())
            weights /= weights.sum()
            worth = pool - np.log(weights * len(pool)) / strength
            logits += weights * (worth - weights @ worth)
        reached.append(weights)
    assert np.mean([policy.pool_kl(one) for one in reached]) == pytest.approx(kl, abs=1e-4)
    expected = [one @ pool - pool.mean() for one, pool in zip(reached, judged, strict=True)]
    np.testing.assert_allclose(gain, expected, atol=1e-3)


@pytest.mark.slow
def test_the_policy_gains_by_a_good_model_and_loses_by_a_bad_one(world, tmp_path, monkeypatch):
    data = study.read_data(world)
    monkeypatch.setattr(policy, "CHOSEN", RECIPES[:5])
    for recipe in RECIPES[:5]:
        study.Study(data, tmp_path).run(recipe)
    result = policy.analyse(data, tmp_path, num=40, num_splits=3)
    models = {one["name"]: one for one in result["models"]}
    assert not result["enough"]
    assert min(models[RECIPES[1].name]["policy"]) > 0.3
    assert max(models[RECIPES[3].name]["policy"]) < 0
    assert result["models"][-1]["name"] == RECIPES[3].name
    claims = {one["name"]: one for one in result["claims"]}
    assert claims["T2"]["value"] > 0
    assert "T4" in policy.markdown(result)


def test_a_measure_and_the_gain_that_it_predicts_never_see_one_prompt():
    rng = np.random.default_rng(2)
    seen, unseen = (
        ranks_of.ByPrompt(rng.normal(size=(4, 9)), rng.integers(1, 4, (4, 9)).astype(float)) for _ in range(2)
    )
    halves, weights = ranks_of.random_halves(9, 3, seed=0), rng.integers(1, 4, 9).astype(float)
    assert (halves[:3] == ~halves[3:]).all()
    found = ranks_of.halves_apart(seen, unseen, halves, weights)
    for measure, ranks, inside in ((seen, found[0], halves), (unseen, found[1], ~halves)):
        for half, own in zip(inside, ranks, strict=True):
            places = np.flatnonzero(half)
            values = [
                sum(weights[p] * measure.top[m, p] for p in places)
                / sum(weights[p] * measure.bottom[m, p] for p in places)
                for m in range(4)
            ]
            np.testing.assert_array_equal(np.argsort(np.argsort(values)) + 1, own)
