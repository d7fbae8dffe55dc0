"""A set of one's own, and what is said of a model on it."""

import json
from copy import deepcopy
from functools import cache

import numpy as np
import yaml

from rmcore.data.pair import PreferencePair
from rmcore.suites.pairwise import JUDGE_BENCH
from rmcore.suites.question import Question
from rmcore.suites.record import benchmark_record, find_overlaps
from rmcore.suites.sets import QuestionSet
from rmcore.suites.settings import BenchmarkConfig
from rmcore.suites.several_answers import RM_BENCH

BY_CONTENT = {"benchmark.suites": "files of questions"}
SETTINGS = BenchmarkConfig(suites=(f"judgebench={__file__}",))


def write_own_set(folder, rows, **described):
    """Write rows and their description; gives the YAML."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = folder / "mine.yaml"
    file.write_text(yaml.safe_dump({"name": "mine", "file": "rows.jsonl", "kind": "pairs"} | described))
    return file


def _rewards(draw, question):
    size = len(question.answers)
    return draw.normal(size=size) + 0.8 * (np.arange(size) < question.num_good)


@cache
def _record():
    draw = np.random.default_rng(0)

    def text(right):
        words = draw.choice([*"abcdefgh", "good", "bad", "good" if right else "bad"], size=int(draw.integers(9, 14)))
        return " ".join(words)

    judged = [
        Question(
            str(at), f"question {at}", (text(True), text(False)), 1, ("mmlu-pro", "livebench-math")[at % 2], str(at)
        )
        for at in range(120)
    ]
    styles = ("yes", "yes, it is so", "- yes", "no", "no, it is not so", "- no")
    domains = ("chat", "math", "code", "safety")
    styled = [Question(str(at), f"prompt {at}", styles, 3, domains[at % 4], str(at)) for at in range(60)]
    sets = [
        QuestionSet(JUDGE_BENCH, "gpt.jsonl", judged, {"mmlu-pro": 94}),
        QuestionSet(RM_BENCH, "total_dataset.json", styled, {}),
    ]
    rewards = [[_rewards(draw, one) for one in own.questions] for own in sets]
    pairs = [PreferencePair(f"question {at}", text(True), text(False)) for at in range(40)]
    return benchmark_record("this model", sets, rewards, find_overlaps(pairs, sets))


def record():
    """Two benchmarks, one of which has rows missing and prompts that were trained on; a copy."""
    return deepcopy(_record())
