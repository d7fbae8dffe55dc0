"""What a set of observations holds, and where the likelihood of ties begins."""

import json
import random

import pytest

import preference_files as files
from rmcore.cli import app
from rmcore.cli.guard import guard
from rmcore.data.observation import Observation
from rmcore.data.observation_counts import describe_observations
from rmcore.data.survey import Scale, better_weights, survey


def judged(at: int, *ranks: int, **more) -> Observation:
    return Observation(f"prompt {at}", tuple(f"answer {number}" for number in range(len(ranks))), ranks=ranks, **more)


def test_the_odds_of_a_tie_of_two_give_the_share_of_ties() -> None:
    """Davidson's nu of two equal answers: P(tie) = nu / (2 + nu)."""
    found = survey([judged(at, *((1, 1) if at < 31 else (1, 2))) for at in range(200)])
    nu = found.tie_odds[1]
    assert nu / (2 + nu) == pytest.approx(31 / 200, abs=0.003)
    assert len(found.tie_odds) == 2


def test_the_odds_of_equal_answers_are_those_that_drew_the_rankings() -> None:
    """Rankings of four equally good answers, drawn choice by choice with known widths."""
    rng, widths = random.Random(0), {1: 1.0, 2: 0.3, 3: 0.1, 4: 0.05}  # noqa: S311 - data
    made = []
    for at in range(4000):
        left, ranks, rank = [0, 1, 2, 3], [0] * 4, 1
        while left:
            sizes = range(1, len(left) + 1)
            sets = {1: [len(left)], 2: [6, 3, 1], 3: [4, 1], 4: [1]}
            number = [sets[size][4 - len(left)] if size > 1 else len(left) for size in sizes]
            weights = [widths[size] * count for size, count in zip(sizes, number, strict=True)]
            [size] = rng.choices(list(sizes), weights)
            for place in rng.sample(left, size):
                ranks[place] = rank
                left.remove(place)
            rank += 1
        made.append(judged(at, *ranks))
    found = survey(made)
    assert found.tie_odds == pytest.approx([1.0, 0.3, 0.1, 0.05], rel=0.12)


def test_without_ties_there_are_no_odds() -> None:
    assert survey([judged(0, 1, 2), judged(1, 2, 1, 3)]).tie_odds == (1.0,)
    assert survey([judged(0, 1, 2, 2, top_only=True)]).tie_odds == (1.0,)  # the others are not compared


def test_scales_are_told_by_their_values() -> None:
    assert Scale.of("a", {1.0: 5}) is None
    counts = ({0.0: 3, 1.0: 1}, {1.0: 1, 2.0: 2, 5.0: 1}, {0.1: 1, 0.25: 1, 3.0: 1})
    binary, ordinal, real = (Scale.of("a", one) for one in counts)
    assert [one.link for one in (binary, ordinal, real)] == ["binary", "ordinal", "real"]
    assert binary.shares == (0.75, 0.25)
    assert (ordinal.code(5.0), ordinal.code(4.0)) == (2.0, None)
    codes = [real.code(value) for value in (0.1, 0.25, 3.0)]
    assert sum(codes) == pytest.approx(0)
    assert sum(code * code for code in codes) / 3 == pytest.approx(1)


def test_what_is_counted_of_grades() -> None:
    graded = [
        Observation(f"p{at}", ("a", "b"), grades={"good": (float(at % 3), 1.0), "safe": (1.0, None)}) for at in range(6)
    ]
    found = survey([*graded, judged(9, 1, 1, 2, weight=2.0)])
    assert found.single_valued == ("safe",)
    assert found.num_weighted == 1


def test_what_better_means() -> None:
    assert better_weights(["coherence", "helpfulness", "verbosity"], None) == {"helpfulness": 1.0}
    assert better_weights(["a", "b"], None) == {"a": 0.5, "b": 0.5}
    assert better_weights(["a", "b"], {"a": 2.0, "b": 0.0, "c": 1.0}) == {"a": 2.0}


def checked(*arguments):
    return guard(lambda: app(["data", "check", *map(str, arguments)], standalone_mode=False))


SOME = [
    Observation("p", ("a", "b"), ranks=(1, 2), annotator="x", weight=2),
    Observation("p", ("a", "b"), ranks=(1, 1), annotator="y"),
    Observation("p", ("a", "b", "c"), ranks=(1, 2, 2)),
    Observation("q", ("a", "b", "c"), ranks=(1, 2, 2), top_only=True, annotator="x"),
    Observation("q", ("a",), grades={"overall": (1.0,), "warmth": (0.137,)}, annotator="z"),
    Observation("q", ("b", "c"), grades={"overall": (0.0, None), "quality": (3.5, 1)}),
]


def test_kinds_ties_grades_annotators_and_weights_are_counted():
    found = describe_observations(SOME)
    assert (found["num_observations"], found["num_prompts"]) == (6, 2)
    assert found["kinds"] == {"pair": 1, "tie": 1, "ranking": 1, "best of K": 1, "grades": 2}
    assert found["answers"] == {"1": 1, "2": 3, "3": 2}
    assert found["ties"] == {"num": 2, "num_ranked": 3, "share": 2 / 3}
    scales = {name: (one["scale"], one["levels"], one["num_missing"]) for name, one in found["attributes"].items()}
    assert scales == {
        "overall": ("binary", {"0": 1, "1": 1}, 1),
        "warmth": ("ordinal", {"0.137": 1}, 0),  # a single value is a level
        "quality": ("binary", {"1": 1, "3.5": 1}, 0),
    }
    assert found["annotators"] == {"num": 3, "num_unknown": 2, "labels": {"x": 2, "y": 1, "z": 1}}
    assert found["weights"] == {"min": 1, "max": 2, "num_not_1": 1}


@pytest.mark.parametrize(
    ("write", "more", "shown"),
    [
        (files.write_ultrafeedback, {}, ["30 ranking", "answers                 30 with 4"]),
        (files.write_helpsteer2, {}, ["30 grades", "helpfulness             ordinal, 60 grades from"]),
        (files.write_arena, {"num_judges": 3, "num_votes": 2}, ["annotators              3; most labels: judge"]),
    ],
)
def test_data_check_says_what_kinds_a_file_has(tmp_path, capsys, write, more, shown):
    source = write(tmp_path / "rows.jsonl", 30, **more)
    assert checked(source, "--json", tmp_path / "found.json") == 0
    text = capsys.readouterr().out
    assert all(line in text for line in shown)
    assert json.loads((tmp_path / "found.json").read_text())["observations"]["all"]["num_prompts"] == 30


def test_data_check_shows_a_file_whose_grades_imply_no_pair(tmp_path, capsys):
    path = tmp_path / "kto.jsonl"
    rows = [{"prompt": f"p {i}", "completion": "a", "label": i % 2 == 0, "stars": i} for i in range(9)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert checked(path) == 0
    assert (
        "overall                 binary, 9 grades from 0 to 1, mean 0.556 (4 of 0, 5 of 1)" in capsys.readouterr().out
    )
    assert checked(path, "--grade-columns", "stars") == 0
    assert "stars                   ordinal, 9 grades from 0 to 8" in capsys.readouterr().out


def test_data_check_names_annotators_of_pairs_too(tmp_path, capsys):
    path = tmp_path / "pairs.jsonl"
    rows = [{"prompt": f"p {i}", "chosen": "a", "rejected": "b", "annotator_id": i % 4 // 2} for i in range(9)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert checked(path) == 0
    assert "annotators              2; most labels: 0 5, 1 4" in capsys.readouterr().out
