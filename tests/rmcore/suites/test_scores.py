"""Scores of benchmarks are those of their own rules: published numbers, their own code in small, and edge cases."""

import csv
import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmcore.suites.measure import difference, from_table, measure, to_table
from rmcore.suites.pairwise import JUDGE_BENCH, LLMBAR, MATH_WEIGHT, REWARD_BENCH, REWARD_BENCH_SECTIONS
from rmcore.suites.question import OVERALL, Question
from rmcore.suites.sets import SUITES
from rmcore.suites.several_answers import PPE_CORRECTNESS, REWARD_BENCH_2, RM_BENCH, TIES, best_of_k_curve


def question(name, group, num_answers=2, num_good=1, **more):
    answers = tuple(f"answer {place} of {name}" for place in range(num_answers))
    return Question(name, f"prompt {name}", answers, num_good, group, more.pop("cluster", name), **more)


def values(suite, questions, rewards):
    """Point scores."""
    found = suite.scores(questions, [np.array(own, dtype=np.float64) for own in rewards])(np.ones((1, len(questions))))
    return {name: float(value[0]) for name, value in found.items()}


def test_rewards_survive_their_table():
    questions = [question("a", "Natural"), question("b", "Natural", 4), question("c", "Natural", 3)]
    rewards = [np.array([1.0, np.nan]), np.arange(4.0), np.array([0.5, -1.0, 2.0])]
    for one, other in zip(from_table(questions, to_table(questions, rewards)), rewards, strict=True):
        np.testing.assert_array_equal(one, other)
    assert np.flatnonzero(to_table(questions, rewards).is_right).tolist() == [0, 2, 6]


@pytest.mark.parametrize(
    ("model", "published"),
    [("grm", (62.99, 53.06, 64.29, 54.76, 59.43)), ("skywork", (59.74, 66.33, 83.93, 50.00, 64.29))],
)
def test_published_scores_of_judgebench_are_recomputed_from_its_published_rewards(model, published):
    """Of GRM-Gemma-2B and Skywork-Reward-Gemma-2-27B, from the outputs folder of ScalerLab/JudgeBench."""
    questions, rewards = [], []
    with (Path(__file__).parent / "fixtures" / "judgebench_rewards.csv").open() as file:
        for place, row in enumerate(csv.DictReader(file)):
            group = next(name for name in JUDGE_BENCH.expected if row["source"].startswith(name))
            both = (float(row[f"{model}_a"]), float(row[f"{model}_b"]))
            questions.append(question(str(place), group, wins_ties=row["label"] == "B>A"))
            rewards.append(both if row["label"] == "A>B" else both[::-1])
    found = values(JUDGE_BENCH, questions, rewards)
    names = ("mmlu-pro", "livebench-reasoning", "livebench-math", "livecodebench", OVERALL)
    assert [round(100 * found[name], 2) for name in names] == list(published)
    assert sum(one == other for one, other in rewards) == {"grm": 0, "skywork": 3}[model]


def test_a_tie_of_judgebench_is_b_above_a():
    questions = [question(str(tie), "mmlu-pro", wins_ties=tie) for tie in (True, False)]
    assert values(JUDGE_BENCH, questions, [(1, 1), (1, 1)])[OVERALL] == 0.5
    assert values(JUDGE_BENCH, questions, [(0, 1), (2, 1)])[OVERALL] == 0.5


SUBSETS = [name for subsets in REWARD_BENCH_SECTIONS.values() for name in subsets]


@given(st.lists(st.tuples(st.sampled_from(SUBSETS), st.integers(-1, 1)), min_size=1, max_size=60))
def test_sections_of_rewardbench_weigh_their_subsets_as_its_own_code_does(rows):
    questions = [question(str(place), subset) for place, (subset, _) in enumerate(rows)]
    found = values(REWARD_BENCH, questions, [(float(margin), 0.0) for _, margin in rows])
    sections = {}
    for section, subsets in REWARD_BENCH_SECTIONS.items():  # calculate_scores_per_section, utils.py
        total_weighted, total = 0.0, 0
        for subset, count in subsets.items():
            own = [margin > 0 for name, margin in rows if name == subset]
            if own:
                weight = 984 if subset == "math-prm" else count
                total_weighted += sum(own) / len(own) * weight
                total += weight
        if total:
            sections[section] = total_weighted / total
    assert {name: found[name] for name in sections} == pytest.approx(sections)
    assert found[OVERALL] == pytest.approx(np.mean(list(sections.values())))


def test_the_whole_of_rewardbench_has_its_size_and_math_counts_as_all_code():
    assert sum(REWARD_BENCH.expected.values()) - 447 + MATH_WEIGHT == 3522
    assert sum(REWARD_BENCH.expected.values()) == 2985
    questions = [question(f"{name} {at}", name) for name, count in REWARD_BENCH.expected.items() for at in range(count)]
    found = values(REWARD_BENCH, questions, [(float(one.group == "math-prm"), 0.0) for one in questions])
    assert (found["Reasoning"], found[OVERALL]) == (0.5, 0.125)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([2, 1, 1, 0], 1.0),
        ([1, 2, 1, 0], 0.0),
        ([2, 2, 1, 0], 0.5),
        ([2, 2, 2, 2], 0.25),
        ([2, np.nan, 0, 0], 0.0),
        ([np.nan, 1, 0, 0], 0.0),
    ],
)
def test_the_best_of_four_shares_its_point_with_those_that_are_as_high(rewards, expected):
    assert values(REWARD_BENCH_2, [question("a", "Focus", 4)], [rewards])["Focus"] == expected


