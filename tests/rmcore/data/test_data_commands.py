"""What the commands of data print, write and show is what was read, and nothing that a terminal acts on."""

import json
import random
from pathlib import Path

import pytest

from rmcore.cli import app
from rmcore.cli.guard import FAILED, guard
from rmcore.data.observation import Observation
from rmcore.data.observation_counts import describe_observations, examples
from rmcore.data.pair import Message
from rmcore.data.readers.sources import load_pairs
from rmcore.data.survey import Scale, survey
from source_sample import lines, pair_of

FIXTURES = Path(__file__).with_name("fixtures")


def rm_opt(*arguments):
    return guard(lambda: app([*map(str, arguments)], standalone_mode=False))


def test_it_says_what_was_read_written_and_left_out_and_why(tmp_path, capsys):
    out = tmp_path / "pairs.parquet"
    assert rm_opt("data", "convert", FIXTURES / "a_b.csv", out, "--rejected-rows", tmp_path / "left_out.jsonl") == 0
    shown = capsys.readouterr().out
    for line in ("two answers and a winner", "rows read                               7",
                 "pairs written                           2", "rows left out                           4",
                 "ties, which are no pairs                1", "    winner not understood               1",
                 "1 of 7 rows", f"rm-opt data check {out}"):  # fmt: skip
        assert line in shown
    reasons = [json.loads(line)["reason"] for line in (tmp_path / "left_out.jsonl").read_text().splitlines()]
    assert reasons == ["winner not understood", "not labelled", "empty rejected", "identical sides"]


def test_it_overwrites_nothing_unasked_and_never_its_source(tmp_path, capsys):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps({"prompt": "p", "chosen": "a", "rejected": "b"}) + "\n")
    out.write_text("mine")
    assert rm_opt("data", "convert", source, out) == 2
    assert "is there already: name another file, or give --force" in capsys.readouterr().err
    assert out.read_text() == "mine"
    assert rm_opt("data", "convert", source, out, "--force") == 0
    assert len(load_pairs(str(out)).pairs) == 1
    before = source.read_bytes()
    assert rm_opt("data", "convert", source, source, "--force") == 2
    assert "is the source itself" in capsys.readouterr().err
    assert source.read_bytes() == before
    for wrong, word in ((tmp_path / "out.csv", "neither in .parquet nor in .jsonl"), (tmp_path / "x.jsonl", "folder")):
        (tmp_path / "x.jsonl").mkdir(exist_ok=True)
        assert rm_opt("data", "convert", source, wrong, "--force") == 2
        assert word in capsys.readouterr().err


ROW = {"prompt": "p\u00e9\u4e2d", "chosen": "a", "rejected": "b"}


def test_names_that_drive_a_terminal_are_printed_as_text(tmp_path, capsys):
    source = tmp_path / "\x1b]0;title\x07\x9b2J.jsonl"
    lines([ROW, ROW | {"chosen": "b"}], source)
    assert rm_opt("data", "check", source) == rm_opt("data", "convert", source, f"{source}.parquet") == 0
    assert rm_opt("data", "check", f"{source}.csv") == FAILED
    shown = capsys.readouterr()
    assert "title" in shown.out
    assert "title" in shown.err
    assert all(line.isprintable() for line in (shown.out + shown.err).split("\n"))


def judged(at: int, *ranks: int, **more) -> Observation:
    return Observation(f"prompt {at}", tuple(f"answer {number}" for number in range(len(ranks))), ranks=ranks, **more)


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


def test_data_check_shows_a_file_whose_grades_imply_no_pair(tmp_path, capsys):
    rows = [{"prompt": f"p {i}", "completion": "a", "label": i % 2 == 0, "stars": i} for i in range(9)]
    path = lines(rows, tmp_path / "kto.jsonl")
    assert rm_opt("data", "check", path) == 0
    assert (
        "overall                 binary, 9 grades from 0 to 1, mean 0.556 (4 of 0, 5 of 1)" in capsys.readouterr().out
    )
    assert rm_opt("data", "check", path, "--grade-columns", "stars") == 0
    assert "stars                   ordinal, 9 grades from 0 to 8" in capsys.readouterr().out


def test_turns_calls_and_judgements_are_named():
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "weather", "arguments": {}}}]}
    row = {
        "tools": tools,
        "prompt": [{"role": "sys\x1b[31mtem", "content": "Be brief."}, {"role": "user", "content": "Oslo?"}],
        "chosen": [call],
        "rejected": [{"role": "assistant", "content": "Sunny\x1b[2J."}],
    }
    [shown] = examples([Observation.of_pair(pair_of(row))])
    labels = [label for label, _ in shown["lines"]]
    assert labels == ["tools", "sys\\x1b[31mtem", "user", "→ chosen", "→ rejected"]
    by_label = dict(shown["lines"])
    assert "weather" in by_label["tools"]
    assert "weather" in by_label["→ chosen"]
    assert by_label["→ rejected"] == "Sunny\\x1b[2J."


def test_rankings_ties_and_grades_have_their_judgement():
    prompt = (Message("user", "q"),)
    kinds = [
        Observation(prompt, ("a", "b", "c"), (1, 3, 2)),
        Observation(prompt, ("a", "b"), (1, 1)),
        Observation(prompt, ("a", "b"), None, grades={"helpful": (4.0, None), "safe": (0.5, 1.0)}),
    ]
    assert [[label for label, _ in one["lines"][1:]] for one in examples(kinds)] == [
        ["→ rank 1", "→ rank 3", "→ rank 2"],
        ["→ tied", "→ tied"],
        ["→ helpful 4, safe 0.5", "→ safe 1"],
    ]
