"""Judged answers as a file: what of it counts, what is left out, and what says nothing."""

import json

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from rmcore.core.errors import DataError
from rmcore.data.splits import compared_prompt
from rmcore.evaluation.uncertainty import ends
from rmcore.readiness.judged_answers import (
    choose_among_judged,
    read_judged_answers,
    require_readable,
    rewards_of,
    stored_judged_answers,
    write_judged_answers,
)
from rmcore.readiness.rank import largest_choice, rank_models


def rows(num_prompts=12, sizes=(5, 8), seed=0):
    """Rows of prompt, response and judge; the strength is in the text, too."""
    rng = np.random.default_rng(seed)
    found = []
    for prompt in range(num_prompts):
        for place in range(int(rng.integers(sizes[0], sizes[1] + 1))):
            score = float(rng.normal())
            found.append((f"question {prompt}?", f"answer {place} " + "so " * int(rng.integers(1, 9)), score))
    return pd.DataFrame(found, columns=["prompt", "response", "judge"])


def read(frame, tmp_path, **settings):
    frame.to_parquet(tmp_path / "judged.parquet")
    return read_judged_answers(tmp_path / "judged.parquet", **settings)


def order_of(answers):
    """Responses of each prompt from the best to the worst."""
    ranked = answers.table.sort_values("strength", ascending=False, kind="stable")
    return {prompt: list(own["response"]) for prompt, own in ranked.groupby("prompt")}


def test_scores_ranks_wins_and_comparisons_say_the_same_order(tmp_path):
    frame = rows()
    by_score = read(frame, tmp_path)
    of_prompt = frame.groupby("prompt")["judge"]
    ranks = frame.drop(columns="judge").assign(rank=of_prompt.rank(ascending=False))
    wins = frame.drop(columns="judge").assign(wins=of_prompt.rank() - 1)
    compared = [
        (one.prompt, one.response, other.response)
        for _, own in frame.groupby("prompt")
        for one in own.itertuples()
        for other in own.itertuples()
        if one.judge > other.judge
    ]
    pairs = pd.DataFrame(compared, columns=["prompt", "chosen", "rejected"])
    for other in (ranks, wins, pairs):
        assert order_of(read(other, tmp_path)) == order_of(by_score)
    spread = read(ranks, tmp_path).table.groupby("prompt")["strength"].agg(["min", "max"])
    assert (spread["min"] == 0).all()
    assert (spread["max"] == 1).all()  # however many answers a prompt has


def test_what_is_left_out_is_counted(tmp_path):
    frame = rows()
    frame.loc[frame["prompt"] == "question 1?", "judge"] = 2.5  # undecided
    frame = frame.drop(frame.index[frame["prompt"] == "question 2?"][3:])  # short
    missing = frame.index[frame["prompt"] == "question 3?"][:1]
    frame.loc[missing, "judge"] = np.nan
    again = frame[frame["prompt"] == "question 4?"]
    repeated = pd.concat([frame, again.assign(judge=again["judge"] + 2)])
    answers = read(repeated, tmp_path, trained_on={compared_prompt("  QUESTION 5!")})
    assert (answers.num_undecided, answers.num_short, answers.num_missing, answers.num_trained_on) == (1, 1, 1, 1)
    assert len(answers.left_out) == 4
    assert set(answers.table["prompt"]) == set(frame["prompt"]) - {f"question {place}?" for place in (1, 2, 5)}
    own = answers.table[answers.table["prompt"] == "question 4?"].set_index("response")["strength"]
    pd.testing.assert_series_equal(
        own.sort_index(), (again.set_index("response")["judge"] + 1).sort_index(), check_names=False
    )
    with pytest.raises(DataError, match="12 prompts are in the training pairs"):
        read(rows(), tmp_path, trained_on={compared_prompt(prompt) for prompt in rows()["prompt"]})