def ties(reference, tied, num_good):
    """The score of Ties of one question and its twin."""
    questions = [
        question("ref:7", TIES, len(reference), cluster="Ties 7"),
        question("tied:7", TIES, len(tied), num_good, cluster="Ties 7"),
    ]
    return values(REWARD_BENCH_2, questions, [reference, tied])[TIES]


def test_ties_score_what_their_own_code_gives_at_the_edges():
    """As process_single_model of allenai/reward-bench gave when it was run on these."""
    assert ties([9, 0], [5, 5, 0], 2) == pytest.approx(1.01)  # no spread: as far above as can be
    assert ties([1, 1], [1, 1, 1], 2) == pytest.approx(0.0)
    assert ties([0, 1], [0, 0, 1], 2) == pytest.approx(-0.01)
    assert ties([2, 1], [3, 2, 1], 2) == pytest.approx(0.6)  # exactly as far as they differ is not further
    far = ties([1000, 0], [1001, 1000, 0], 2)
    assert far == pytest.approx(1.01)
    assert ties([9, 0], [np.nan, 5, 0], 2) == pytest.approx(0.3)  # the reference alone is left
    assert ties([np.nan, 0], [5, 5, 0], 2) == pytest.approx(0.5)


@given(
    st.lists(st.tuples(st.sampled_from(list(RM_BENCH.expected)), st.lists(st.integers(0, 3), min_size=6, max_size=6)))
)
def test_rm_bench_compares_each_style_with_each(rows):
    rows = [*((name, [3, 2, 1, 3, 2, 0]) for name in RM_BENCH.expected), *rows]
    questions = [question(str(place), domain, 6, 3) for place, (domain, _) in enumerate(rows)]
    found = values(RM_BENCH, questions, [own for _, own in rows])
    cells = {}
    for domain in RM_BENCH.expected:  # compute_accuracy, utils.py
        own = [rewards for name, rewards in rows if name == domain]
        cells[domain] = np.array([[np.mean([one[i] > one[3 + j] for one in own]) for j in range(3)] for i in range(3)])
    kinds = {"hard": [(0, 1), (0, 2), (1, 2)], "normal": [(0, 0), (1, 1), (2, 2)], "easy": [(1, 0), (2, 0), (2, 1)]}
    for kind, places in kinds.items():
        expected = np.mean([np.mean([cells[domain][place] for place in places]) for domain in cells])
        assert found[kind] == pytest.approx(expected)
    for domain, matrix in cells.items():
        assert found[domain] == pytest.approx(matrix.mean())
    assert found[OVERALL] == pytest.approx(np.mean([matrix.mean() for matrix in cells.values()]))


def test_a_weight_is_so_many_copies_of_a_question():
    draw = np.random.default_rng(0)
    questions = [
        question(str(at), name) for at, name in enumerate(itertools.islice(itertools.cycle(LLMBAR.expected), 30))
    ]
    rewards = [draw.normal(size=2) for _ in questions]
    counts = draw.integers(1, 4, size=len(questions))
    copies = [place for place, count in enumerate(counts) for _ in range(count)]
    weighted = LLMBAR.scores(questions, rewards)(counts[None].astype(float))
    copied = LLMBAR.scores([questions[place] for place in copies], [rewards[place] for place in copies])
    for name, value in copied(np.ones((1, len(copies)))).items():
        assert weighted[name] == pytest.approx(value)


def test_intervals_are_over_prompts_and_two_models_are_compared_on_the_same_draws():
    draw = np.random.default_rng(1)
    same = [question(f"{at} {copy}", "Natural", cluster=str(at)) for at in range(40) for copy in range(5)]
    rewards = [np.array([draw.normal() + 1, 0.0]) for at in range(40) for _ in [0]]
    repeated = [one for one in rewards for _ in range(5)]
    once = [question(str(at), "Natural") for at in range(40)]
    wide, narrow = measure(LLMBAR, same, repeated), measure(LLMBAR, once, rewards)
    assert wide.scores[OVERALL].value == narrow.scores[OVERALL].value
    assert wide.scores[OVERALL].ci_low == pytest.approx(narrow.scores[OVERALL].ci_low, abs=0.02)
    value = difference(LLMBAR, once, rewards, rewards)
    assert (value.value, value.ci_low, value.ci_high) == (0.0, None, None)  # which says nothing about others
    worse = [one * [-1, 1] for one in rewards]
    assert difference(LLMBAR, once, rewards, worse).ci_low > 0


