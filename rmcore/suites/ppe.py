"""PPE: which of two answers people preferred, and whether right answers of 32 to one task are told from wrong ones.

Source:
    Frick et al. 2024, How to evaluate reward models for RLHF, arXiv:2410.14872; the data sets lmarena-ai/PPE-* on the
    Hugging Face hub. Its own code could not be read here. That accuracy is over the sampled pairs of a right and a
    wrong answer, domains counting alike, is how others who build on these sets compute it; `end`, `max` and `auc` are
    the quantities of those names in the paper, computed exactly over all draws of K answers instead of over some. Its
    `loss` is left out, because it could not be looked up.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from rmcore.core.arrays import BoolArray, FloatArray
from rmcore.suites.question import OVERALL, Question, Rewards, Row, Scores, Suite, best_is_right, by_group, mean

NUM_ANSWERS = 32
WINNERS = {"model_a": 0, "model_b": 1}
DOMAINS = {"mmlu_pro": "MMLU-Pro", "math": "MATH", "gpqa": "GPQA", "ifeval": "IFEval", "mbpp_plus": "MBPP-Plus"}
"""How a file's name says its domain, and how the domain is called."""


def _human_row(row: Row) -> Question | None:
    winner = row.text("winner")
    if winner.startswith("tie"):  # also "tie (bothbad)": there is no better one
        return None
    if winner not in WINNERS:
        raise row.wrong(f"'winner' is {winner!r} and none of {', '.join(WINNERS)}, tie")
    answers = [row.text(name, may_be_empty=True) for name in ("response_1", "response_2")]
    first = WINNERS[winner]
    prompt = row.prompt("prompt")
    cluster = str(row.fields.get("question_id", row.number))
    return Question(cluster, prompt, (answers[first], answers[1 - first]), 1, OVERALL, cluster)


PPE_HUMAN = Suite(
    name="ppe-human",
    title="PPE, human preference",
    hub="lmarena-ai/PPE-Human-Preference-V1",
    split="test",
    terms="see the data set's page; its texts are what people wrote, and may be offensive",
    rule="share of battles without a tie with the winner strictly above; ties are left out",
    expected={},
    num_rows=16_038,
    read=_human_row,
    scores=lambda questions, rewards: by_group(best_is_right(questions, rewards), questions, of_groups=False),
)


def _correctness_row(row: Row) -> Question:
    where = "" if row.file is None else row.file.name.lower().replace("-", "_")
    domain = next((title for name, title in DOMAINS.items() if name in where), "")
    if not domain:
        raise row.wrong(f"the file's name says none of the domains {', '.join(DOMAINS)}")
    answers = [row.text(f"response_{number + 1}", may_be_empty=True) for number in range(NUM_ANSWERS)]
    scores = row.fields.get("scores")
    if not isinstance(scores, list | np.ndarray) or len(scores) != NUM_ANSWERS:
        raise row.wrong(f"'scores' does not hold {NUM_ANSWERS} values")
    if not all(isinstance(one, bool | np.bool_ | int | float) and one in (0, 1) for one in scores):
        raise row.wrong("'scores' has values other than true and false")
    is_right = np.array([bool(one) for one in scores])
    order = np.argsort(~is_right, kind="stable")  # right ones first
    place = {int(old): new for new, old in enumerate(order)}
    pairs = []
    for pair in _pairs_of(row):
        first, second = pair
        if is_right[first] != is_right[second]:
            good, bad = (first, second) if is_right[first] else (second, first)
            pairs.append((place[good], place[bad]))
    if not pairs:
        raise row.wrong("'sampled_conflict_pairs' holds no pair of a right and a wrong answer")
    name = f"{domain} {row.fields.get('question_id', row.number)} {row.fields.get('model_name', '')}".strip()
    prompt = row.prompt("prompt")
    ordered = tuple(answers[old] for old in order)
    cluster = f"{domain} {row.fields.get('question_id', row.number)}"  # several models answer one task
    return Question(name, prompt, ordered, int(is_right.sum()), domain, cluster, pairs=tuple(pairs))


