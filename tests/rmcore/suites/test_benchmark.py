"""`rm-opt benchmark` from the sets' own files to a table: read, scored once, compared, and refused in words."""

import json

import numpy as np
import pandas as pd
import pytest
import torch

from command_line import succeeded
from rmcore.config.model import ModelConfig
from rmcore.core.errors import ConfigError, DataError, ModelError
from rmcore.data.pair import Message
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.models.seal import write_seal
from rmcore.suites.command import NAMES
from rmcore.suites.measure import measure, score_answers
from rmcore.suites.pairwise import JUDGE_BENCH, LLMBAR
from rmcore.suites.question import Question, read_questions
from rmcore.suites.sets import SUITES, read_sets


def answer(text):
    return {"llm_name": "some", "answer": text}


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """A few rows of each set in the form of its own files."""
    folder = tmp_path_factory.mktemp("sets")

    def lines(name, rows):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    subsets = ("alpacaeval-easy", "mt-bench-hard", "donotanswer", "math-prm", "hep-rust")
    lines(
        "rewardbench.jsonl",
        [
            {"id": at, "prompt": f"ask {at}", "chosen": f"good {at}", "rejected": "bad", "subset": subsets[at % 5]}
            for at in range(20)
        ],
    )
    rows = [
        {"id": str(at), "prompt": f"q {at}", "chosen": ["right"], "rejected": ["a", "b", "c"], "subset": "Focus"}
        for at in range(6)
    ]
    for at in range(3):
        twin = {"prompt": f"name {at}", "rejected": ["grey cat"], "subset": "Ties"}
        rows += [
            {**twin, "id": f"ref:{at}", "chosen": ["red"]},
            {**twin, "id": f"tied:{at}", "chosen": ["red", "blue"]},
        ]
    pd.DataFrame(rows).to_parquet(folder / "rewardbench2.parquet")
    styles = {"chosen": ["yes", "yes, it is", "- yes"], "rejected": ["no", "no, it is not", "- no"]}
    domains = ("chat", "math", "code", "safety-refuse", "safety-response")
    (folder / "rm_bench.json").write_text(
        json.dumps([{"id": at // 5, "prompt": f"p {at}", "domain": domains[at % 5], **styles} for at in range(15)])
    )
    for place, group in enumerate(LLMBAR.expected):
        own = folder / "LLMBar" / ("Natural" if group == "Natural" else f"Adversarial/{group}")
        own.mkdir(parents=True)
        rows = [
            {"input": f"i {at}", "output_1": "one", "output_2": "two", "label": 1 + (at + place) % 2} for at in range(4)
        ]
        (own / "dataset.json").write_text(json.dumps(rows))
        (own / "evaluators").mkdir()  # what judges said of the same questions, in the same columns
        (own / "evaluators" / "result.json").write_text(json.dumps(rows))
    lines(
        "judgebench.jsonl",
        [
            {
                **{"pair_id": f"id {at}", "original_id": at, "source": "mmlu-pro-law" if at % 2 else "livecodebench"},
                **{"question": f"q {at}", "response_A": "a", "response_B": "b", "label": "A>B" if at % 3 else "B>A"},
            }
            for at in range(12)
        ],
    )
    for kind in ("Pairwise_set", "BoN_set"):
        for goal in ("Harmlessness/S1", "Helpfulness/Chat/Advice"):
            place = folder / "RMB_dataset" / kind / f"{goal}.json"
            place.parent.mkdir(parents=True, exist_ok=True)
            rows = []
            for at in range(5):
                turns = (("user", f"{goal} {at}"), ("assistant", "yes?"), ("user", f"ask {at}"))
                own = {"conversation_input": [{"role": role, "content": text} for role, text in turns]}
                own["category_path"] = f"{kind}/{goal}"
                if kind == "BoN_set":
                    own |= {
                        "bon_uid": f"{goal} {at}",
                        "bon_best": answer("best"),
                        "loser_list": [answer("x"), answer("y")],
                    }
                else:
                    own |= {"pair_uid": f"{goal} {at}", "chosen": answer("good"), "reject": answer("bad")}
                rows.append(own)
            place.write_text(json.dumps(rows))
    lines(
        "human.jsonl",
        [
            {"question_id": f"h{at}", "prompt": f"p {at}", "response_1": "one", "response_2": "two", "winner": won}
            for at, won in enumerate(("model_a", "model_b", "tie", "tie (bothbad)", "model_b", "model_a"))
        ],
    )
    (folder / "ppe").mkdir()
    for name in ("MMLU-Pro", "MATH", "GPQA", "IFEval", "MBPP-Plus"):
        answers = {f"response_{at + 1}": f"{'right' if at % 3 == 0 else 'wrong'} {at}" for at in range(32)}
        rows = [
            {
                **{"question_id": str(number), "model_name": "m", "prompt": f"{name} {number}", **answers},
                "scores": [at % 3 == 0 for at in range(32)],
                "sampled_conflict_pairs": [[0, 1], [2, 3], [31, 30]],
            }
            for number in range(3)
        ]
        pd.DataFrame(rows).to_parquet(folder / "ppe" / f"PPE-{name}-Best-of-K.parquet")
    return folder


FILES = {
    "rewardbench": "rewardbench.jsonl",
    "rewardbench2": "rewardbench2.parquet",
    "rm-bench": "rm_bench.json",
    "llmbar": "LLMBar",
    "judgebench": "judgebench.jsonl",
    "rmb": "RMB_dataset",
    "ppe-human": "human.jsonl",
    "ppe-correctness": "ppe",
}
BEGINNINGS = {
    "rewardbench": ("good",),
    "rewardbench2": ("r", "blue"),
    "rm-bench": ("yes", "- yes"),
    "rmb": ("best", "good"),
    "ppe-correctness": ("right",),
}
"""Of right answers above, and of no wrong one."""


def source(sets, suite):
    return str(sets / FILES[suite.name])


@pytest.mark.parametrize("name", FILES)
def test_a_set_is_read_with_the_right_answers_first(sets, name):
    suite = SUITES[name]
    found, missing = read_questions(suite, source(sets, suite), partial=True)
    wanted = sum(suite.expected.values()) or suite.num_rows - (2 if name == "ppe-human" else 0)  # which are ties
    assert sum(missing.values()) == wanted - len(found)
    for one in found if name in BEGINNINGS else ():
        assert all(text.startswith(BEGINNINGS[name]) for text in one.answers[: one.num_good])
        assert not any(text.startswith(BEGINNINGS[name]) for text in one.answers[one.num_good :])
    assert not suite.expected or {one.group for one in found} <= set(suite.expected)
    assert len({one.id for one in found}) == len(found)
    with pytest.raises(DataError, match=r"whole set .*, so its score could not be compared with published ones"):
        read_questions(suite, source(sets, suite))


def test_labels_put_the_better_answer_first(sets):
    found, _ = read_questions(JUDGE_BENCH, source(sets, JUDGE_BENCH), partial=True)
    assert [one.answers[0] for one in found] == ["b" if at % 3 == 0 else "a" for at in range(12)]
    assert [one.wins_ties for one in found] == [at % 3 == 0 for at in range(12)]
    found, _ = read_questions(LLMBAR, source(sets, LLMBAR), partial=True)
    assert [one.answers[0] for one in found if one.group == "Natural"] == ["one", "two", "one", "two"]
    assert [one.answers[0] for one in found if one.group == "Neighbor"] == ["two", "one", "two", "one"]
    alone, _ = read_questions(LLMBAR, str(sets / "LLMBar" / "Natural"), partial=True)
    assert alone == [one for one in found if one.group == "Natural"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    BradleyTerryRM.new(ModelConfig(name="tiny", max_seq_len=64), seed=0, device=torch.device("cpu")).save(folder)
    return folder


@pytest.mark.slow
def test_all_sets_are_scored_in_one_call_and_not_again_in_the_next(sets, checkpoint, tmp_path):
    suites = [word for name, file in FILES.items() for word in ("--suite", f"{name}={sets / file}")]
    place = ["--out", tmp_path / "r", "--json", tmp_path / "a.json"]
    words = ["benchmark", "--checkpoint", checkpoint, *suites, "--partial", *place]
    told = succeeded(*words)
    assert all(SUITES[name].title in told for name in FILES)
    record = json.loads((tmp_path / "a.json").read_text())
    assert list(record["suites"]) == list(FILES)
    for name, one in record["suites"].items():
        scores = one["scores"]
        assert all(-0.011 <= value["value"] <= 1.011 for value in scores.values()), name
        if name != "rewardbench":  # of its subsets some have no row in a resample of twenty
            assert scores["overall"]["ci_low"] <= scores["overall"]["value"] <= scores["overall"]["ci_high"]
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "r").glob("*.parquet")}
    assert len(made) == len(FILES)
    assert succeeded(*words) == told
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "r").glob("*.parquet")} == made
    (checkpoint / "rm_rendering.json").write_text((checkpoint / "rm_rendering.json").read_text() + " ")
    write_seal(checkpoint)
    succeeded(*words)
    assert len(list((tmp_path / "r").glob("*.parquet"))) == 2 * len(FILES)  # it may be another model now
    succeeded(*words, "--dtype", "bfloat16")
    assert json.loads((tmp_path / "a.json").read_text())["dtype"] == "bfloat16"
    tables = [pd.read_parquet(path) for path in (tmp_path / "r").glob("llmbar*.parquet")]
    assert len(tables) == 3
    assert len({table.to_json() for table in tables}) == 2  # bfloat16 rounds
    assert len(list((tmp_path / "r").glob("*.parquet"))) == 3 * len(FILES)