def test_length_is_scored_as_models_are():
    long_right = Question("a", "p", ("a long answer", "short"), 1, "Natural", "a")
    short_right = Question("b", "q", ("short", "a long answer"), 1, "Neighbor", "b")
    assert measure(LLMBAR, [long_right, short_right], [np.array([1.0, 0.0])] * 2).longer == 0.5


def test_groups_weigh_alike_whatever_their_size_where_the_rule_says_so():
    questions = [question("a", "Natural"), *(question(f"b {at}", "Manual") for at in range(3))]
    rewards = [(1, 0), (0, 1), (0, 1), (0, 1)]
    assert values(LLMBAR, questions, rewards)[OVERALL] == 0.5
    assert values(JUDGE_BENCH, questions, rewards)[OVERALL] == 0.25
    pair, several = "Helpfulness, pairs", "Harmlessness, best of n"
    questions = [question("a", several, 3), question("b", several, 3), question("c", pair), question("d", pair)]
    found = values(SUITES["rmb"], questions, [(2, 1, 0), (2, 1, 2), (1, 0), (1, 0)])
    assert found == {OVERALL: 0.75, several: 0.5, pair: 1.0}
    twin = [question("ref:1", TIES, 2, cluster="t"), question("tied:1", TIES, 3, 2, cluster="t")]
    found = values(REWARD_BENCH_2, [question("a", "Focus", 4), *twin], [(2, 2, 0, 0), (9, 0), (5, 5, 0)])
    assert found == pytest.approx({OVERALL: (0.5 + 1.01) / 2, "Focus": 0.5, TIES: 1.01})


def test_what_a_part_of_a_set_does_not_define_is_none_and_a_section_counts_its_own_questions():
    only = [question(f"ref:{at}", TIES, 2, cluster=f"t {at}") for at in range(3)]
    found = measure(REWARD_BENCH_2, only, [np.array([1.0, 0.0])] * 3)
    assert (found.scores[OVERALL].value, found.longer, found.over_longer.value) == (None, None, None)
    chat = [question(f"c {at}", "alpacaeval-easy") for at in range(5)]
    code = [question(f"h {at}", "hep-go") for at in range(7)]
    found = measure(REWARD_BENCH, [*chat, *code], [np.array([1.0, 0.0])] * 12).scores
    assert {name: value.num for name, value in found.items()} == {OVERALL: 12, "Chat": 5, "Reasoning": 7}
    assert (found["Chat"].value, found["Chat"].ci_high) == (1.0, 1.0)
    assert found["Chat"].ci_low < 0.6  # five of five


@given(st.lists(st.integers(0, 4), min_size=3, max_size=6), st.data())
def test_the_best_of_k_curve_is_the_mean_over_all_draws(values, data):
    num_good = data.draw(st.integers(1, len(values) - 1))
    rewards = np.array(values, dtype=float)
    curve = best_of_k_curve(rewards, num_good)
    for size in range(1, len(values) + 1):
        chances = []
        for drawn in itertools.combinations(range(len(values)), size):
            top = [at for at in drawn if rewards[at] == max(rewards[list(drawn)])]
            # Equal rewards share the top in the same proportion in every draw that reaches that level.
            level = [at for at in range(len(values)) if rewards[at] == rewards[top[0]]]
            chances.append(np.mean([at < num_good for at in level]))
        assert curve[size - 1] == pytest.approx(np.mean(chances))
    assert curve[0] == pytest.approx(num_good / len(values))


def test_correctness_counts_pairs_then_questions_then_domains():
    rng = np.random.default_rng(0)
    questions, rewards = [], []
    for at, (domain, num_good) in enumerate((("MATH", 4), ("MATH", 20), ("GPQA", 31))):
        pairs = tuple((int(rng.integers(num_good)), int(rng.integers(num_good, 32))) for _ in range(at + 2))
        answers = tuple(map(str, range(32)))
        questions.append(Question(str(at), "p", answers, num_good, domain, str(at), pairs=pairs))
        rewards.append(rng.normal(size=32))
    found = {
        name: float(value[0]) for name, value in PPE_CORRECTNESS.scores(questions, rewards)(np.ones((1, 3))).items()
    }
    of = [np.mean([own[a] > own[b] for a, b in one.pairs]) for one, own in zip(questions, rewards, strict=True)]
    assert found["MATH"] == pytest.approx((of[0] + of[1]) / 2)
    assert found[OVERALL] == pytest.approx((found["MATH"] + of[2]) / 2)
    ends = [float(np.argmax(own) < one.num_good) for one, own in zip(questions, rewards, strict=True)]
    assert found["best of 32"] == pytest.approx(((ends[0] + ends[1]) / 2 + ends[2]) / 2)
    assert found["best of K at its best"] >= found["best of 32"]
    worst = [np.sort(own) for own in rewards]  # wrong ones on top
    low = {name: float(value[0]) for name, value in PPE_CORRECTNESS.scores(questions, worst)(np.ones((1, 3))).items()}
    assert (low[OVERALL], low["best of 32"], low["ROC AUC"]) == (0.0, 0.0, 0.0)
