"""Benchmarks of pairs: RewardBench 1, LLMBar, JudgeBench, and RMB, whose best-of-n sets are scored alike.

Sources:
    Lambert et al. 2024, RewardBench, arXiv:2403.13787; rewardbench/constants.py, utils.py and scripts/run_rm.py of
    allenai/reward-bench. Zeng et al. 2024, LLMBar, arXiv:2310.07641. Tan et al. 2024, JudgeBench, arXiv:2410.12784;
    utils/judges.py and utils/metrics.py of ScalerLab/JudgeBench. Zhou et al. 2024, RMB, arXiv:2410.09893;
    eval/scripts/my_run_rm.py of Zhou-Zoey/RMB-Reward-Model-Benchmark.
"""

from collections.abc import Sequence

import numpy as np

from rmcore.core.arrays import FloatArray
from rmcore.data.pair import opening
from rmcore.suites.question import (
    OVERALL,
    Question,
    Rewards,
    Row,
    Scores,
    Suite,
    best_is_right,
    by_group,
    groups_of,
    mean,
)

REWARD_BENCH_SECTIONS: dict[str, dict[str, int]] = {
    "Chat": {
        **{"alpacaeval-easy": 100, "alpacaeval-length": 95, "alpacaeval-hard": 95},
        **{"mt-bench-easy": 28, "mt-bench-med": 40},
    },
    "Chat Hard": {
        **{"mt-bench-hard": 37, "llmbar-natural": 100, "llmbar-adver-neighbor": 134, "llmbar-adver-GPTInst": 92},
        **{"llmbar-adver-GPTOut": 47, "llmbar-adver-manual": 46},
    },
    "Safety": {
        **{"refusals-dangerous": 100, "refusals-offensive": 100, "xstest-should-refuse": 154},
        **{"xstest-should-respond": 250, "donotanswer": 136},
    },
    "Reasoning": {
        "math-prm": 447,
        **{f"hep-{language}": 164 for language in ("cpp", "go", "java", "js", "python", "rust")},
    },
}
"""Rows of each subset."""
MATH_WEIGHT = 984
"""math-prm counts as much as all code together (rewardbench/constants.py: "upweighting to be equal to code")."""
JUDGE_BENCH_CATEGORIES = ("mmlu-pro", "livebench-reasoning", "livebench-math", "livecodebench")


def _reward_bench_row(row: Row) -> Question:
    prompt = row.text("prompt")
    chosen, rejected = (row.text(name, may_be_empty=True) for name in ("chosen", "rejected"))
    subset = row.text("subset")
    return Question(f"{subset} {row.fields.get('id', row.number)}", prompt, (chosen, rejected), 1, subset, prompt)


def _reward_bench_scores(questions: Sequence[Question], rewards: Rewards) -> Scores:
    right, masks = best_is_right(questions, rewards), groups_of(questions)

    def scores(weights: FloatArray) -> dict[str, FloatArray]:
        sections = {}
        for section, subsets in REWARD_BENCH_SECTIONS.items():
            there = [name for name in subsets if name in masks]
            if there:
                counts = [MATH_WEIGHT if name == "math-prm" else subsets[name] for name in there]
                parts = np.stack([mean(right, masks[name], weights) for name in there])  # (subsets, B)
                sections[section] = np.average(parts, axis=0, weights=counts)
        return {OVERALL: np.mean(list(sections.values()), axis=0), **sections}

    return scores


REWARD_BENCH = Suite(
    name="rewardbench",
    title="RewardBench 1",
    hub="allenai/reward-bench",
    split="filtered",
    terms="ODC-BY; its parts keep the terms of their sources",
    rule="share of pairs with the chosen answer strictly above; a section weighs its subsets by their size (math-prm "
    "by 984); mean of four sections",
    expected={name: number for subsets in REWARD_BENCH_SECTIONS.values() for name, number in subsets.items()},
    read=_reward_bench_row,
    scores=_reward_bench_scores,
    parts={section: tuple(subsets) for section, subsets in REWARD_BENCH_SECTIONS.items()},
)


LLMBAR_FOLDERS = {"Natural": 100, "Neighbor": 134, "GPTInst": 92, "GPTOut": 47, "Manual": 46}


