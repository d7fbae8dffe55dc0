"""Scoring in parts: the same rewards however it is cut, killed, continued, or spread over processes."""

import csv
import json
import os
import signal
from importlib.util import find_spec

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from rmcore.core.errors import ConfigError, DataError
from rmcore.data.parts import SourceInParts
from rmcore.data.table import write_pairs
from rmcore.ensembles.bulk import PARTS_SUFFIX, LocalScorer, score_source
from rmcore.ensembles.score import score_pairs_table, score_readable_responses
from source_sample import lines

JOB = {"checkpoint": "c", "data": "d"}


@pytest.fixture
def pairs(tmp_path, gold_pairs):
    write_pairs(gold_pairs[:60], tmp_path / "pairs.parquet")
    return gold_pairs[:60]


def source(tmp_path, size=7):
    return SourceInParts(str(tmp_path / "pairs.parquet"), size)


class Counting(LocalScorer):
    """Is killed after so many parts."""

    def __init__(self, rm, most=None):
        super().__init__(rm)
        self.seen, self.most = [], most

    def scored(self, parts):
        for scored in super().scored(parts):
            if self.most is not None and len(self.seen) == self.most:
                raise KeyboardInterrupt
            self.seen.append(scored.number)
            yield scored


def assert_same(out, rm, pairs):
    scored = pd.read_parquet(out)
    expected, _ = score_pairs_table(rm, pairs)
    assert scored.pair_id.tolist() == expected.pair_id.tolist()
    np.testing.assert_allclose(scored.reward_chosen, expected.reward_chosen, atol=1e-5)
    np.testing.assert_allclose(scored.reward_rejected, expected.reward_rejected, atol=1e-5)
    assert scored.columns[: len(expected.columns)].tolist() == expected.columns.tolist()
    assert scored.chosen.tolist() == [pair.chosen for pair in pairs]


