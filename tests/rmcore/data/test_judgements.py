"""Files that say more than strict pairs give the observations that a reader of them would write down."""

import random
import statistics
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import preference_files as files
from rmcore.config.data import DataConfig
from rmcore.core.errors import DataError
from rmcore.data.observation import Kind, Observation
from rmcore.data.readers.columns import USUAL_COLUMNS, ColumnMap
from rmcore.data.readers.layouts import recognise
from rmcore.data.readers.sources import load_pairs
from rmcore.data.splits import exclude_held_out_conversations
from source_sample import lines

FIXTURES = Path(__file__).with_name("fixtures")
FRUIT, TOOL, BIRD = "Name a fruit.", "Name a tool.", "Name a bird."
APPLE, HAMMER = ("An apple.", "A chair."), ("A hammer.", "A cloud.")
RANKED = {
    "lmarena_winner.jsonl": [(FRUIT, APPLE, (1, 2)), (TOOL, HAMMER, (1, 2)), (BIRD, ("A robin.", "A wren."), (1, 1))],
    "argilla_choice.json": [(FRUIT, APPLE, (1, 2), "u1"), (FRUIT, ("A chair.", "An apple."), (1, 1), "u2")],
    "ranks.jsonl": [
        (FRUIT, APPLE, (1, 2)), (TOOL, ("A hammer.", "A cloud.", "A saw."), (1, 2, 1)),
        (BIRD, ("A robin.", "A stone."), (1, 2)),
    ],
    "best_of_k.jsonl": [
        (FRUIT, ("A chair.", "An apple.", "A road."), (2, 1, 2), "u1", 1, Kind.BEST), (TOOL, HAMMER, (1, 2))
    ],
    "annotators.csv": [
        (TOOL, HAMMER, (1, 2), "u1"), (FRUIT, APPLE, (1, 2), "u1", 2), (FRUIT, APPLE, (1, 1), "u2", 0.5)
    ],
    "capitals.csv": [],
}  # fmt: skip
"""Files of ranks and of strict pairs alone, which need no observations: prompt, answers, ranks, who, weight, kind."""
GRADED = {
    "helpsteer2_grades.jsonl": [
        (FRUIT, ("A chair.", "An apple."),
         {"helpfulness": (0, 4), "correctness": (0, 4), "coherence": (3, 4), "verbosity": (2, 1)}),
        (TOOL, ("A cloud.", "A hammer."),
         {"helpfulness": (1, 3), "correctness": (None, 4), "coherence": (2, 2), "verbosity": (0, None)}),
    ],
    "kto.jsonl": [(FRUIT, ("A chair.", "An apple."), {"overall": (0, 1)}), (TOOL, ("A hammer.",), {"overall": (1,)})],
}  # fmt: skip


def said(prompt, answers, ranks, who=None, weight=1, kind=None):
    kind = kind or (Kind.RANKING if len(ranks) > 2 else Kind.TIE if set(ranks) == {1} else Kind.PAIR)
    return kind, prompt, answers, ranks, who, weight


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("name", RANKED)
def test_a_file_of_ranks_gives_its_observations(tmp_path, name, on_disk):
    columns = ColumnMap(weight="weight") if name == "annotators.csv" else USUAL_COLUMNS
    spool = tmp_path / "pairs.arrow" if on_disk else None
    loaded = load_pairs(str(FIXTURES / name), columns=columns, spool=spool)
    assert [
        (one.kind, one.prompt, one.answers, one.ranks, one.annotator, one.weight) for one in loaded.observations
    ] == [said(*one) for one in RANKED[name]]
    assert loaded.num_ties == sum(set(one[2]) == {1} for one in RANKED[name])


@pytest.mark.parametrize("name", GRADED)
def test_a_file_of_grades_gives_an_observation_a_prompt(name):
    loaded = load_pairs(str(FIXTURES / name))
    assert [(one.prompt, one.answers, one.grades) for one in loaded.observations] == GRADED[name]


def test_a_first_observation_late_in_a_file_brings_those_of_the_pairs_before(tmp_path):
    rows = [{"prompt": f"p {i}", "a": "x", "b": "y", "winner": "ab"[i % 2]} for i in range(40)]
    rows.insert(30, {"prompt": "p", "a": "x", "b": "y", "winner": "tie"})
    source = lines(rows, tmp_path / "rows.jsonl")
    loaded, spooled = load_pairs(source), load_pairs(source, spool=tmp_path / "pairs.arrow")
    assert list(loaded.observations) == list(spooled.observations)
    assert [one.kind for one in loaded.observations] == [Kind.PAIR] * 30 + [Kind.TIE] + [Kind.PAIR] * 10
    expected = map(Observation.of_pair, loaded.pairs)
    assert [one for one in loaded.observations if one.kind is Kind.PAIR] == list(expected)
    assert load_pairs(source, limit=20).observations == ()


ranked_answers = st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 3)), min_size=2, max_size=7)


@given(ranked_answers, st.booleans())
def test_pairs_are_those_that_the_ranks_imply(answers, as_scores):
    texts, values = zip(*answers, strict=True)
    row = {"prompt": "p", "answers": list(texts), "scores" if as_scores else "ranks": list(values)}
    ranks_of = {text: {value for other, value in answers if other == text} for text in texts}
    if len(ranks_of) < 2:
        return
    found = recognise(row).parse(row)
    assert found.contradicts == any(len(ranks) > 1 for ranks in ranks_of.values())
    if found.contradicts:
        assert found.observation is None
        return
    said = found.observation or Observation.of_pair(found.pairs[0])
    rank = dict(zip(said.answers, said.ranks, strict=True))
    assert sorted(set(rank.values())) == list(range(1, len(set(rank.values())) + 1))
    assert rank.keys() == ranks_of.keys()
    value = dict(answers)
    expected = {
        (one, two, float(value[one] - value[two]) if as_scores else None)
        for one in rank
        for two in rank
        if value[one] != value[two] and (value[one] > value[two]) == as_scores
    }
    assert {(pair.chosen, pair.rejected, pair.target_margin) for pair in found.pairs} == expected
    assert len(found.pairs) == len(expected) or len(rank) < len(answers)  # a text that is there twice counts twice