BAD = {
    "a constant judge": (lambda frame: frame.assign(judge=0.5), "tells nothing apart"),
    "saturated at the top": (lambda frame: frame.assign(judge=frame["judge"].clip(upper=-0.3)), "highest.*saturated"),
    "saturated at the bottom": (lambda frame: frame.assign(judge=frame["judge"].clip(lower=0.3)), "lowest.*saturated"),
    "missing for most": (lambda frame: frame.assign(judge=frame["judge"].where(frame.index % 3 == 0)), "selection"),
    "no numbers at all": (lambda frame: frame.assign(judge="good"), "none of the .* has a number in 'judge'.*'good'"),
    "all answers equal": (lambda frame: frame.assign(response="yes"), "fewer than 4 distinct.*4 or more different"),
    "a judge of prompts": (lambda frame: frame.assign(judge=frame.groupby("prompt").ngroup()), "not tell.*finer scale"),
    "nothing judged": (lambda frame: frame.drop(columns="judge"), "no column judge"),
    "no prompts": (lambda frame: frame.drop(columns="prompt"), "no column prompt"),
    "dialogues": (lambda frame: frame.assign(prompt=[[{"role": "user"}]] * len(frame)), "no text"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_tells_nothing_is_refused_with_the_reason(case, tmp_path):
    change, words = BAD[case]
    with pytest.raises(DataError, match=words):
        read(change(rows()), tmp_path)


def test_a_language_that_the_tokenizer_spells_is_refused(rm, tmp_path):
    frame = rows()
    with pytest.raises(DataError, match="not in its language"):
        require_readable(rm.renderer, read(frame.assign(response="ответ номер " + frame["response"]), tmp_path), "f")
    require_readable(rm.renderer, read(frame, tmp_path), "f")


def test_a_choice_by_the_judge_itself_is_claimed_and_one_by_its_opposite_refuted(tmp_path):
    answers = read(rows(40), tmp_path)
    strength = answers.table["strength"].to_numpy()
    good, bad = (choose_among_judged(answers, sign * strength, num_resamples=200) for sign in (1, -1))
    assert good["outcome"] == "claimed"
    assert good["choices"][0]["win_rate"]["value"] == pytest.approx(good["choices"][0]["perfect_win_rate"])
    assert bad["outcome"] == "refuted"
    write_judged_answers(tmp_path, answers, strength)
    stored, rewards = stored_judged_answers(tmp_path)
    assert choose_among_judged(stored, rewards, num_resamples=200) == good
    json.dumps(good)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=60))
def test_the_choice_has_an_opponent_on_half_of_the_prompts(sizes):
    try:
        n = largest_choice(sizes)
    except DataError:
        assert sum(size > 2 for size in sizes) < max(10, len(sizes) / 2)
        return
    assert sum(size > n for size in sizes) >= max(10, len(sizes) / 2)


def test_models_are_grouped_by_what_the_judge_tells_apart():
    rng = np.random.default_rng(0)
    judged = [rng.normal(size=9) for _ in range(80)]
    lengths = [np.exp(rng.normal(size=9)) * 100 for _ in judged]
    noise = {"good": 0.3, "as good": 0.3, "fair": 2.0, "blind": 1e6}
    rewards = [[pool + size * rng.normal(size=9) for pool in judged] for size in noise.values()]
    rewards += [[-pool for pool in judged], judged, judged]
    found = rank_models([*noise, "worse", "judge", "same"], rewards, judged, lengths, n=8, num_resamples=400)
    group = {one["name"]: one["group"] for one in found["models"]}
    assert group["judge"] == group["same"] == 1  # models that choose alike have no spread, and are not told apart
    assert found["models"][0]["gain"]["value"] == pytest.approx(found["perfect_gain"])
    assert group["good"] == group["as good"]
    assert 1 < group["fair"] < group["blind"] < group["worse"]
    assert ends(found["models"][-1]["gain"])[1] < 0
    assert ends(found["models"][0]["over_longest"])[0] > 0


@pytest.mark.slow
def test_the_command_ranks_checkpoints_on_a_file(rm, tmp_path):
    from rmcore.cli.measure import readiness_app

    places = []
    for name, sign in (("as it is", 1.0), ("turned round", -1.0)):
        rm.model.score.weight.data *= sign
        rm.save(tmp_path / name)
        places.append(str(tmp_path / name))
    rm.model.score.weight.data *= -1.0  # as it was
    frame = rows(30)
    judged = read(frame, tmp_path)
    exact = judged.table.assign(judge=rewards_of(rm, judged))[["prompt", "response", "judge"]]
    exact.to_parquet(tmp_path / "exact.parquet")
    seen = pd.DataFrame({"prompt": ["QUESTION 7", "question 9 ?"], "chosen": "a", "rejected": "b"})
    seen.to_csv(tmp_path / "trained.csv", index=False)
    (tmp_path / "settings.json").write_text(json.dumps({"data": {"source": str(tmp_path / "trained.csv")}}))
    told = tmp_path / "told.json"
    words = ["rank", *places, "--answers", str(tmp_path / "exact.parquet"), "--json", str(told)]
    result = CliRunner().invoke(readiness_app, words, catch_exceptions=False)
    assert result.exit_code == 0
    assert "optimise against" in result.stdout
    record = json.loads(told.read_text())
    assert record["num_prompts"] == 28
    assert [said for said in record["left_out"] if said.startswith("2 prompts are in the training pairs")]
    assert [one["name"] for one in record["models"]] == places
    assert [one["group"] for one in record["models"]] == [1, 2]