FOUR = {"id": "1", "prompt": "p", "subset": "Focus", "chosen": ["a"]}
TASK = {"prompt": "p", "scores": [True] + [False] * 31, **{f"response_{at + 1}": "x" for at in range(32)}}


@pytest.mark.parametrize(
    ("named", "row", "said"),
    [
        ("mmlu", None, "there is no benchmark 'mmlu'; name one of rewardbench"),
        ("llmbar", None, "llmbar is no single data set of the hub"),
        ("rewardbench=data/rb", None, "there is no file or folder 'data/rb'"),  # and not fetched by that name
        ("rewardbench=", None, "there is no file or folder ''"),
        ("judgebench", FOUR, r"in row 1 of math.jsonl 'label' is missing; the columns there are id, prompt"),
        ("rewardbench2", FOUR, r"in row 1 of math.jsonl 'rejected' is missing"),
        ("rewardbench2", FOUR | {"id": "ref:x", "subset": "Ties", "rejected": ["b"]}, "in Ties it is ref:N or tied:N"),
        ("rewardbench", FOUR | {"chosen": "a", "rejected": "b"}, "has the groups Focus, which the benchmark has not"),
        *(
            ("ppe-correctness", TASK | {"sampled_conflict_pairs": pairs}, "'sampled_conflict_pairs'")
            for pairs in ([[0, 40]], None, [[0, -1]], [[0, 1, 2]], [[1, 2]])
        ),
        ("ppe-correctness", TASK | {"scores": ["False"] * 32}, "'scores' has values other than true and false"),
    ],
)
def test_what_is_no_benchmark_is_refused_in_words(named, row, said, tmp_path):
    if row is not None:
        (tmp_path / "math.jsonl").write_text(json.dumps(row))
        named = f"{named}={tmp_path / 'math.jsonl'}"
    with pytest.raises((ConfigError, DataError), match=said):
        read_sets([named], partial=True)