@pytest.mark.parametrize("ending", [".parquet", ".jsonl", ".csv", ".CSV"])
def test_the_file_is_what_its_name_says_and_the_rewards_are_the_same(tmp_path, rm, ending):
    rows = [{"prompt": f"q\u2028 {n}", "response": f'x\r\n,\'"y" 😀 {n}'} for n in range(9)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    asked = SourceInParts(str(tmp_path / "rows.jsonl"), 4)
    expected, out = tmp_path / "expected.parquet", tmp_path / f"out{ending}"
    assert score_source(asked, LocalScorer(rm), expected, JOB) == score_source(asked, LocalScorer(rm), out, JOB) == 9
    table = pq.read_table(expected).to_pylist()
    if ending == ".parquet":
        assert pq.read_table(out).to_pylist() == table
    elif ending == ".jsonl":
        assert [json.loads(line) for line in out.read_text().split("\n")[:-1]] == table
    else:
        with out.open(newline="") as file:
            read = list(csv.DictReader(file))
        assert [{**row, "row": int(row["row"]), "reward": float(row["reward"])} for row in read] == table


GIVEN = {
    "id": ["x1", "-2", "=HYPERLINK(1)", None, "x5", "@x"],
    "n": [1, 2, 3, 4, None, 6],
    "x": [1, 2.5, 3, 4, 5, 6],
    "ok": [True, None, False, True, True, True],
    "held": [{"a": 1}, "text", [1, 2], 3, None, {"b": None}],
    "huge": [10**30, 1, 1, 1, 1, 1],
    "reward": ["ours?", "b", "c", "d", "e", "f"],
    "later": [None, None, None, None, None, "one"],
}


def answer_rows(tmp_path, rm, ending, **kwargs):
    """Six rows of answers with columns of their own, of which the second, third and fifth cannot be scored."""
    answers = ["a", None, "\ud800", "d", "", "f"]
    rows = [
        {"prompt": f"p{place}", **{name: values[place] for name, values in GIVEN.items()}, "response": answers[place]}
        for place in range(6)
    ]
    out = tmp_path / f"out{ending}"
    asked = SourceInParts(lines(rows, tmp_path / "rows.jsonl"), 2)
    assert score_source(asked, LocalScorer(rm), out, JOB) == 3
    return out


@pytest.mark.parametrize("ending", [".parquet", ".jsonl"])
def test_each_reward_is_in_its_row_with_every_column_of_the_source(tmp_path, rm, ending):
    out = answer_rows(tmp_path, rm, ending)
    found = pq.read_table(out).to_pylist() if ending == ".parquet" else [*map(json.loads, out.read_text().splitlines())]
    sides = [("p0", "a"), ("p3", "d"), ("p5", "f")]
    assert [(row["row"], row["prompt"], row["response"]) for row in found] == [
        (row, *side) for row, side in zip((1, 4, 6), sides, strict=True)
    ]
    expected, _ = score_readable_responses(rm, sides)
    assert [row["reward"] for row in found] == pytest.approx(expected.reward.tolist(), abs=1e-5)
    for name, values in GIVEN.items():
        kept = [row["input_reward" if name == "reward" else name] for row in found]
        as_text = name in ("held", "huge")
        assert [json.loads(one) if as_text else one for one in kept] == [values[place] for place in (0, 3, 5)], name


def test_no_cell_of_a_table_is_a_formula(tmp_path, rm):
    with answer_rows(tmp_path, rm, ".csv").open(newline="") as file:
        cells = [cell for row in csv.reader(file) for cell in row]
    assert "'@x" in cells
    assert not [cell for cell in cells if cell[:1] in ("=", "+", "@", "\t", "\r")]


@pytest.mark.slow
def test_a_killed_job_goes_on_with_what_is_missing(tmp_path, rm, pairs):
    out, killed, second = tmp_path / "out.parquet", Counting(rm, 3), Counting(rm)
    with pytest.raises(KeyboardInterrupt):
        score_source(source(tmp_path), killed, out, JOB)
    assert not out.exists()
    assert score_source(source(tmp_path), second, out, JOB) == len(pairs)
    assert (killed.seen, second.seen) == ([0, 1, 2], [3, 4, 5, 6, 7, 8])
    assert_same(out, rm, pairs)
    assert not out.with_name(out.name + PARTS_SUFFIX).exists()


@pytest.mark.slow
def test_what_another_job_began_is_not_gone_on_with(tmp_path, rm, pairs):
    out = tmp_path / "out.parquet"
    with pytest.raises(KeyboardInterrupt):
        score_source(source(tmp_path), Counting(rm, 1), out, JOB)
    with pytest.raises(ConfigError, match="checkpoint differ"):
        score_source(source(tmp_path), LocalScorer(rm), out, JOB | {"checkpoint": "other"})
    assert score_source(source(tmp_path), LocalScorer(rm), out, JOB) == len(pairs)


def test_only_one_at_a_time_scores_into_a_file(tmp_path, rm, pairs):
    out = tmp_path / "out.parquet"

    class Nosy(LocalScorer):
        def scored(self, parts):
            with pytest.raises(ConfigError, match="another process scores into"):
                score_source(source(tmp_path), LocalScorer(rm), out, JOB)
            yield from super().scored(parts)

    assert score_source(source(tmp_path), Nosy(rm), out, JOB) == len(pairs)


def test_a_part_that_cannot_be_read_costs_its_rows_and_is_told_also_after_a_kill(
    tmp_path, rm, pairs, monkeypatch, capsys
):
    readable = rm.renderer.tokenize_readable

    def unreadable(given, **rest):
        if any(pair.pair_id == pairs[8].pair_id for pair in given):
            raise DataError("none of the 7 pairs can be read; pair 8: it holds a control token")
        return readable(given, **rest)

    monkeypatch.setattr(rm.renderer, "tokenize_readable", unreadable)
    out = tmp_path / "out.parquet"
    with pytest.raises(KeyboardInterrupt):
        score_source(source(tmp_path), Counting(rm, 3), out, JOB)
    capsys.readouterr()
    assert score_source(source(tmp_path), LocalScorer(rm), out, JOB) == len(pairs) - 7
    assert pd.read_parquet(out).pair_id.tolist() == [pair.pair_id for pair in [*pairs[:7], *pairs[14:]]]
    said = capsys.readouterr().err
    assert said.startswith("warning: 7 rows cannot be read by this model and are left out")
    assert "it holds a control token" in said


@pytest.mark.services
def test_an_actor_of_ray_that_is_killed_loses_and_repeats_no_row(tmp_path, tiny_folder, rm, pairs, monkeypatch):
    if find_spec("ray") is None:
        assert os.environ.get("CI") != "true", "CI installs Ray"
        pytest.skip("Ray is not installed (rm-optimizer[cluster])")
    from rmcore.ensembles.ray_scoring import Loading, RayScorer

    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    out = tmp_path / "out.parquet"
    with RayScorer(Loading(str(tiny_folder), "cpu", 128), 1) as scorer:
        import ray

        killed = []

        class Killing:
            def scored(self, parts):
                for scored in scorer.scored(parts):
                    if not killed:
                        killed.append(ray.get(scorer.actors[0].pid.remote()))
                        os.kill(killed[0], signal.SIGKILL)
                    yield scored

        assert score_source(source(tmp_path), Killing(), out, JOB) == len(pairs)
        assert ray.get(scorer.actors[0].pid.remote()) != killed[0]
        with pytest.raises(
            ConfigError, match=r"has room for \d+ processes, each with 1 cores of one machine, and 1000 are requested"
        ):
            scorer.cluster.require_room(1, 0, 1000)
    assert_same(out, rm, pairs)


@pytest.mark.parametrize(
    ("numbers", "kept"),
    [
        ([1, 2**63 - 1], [1, 2**63 - 1]),
        ([-(2**53), 0.5], [-float(2**53), 0.5]),
        ([2**53 + 1, 0.5], [str(2**53 + 1), "0.5"]),  # float64 has not all of them
        ([2**63, 1], [str(2**63), "1"]),
        ([2**60], [2**60]),
    ],
)
def test_numbers_of_a_column_are_the_sources_or_their_texts(tmp_path, rm, numbers, kept):
    rows = [{"prompt": "q", "response": f"x {at}", "n": number} for at, number in enumerate(numbers)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for ending in (".parquet", ".jsonl"):
        out = tmp_path / f"out{ending}"
        score_source(SourceInParts(str(tmp_path / "rows.jsonl"), 1), LocalScorer(rm), out, JOB)
        table = pq.read_table(out).to_pylist() if ending == ".parquet" else map(json.loads, out.open())
        assert [row["n"] for row in table] == kept