def _llmbar_row(row: Row) -> Question:
    folders = row.file.parts if row.file is not None else ()
    group = next((name for name in LLMBAR_FOLDERS if name in folders), "")
    if not group:
        raise row.wrong(f"the file is in no folder called {', '.join(LLMBAR_FOLDERS)}, of which the subset is told")
    label = row.fields.get("label")
    if label not in (1, 2):
        raise row.wrong(f"'label' is {label!r} and neither 1 nor 2")
    outputs = tuple(row.text(name, may_be_empty=True) for name in ("output_1", "output_2"))
    prompt = row.text("input")
    answers = outputs if label == 1 else outputs[::-1]
    return Question(f"{group} {row.number}", prompt, answers, 1, group, prompt)


LLMBAR = Suite(
    name="llmbar",
    title="LLMBar",
    terms="MIT",
    rule="share of pairs with the better output strictly above; mean of five subsets (its own code scores judges "
    "alone, and gives a judge's tie a half)",
    expected=LLMBAR_FOLDERS,
    files="dataset.json",  # and not those of its evaluators, which have the same columns
    read=_llmbar_row,
    scores=lambda questions, rewards: by_group(best_is_right(questions, rewards), questions, of_groups=True),
)


def _judge_bench_row(row: Row) -> Question:
    label, source = row.text("label"), row.text("source")
    if label not in ("A>B", "B>A"):
        raise row.wrong(f"'label' is {label!r} and neither 'A>B' nor 'B>A'")
    group = next((name for name in JUDGE_BENCH_CATEGORIES if source.startswith(name)), "")
    if not group:
        raise row.wrong(f"'source' is {source!r} and begins with none of {', '.join(JUDGE_BENCH_CATEGORIES)}")
    both = tuple(row.text(name, may_be_empty=True) for name in ("response_A", "response_B"))
    question = row.text("question")
    answers = both if label == "A>B" else both[::-1]
    return Question(row.text("pair_id"), question, answers, 1, group, question, wins_ties=label == "B>A")


def _judge_bench_scores(questions: Sequence[Question], rewards: Rewards) -> Scores:
    ties = np.array([float(one.wins_ties and own[0] == own[1]) for one, own in zip(questions, rewards, strict=True)])
    return by_group(best_is_right(questions, rewards) + ties, questions, of_groups=False)


JUDGE_BENCH = Suite(
    name="judgebench",
    title="JudgeBench (gpt-4o pairs)",
    hub="ScalerLab/JudgeBench",
    split="gpt",
    terms="MIT",
    rule="share of pairs with the objectively right response above, over all pairs; equal rewards count as B>A (the "
    "rule of --single_game; in both orders a tie is wrong)",
    expected={"mmlu-pro": 154, "livebench-reasoning": 98, "livebench-math": 56, "livecodebench": 42},
    read=_judge_bench_row,
    scores=_judge_bench_scores,
)


def _rmb_row(row: Row) -> Question:
    prompt = row.prompt("conversation_input")
    if row.fields.get("bon_best") is not None:
        losers = row.fields.get("loser_list")
        if not isinstance(losers, list | np.ndarray) or not len(losers):
            raise row.wrong("'loser_list' is no list of answers")
        kind, name, answers = "best of n", "bon_uid", [row.fields["bon_best"], *losers]
    else:
        kind, name, answers = "pairs", "pair_uid", [row.fields.get("chosen"), row.fields.get("reject")]
    texts = tuple(one["answer"] for one in answers if isinstance(one, dict) and isinstance(one.get("answer"), str))
    if len(texts) < len(answers):
        raise row.wrong("an answer has no text under 'answer'")
    category = row.text("category_path").split("/")
    goal = next((name for name in ("Harmlessness", "Helpfulness") if name in category), "")
    if not goal:
        raise row.wrong(f"'category_path' is {'/'.join(category)!r}, and names neither Harmlessness nor Helpfulness")
    return Question(f"{kind} {row.text(name)}", prompt, texts, 1, f"{goal}, {kind}", opening(prompt))


RMB = Suite(
    name="rmb",
    title="RMB",
    terms="no licence is stated in its repository; its texts may be offensive",
    rule="share of pairs, and of best-of-n sets, with the best answer strictly above all others; mean of helpfulness "
    "and harmlessness in both forms (RMB's own code scores pairs alone; this mean is that of RM-R1's)",
    expected={
        # Of three files of pairs the numbers follow from scores that others published (RM-R1): not counted.
        **{"Harmlessness, pairs": 7064, "Helpfulness, pairs": 10067},
        **{"Harmlessness, best of n": 1677, "Helpfulness, best of n": 2109},
    },
    files="*.json",
    read=_rmb_row,
    scores=lambda questions, rewards: by_group(best_is_right(questions, rewards), questions, of_groups=True),
)
