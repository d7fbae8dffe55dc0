"""Rows of one graded answer: which pairs their grades imply, and what is set aside."""

import math
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rmcore.config.data import DataConfig
from rmcore.core.errors import DataError
from rmcore.data.readers.graded_rows import Grading
from rmcore.data.readers.sources import load_pairs
from source_sample import lines

NAMES = ("helpfulness", "verbosity", "score")


def graded(values, **more):
    return [{"prompt": f"p {i % 3}", "response": f"r {i}", "score": value, **more} for i, value in enumerate(values)]


grades = st.none() | st.sampled_from([0, 1, 2, 0.5, "3"])
answers = st.lists(st.tuples(st.sampled_from("pq"), st.sampled_from("abcd"), *[grades] * 3), min_size=4, max_size=12)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(answers, st.none() | st.fixed_dictionaries({"verbosity": st.sampled_from([-1, 0, 2]), "score": st.just(1.0)}))
def test_pairs_are_those_of_which_the_weighted_grades_differ(tmp_path_factory, answers, weights):
    rows = [
        {"prompt": prompt, "response": text, **dict(zip(NAMES, given, strict=True))} for prompt, text, *given in answers
    ]
    rows += [dict.fromkeys(NAMES, value) | {"prompt": "r", "response": str(value)} for value in (0, 2)]
    rows = [{name: value for name, value in row.items() if value is not None} for row in rows]
    loaded = load_pairs(lines(rows, tmp_path_factory.mktemp("rows") / "rows.jsonl"), grading=Grading(weights))
    numbers = {name: [float(row[name]) for row in rows if name in row] for name in NAMES}
    scale = {name: (statistics.fmean(found), statistics.pstdev(found)) for name, found in numbers.items()}
    counts = {"helpfulness": 1.0} if weights is None else {name: weight for name, weight in weights.items() if weight}
    strength: dict[tuple[str, str], float] = {}
    for prompt, text in {(row["prompt"], row["response"]) for row in rows}:
        said = [row for row in rows if (row["prompt"], row["response"]) == (prompt, text)]
        found = {name: [float(row[name]) for row in said if name in row] for name in counts}
        if all(found.values()):
            strength[prompt, text] = sum(
                weight * (statistics.fmean(found[name]) - scale[name][0]) / scale[name][1]
                for name, weight in counts.items()
            )
    expected = {
        (prompt, better, worse)
        for (prompt, better), one in strength.items()
        for (other, worse), two in strength.items()
        if prompt == other and one > two + 1e-6
    }
    assert {(pair.prompt, pair.chosen, pair.rejected) for pair in loaded.pairs} == expected
    assert len(loaded.pairs) == len(expected)
    given = sum(name in row for row in rows for name in NAMES)
    assert sum(one.num_terms for one in loaded.observations) == given


def test_who_graded_what_is_an_observation_of_his_own_and_the_pairs_are_of_the_means(tmp_path):
    rows = [
        {"prompt": "p", "response": text, "rating": value, "annotator": who, "model": f"m {text}"}
        for text, value, who in (("a", 1, "x"), ("b", 2, "x"), ("a", 5, "y"), ("b", 1, "y"), ("a", 2, "y"))
    ]
    loaded = load_pairs(lines(rows, tmp_path / "rows.jsonl"))
    assert [(one.annotator, one.answers, dict(one.grades)) for one in loaded.observations] == [
        ("x", ("a", "b"), {"overall": (1, 2)}),
        ("y", ("a", "b"), {"overall": (2, 1)}),
        ("y", ("a",), {"overall": (5,)}),
    ]
    (pair,) = loaded.pairs
    assert (pair.chosen, pair.rejected) == ("a", "b")
    assert pair.target_margin == pytest.approx(8 / 3 - 1.5)
    assert (pair.metadata["chosen_model"], pair.metadata["chosen_overall"]) == ("m a", pytest.approx(8 / 3))


def test_a_prompt_gives_as_many_pairs_as_a_row_of_ranked_answers(tmp_path):
    source = lines([{"prompt": "p", "response": f"r {i}", "score": i} for i in range(20)], tmp_path / "rows.jsonl")
    loaded = load_pairs(source, pairs_per_row=7)
    assert (len(loaded.pairs), loaded.num_over_row_cap) == (7, 190 - 7)
    assert any("183 of 190 pairs" in sentence for sentence in loaded.notices())


def test_grades_that_are_not_possible_and_attributes_that_tell_nothing_are_set_aside_and_told(tmp_path):
    rows = [{**row, "helpfulness": 4} for row in graded([1, 2, 7, 4, 2, 3])]
    loaded = load_pairs(lines(rows, tmp_path / "rows.jsonl"), grading=Grading(levels=(1, 2, 3, 4)))
    assert [(row.row, row.reason) for row in loaded.rejected] == [(3, "grade is none of the possible ones")]
    assert all(one.grades.keys() == {"score"} for one in loaded.observations)
    assert any("helpfulness is 4 in all graded rows" in sentence for sentence in loaded.notices())


@pytest.mark.parametrize(
    ("rows", "grading", "message"),
    [
        (graded([1, 1, 1, 1]), Grading(), r"all grades of .* are the same \(overall is 1\)"),
        (graded([1, 2, 3]), Grading(), "every prompt has one graded answer, so no held-out pair can be formed"),
        (graded([1, 2, 3, 1]), Grading(), "no prompt has two answers that differ"),
        (graded([1, 2, 3, 2]), Grading({"honesty": 1}), "names 'honesty', which .* its attributes are overall"),
        (graded(["x", None]), Grading(), "not labelled: 2, grade is not a finite number: 1"),
    ],
)
def test_what_implies_no_pair_is_refused(tmp_path, rows, grading, message):
    rows = [{"prompt": "p", "response": "r", "score": math.nan}] * (rows[0]["score"] == "x") + rows
    with pytest.raises(DataError, match=message):
        load_pairs(lines(rows, tmp_path / "rows.jsonl"), grading=grading)


@pytest.mark.parametrize(
    "wrong", [{"attribute_weights": {"a": 0}}, {"attribute_weights": {}}, {"grade_levels": ()}, {"grade_columns": ()}]
)
def test_settings_that_mean_nothing_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        DataConfig(**wrong)