@pytest.mark.parametrize(
    ("best", "said"),
    [("b", (2, 1, 2)), (2, (2, 2, 1)), ("0", (1, 2, 2)), (3, "counts from 0"), (-1, None), (1.5, None)],
)
def test_the_best_answer_is_a_number_from_0_or_the_answer(best, said):
    row = {"prompt": "p", "responses": ["a", "b", "c"], "best": best}
    if isinstance(said, tuple):
        found = recognise(row).parse(row)
        assert (found.observation.kind, found.observation.ranks) == (Kind.BEST, said)
        assert {pair.chosen for pair in found.pairs} == {"abc"[said.index(1)]}
        return
    with pytest.raises(DataError, match=said or "the best answer is none of the answers"):
        recognise(row).parse(row)


def test_files_that_were_pairs_stay_pairs():
    sides = {"prompt": "p", "response": "a", "pair_id": "1", "role": "chosen", "score": 3}
    ranked = {"prompt": "p", "responses": ["a", "b"], "ranks": [1, 2], "best": 0}
    pairs = {"prompt": "p", "chosen": "a", "rejected": "b", "score": 3, "response": "c"}
    rows = (sides, ranked, pairs)
    assert [recognise(row).name for row in rows] == ["side rows", "ranked answers", "plain strings"]
    named = ColumnMap(grades=("score",))
    assert [recognise(row, named).name for row in (sides, pairs)] == ["graded answers", "plain strings"]
    row = {"prompt": "p", "response": "a", "quality": "fine", "label": 3}
    with pytest.raises(DataError, match="no column 'stars'"):
        recognise(row, ColumnMap(grades=("stars",)))
    assert recognise({**row, "Rating (1)": 1, "Score": "4"}).name == "graded answers"


def test_what_is_held_out_as_a_tie_is_not_trained_on(tmp_path):
    rows = [{"prompt": f"p {i}", "a": "x", "b": "y", "winner": "tie" if i % 3 else "a"} for i in range(90)]
    training = load_pairs(lines(rows, tmp_path / "rows.jsonl"))
    held_out = load_pairs(lines(rows[:20], tmp_path / "held_out.jsonl"))
    left = exclude_held_out_conversations(training, held_out)
    prompts = {f"p {i}" for i in range(20, 90)}
    assert {one.prompt for one in left.observations} == prompts
    assert {pair.prompt for pair in left.pairs} == {f"p {i}" for i in range(21, 90, 3)}
    assert left.num_held_out == len(training.pairs) - len(left.pairs)


NAMES = ("helpfulness", "verbosity", "score")


grades = st.none() | st.sampled_from([0, 1, 2, 0.5, "3"])
answers = st.lists(st.tuples(st.sampled_from("pq"), st.sampled_from("abcd"), *[grades] * 3), min_size=4, max_size=12)


@pytest.mark.slow
@settings(max_examples=60)
@given(answers, st.none() | st.fixed_dictionaries({"verbosity": st.sampled_from([-1, 0, 2]), "score": st.just(1.0)}))
def test_pairs_are_those_of_which_the_weighted_grades_differ(tmp_path_factory, answers, weights):
    rows = [
        {"prompt": prompt, "response": text, **dict(zip(NAMES, given, strict=True))} for prompt, text, *given in answers
    ]
    rows += [dict.fromkeys(NAMES, value) | {"prompt": "r", "response": str(value)} for value in (0, 2)]
    rows = [{name: value for name, value in row.items() if value is not None} for row in rows]
    loaded = load_pairs(lines(rows, tmp_path_factory.mktemp("rows") / "rows.jsonl"), attribute_weights=weights)
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


def test_attributes_that_tell_nothing_are_set_aside_and_told(tmp_path):
    rows = [{"prompt": f"p {at % 3}", "response": f"r {at}", "score": at, "helpfulness": 4} for at in range(6)]
    loaded = load_pairs(lines(rows, tmp_path / "rows.jsonl"))
    assert all(one.grades.keys() == {"score"} for one in loaded.observations)
    assert any("helpfulness is 4 in all graded rows" in sentence for sentence in loaded.notices())


@pytest.mark.parametrize("wrong", [{"attribute_weights": {"a": 0}}, {"attribute_weights": {}}, {"grade_columns": ()}])
def test_settings_that_mean_nothing_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        DataConfig(**wrong)


@pytest.mark.parametrize("write", [files.write_ultrafeedback, files.write_arena, files.write_helpsteer2])
def test_the_order_of_rows_changes_no_observation(tmp_path, write):
    path = tmp_path / "rows.jsonl"
    first = load_pairs(write(path, 30))
    rows = path.read_text(encoding="utf-8").splitlines()
    random.Random(3).shuffle(rows)  # noqa: S311 - data
    path.write_text("\n".join(rows), encoding="utf-8")
    second = load_pairs(str(path))
    for attribute, identity in (("observations", "observation_id"), ("pairs", "pair_id")):
        one, two = ({getattr(x, identity): x for x in getattr(loaded, attribute)} for loaded in (first, second))
        assert one == two
        assert len(one) >= 20