def test_a_benchmark_is_named_once_and_its_file_is_whole(sets, tmp_path):
    with pytest.raises(ConfigError, match="a benchmark is named twice"):
        read_sets(2 * [f"rmb={source(sets, SUITES['rmb'])}"], partial=True)
    text = (sets / "judgebench.jsonl").read_text()
    (tmp_path / "half.jsonl").write_text(text[: len(text) // 2])
    with pytest.raises(DataError, match=r"judgebench: in row \d+ of half.jsonl nothing can be read"):
        read_sets([f"judgebench={tmp_path / 'half.jsonl'}"], partial=True)


def test_a_whole_set_is_taken_and_more_than_one_is_not(tmp_path):
    def write(name, count):
        rows = [{"input": f"i {at}", "output_1": "one", "output_2": "two", "label": 1} for at in range(count)]
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "dataset.json").write_text(json.dumps(rows))

    for name, count in LLMBAR.expected.items():
        write(name, count)
    found, missing = read_questions(LLMBAR, str(tmp_path))
    assert (len(found), missing) == (419, {})
    write("Manual", 47)
    with pytest.raises(DataError, match=r"has more than the set \(Manual 47 of 46\)"):
        read_questions(LLMBAR, str(tmp_path), partial=True)
    write("Manual", 45)
    with pytest.raises(DataError, match=r"is not the whole set \(Manual 45 of 46\)"):
        read_questions(LLMBAR, str(tmp_path))
    row = {
        "pair_id": "a",
        "source": "livecodebench",
        "question": "q",
        "response_A": "a",
        "response_B": "",
        "label": "A>B",
    }
    (tmp_path / "twice.jsonl").write_text(2 * (json.dumps(row) + "\n"))
    with pytest.raises(DataError, match=r"question a 2 times"):
        read_questions(JUDGE_BENCH, str(tmp_path / "twice.jsonl"), partial=True)


def test_an_answer_that_cannot_be_read_is_not_right_and_rewards_that_are_no_numbers_are_an_error(checkpoint):
    rm = BradleyTerryRM.from_pretrained(checkpoint, device="cpu")
    readable = Question("1", "p", ("good", "bad"), 1, "Natural", "p")
    refused = Question("2", (Message("user", "a"), Message("nobody", "b\ud800")), ("good", "bad"), 1, "Natural", "q")
    rewards = score_answers(rm, [readable])
    assert np.isfinite(rewards[0]).all()
    unreadable = [*rewards, np.array([1.0, np.nan])]
    assert measure(LLMBAR, [readable, refused], unreadable).num_unreadable == 1
    with torch.no_grad():
        for parameter in rm.model.parameters():
            parameter.fill_(np.nan)
    with pytest.raises(ModelError, match="readable answer 1 of"):
        score_answers(rm, [readable])


def test_the_command_names_the_suites_that_there_are():
    assert list(NAMES) == list(SUITES)