def _pairs_of(row: Row) -> list[tuple[int, int]]:
    """The sampled pairs of a row, as places of its answers."""
    given = row.fields.get("sampled_conflict_pairs")
    pairs = [list(pair) for pair in given] if isinstance(given, list | np.ndarray) else []
    places = [[one for one in pair if isinstance(one, int | np.integer) and 0 <= one < NUM_ANSWERS] for pair in pairs]
    if not pairs or any(len(pair) != 2 or len(whole) != 2 for pair, whole in zip(places, pairs, strict=True)):
        raise row.wrong(f"'sampled_conflict_pairs' is no list of two places each, from 0 to {NUM_ANSWERS - 1}")
    return [(int(first), int(second)) for first, second in places]


def best_of_k_curve(rewards: FloatArray, num_good: int) -> FloatArray:
    """Chance that the top one of K answers drawn without replacement is right, for K = 1 to their number, (N,).

    Args:
        rewards: (N,) of one question's answers, the right ones first; equal rewards share the top.
        num_good: how many are right.
    """
    number = len(rewards)
    right = np.arange(number) < num_good
    curve = np.zeros(number)
    # The top of K has a given reward if all K are at most that high and not all below it.
    for value in np.unique(rewards):
        level, below = rewards == value, int((rewards < value).sum())
        share = right[level].mean()
        curve += share * (_share_of_draws(below + int(level.sum()), number) - _share_of_draws(below, number))
    return curve


def _share_of_draws(among: int, number: int) -> FloatArray:
    """(N,) share of the draws of K of N answers that lie within `among` of them: C(among, K) / C(N, K)."""
    sizes = np.arange(number)
    return np.cumprod(np.maximum(among - sizes, 0) / (number - sizes), dtype=np.float64)


def _auc(rewards: FloatArray, num_good: int) -> float:
    """Share of all right and wrong answers that are in order, equal rewards counting a half."""
    good, bad = np.split(rewards, [num_good])
    return float(((good[:, None] > bad).mean() + (good[:, None] >= bad).mean()) / 2)


def _correctness_scores(questions: Sequence[Question], rewards: Rewards) -> Scores:
    right = np.array(
        [float(np.mean([own[a] > own[b] for a, b in one.pairs])) for one, own in zip(questions, rewards, strict=True)]
    )
    # A model that cannot read all answers of a question is given nothing for it.
    known = [None if np.isnan(own).any() else own for own in rewards]
    curves = np.stack(
        [
            np.zeros(NUM_ANSWERS) if own is None else best_of_k_curve(own, one.num_good)
            for one, own in zip(questions, known, strict=True)
        ]
    )
    auc = np.array([0.0 if own is None else _auc(own, one.num_good) for one, own in zip(questions, known, strict=True)])
    of_pairs = by_group(right, questions, of_groups=True)
    masks = {name: np.array([one.group == name for one in questions]) for name in {one.group for one in questions}}

    def scores(weights: FloatArray) -> dict[str, FloatArray]:
        end, most = _curve_scores(curves, masks, weights)
        areas = np.mean([mean(auc, mask, weights) for mask in masks.values()], axis=0)
        return {**of_pairs(weights), "best of 32": end, "best of K at its best": most, "ROC AUC": areas}

    return scores


def _curve_scores(
    curves: FloatArray, masks: Mapping[str, BoolArray], weights: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """(B,) mean over domains of the mean curve's end, and of its highest point; `curves` is (Q, K)."""
    ends, highest = [], []
    for mask in masks.values():
        used = weights[:, mask]
        with np.errstate(invalid="ignore", divide="ignore"):
            curve = used @ curves[mask] / used.sum(axis=1, keepdims=True)  # (B, K)
        ends.append(curve[:, -1])
        highest.append(curve.max(axis=1))
    return np.mean(ends, axis=0), np.mean(highest, axis=0)


PPE_CORRECTNESS = Suite(
    name="ppe-correctness",
    title="PPE, correctness",
    hub="",
    split="train",
    terms="see the data sets' pages; the tasks keep the terms of their sources",
    rule="share of the sampled pairs with the right answer strictly above, mean over questions, then over five domains",
    expected={},
    num_rows=2555,
    read=_correctness_row,
    scores=_correctness_scores,
)
