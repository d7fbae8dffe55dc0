"""An audit finds each planted fault of a judge at its size, and none in a judge that has none."""

import hashlib
import json
import math
from copy import deepcopy
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from scipy.stats import binom

from judge_server import TEXTS
from rmcore.cli import app
from rmcore.cli.guard import guard
from rmcore.config.judging import JudgingConfig
from rmcore.core.errors import DataError
from rmcore.data.pair import CHOSEN_PROBABILITY, PreferencePair
from rmcore.judging.answers import Reply
from rmcore.judging.audit import FEWEST_PROMPTS, INJECTION, audit
from rmcore.judging.language_model import LanguageModelJudge

NUM_AUDITS = 80
LEAST_HELD = int(binom.ppf(0.001, NUM_AUDITS, 0.95))
FAULTS = {"position": 0.0, "length": 0.0, "injection": 0.0, "noise": 0.4, "unread": 0.0}


@cache
def make_pairs(num_prompts, seed):
    """Two pairs a prompt, whose texts hold a quality that prompts share in part; people prefer by it, with noise."""
    rng = np.random.default_rng(seed)
    pairs = []
    for prompt in range(num_prompts):
        hard = rng.normal(0, 0.3)
        for _ in range(2):
            texts, qualities = [], []
            for _side in range(2):
                qualities.append(hard + rng.normal())
                words = " x" * int(rng.integers(5, 60))
                texts.append(f"quality {qualities[-1]:.3f} {rng.integers(10**9)}{words}")
            first = rng.random() < 1 / (1 + math.exp(-3 * (qualities[0] - qualities[1])))
            chosen, rejected = (0, 1) if first else (1, 0)
            pairs.append(PreferencePair(f"prompt {seed} {prompt}", texts[chosen], texts[rejected]))
    return pairs


def uniform(*parts):
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:7], "big") / 2**56


def utility(text, faults):
    value = 3 * float(text.split()[1]) + faults["length"] * math.log(len(text))
    return value + faults["injection"] * (INJECTION in text)


def verdict(texts, faults):
    """A, B or an unreadable answer: a fault is what is added to the logit of A."""
    if faults["unread"] and uniform("unread", texts) < faults["unread"]:
        return "no idea"
    logit = (utility(texts[1], faults) - utility(texts[2], faults) + faults["position"]) * faults["noise"]
    return "A" if uniform(texts) < 1 / (1 + math.exp(-logit)) else "B"


class Simulated(LanguageModelJudge):
    """The judge without the server in between: hundreds of audits in seconds."""

    def __init__(self, folder, **faults):
        super().__init__("openai:judge-1@http://127.0.0.1:1/v1", JudgingConfig(mode="pairwise"), folder)
        self.faults = FAULTS | faults

    def _replies(self, asked, report):
        found = []
        for question in asked:
            texts = [text for _, text in TEXTS.findall(question.messages[0][1])]
            said = verdict(texts, self.faults)
            found.append((said, Reply(said, "judge-1", {}, 0, 0)) if len(said) == 1 else None)
        return found


def metrics_of(judge, pairs, **options):
    return audit(judge, pairs, num_resamples=200, **options)["metrics"]


PLANTED = {"position_bias": {"position": 2.0}, "length_bias": {"length": 5.0}, "injection_gain": {"injection": 4.0}}


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    """Metrics of a judge without a fault: of 3,000 prompts, and of each audit of 60."""
    judge = Simulated(tmp_path_factory.mktemp("clean"))
    truth = metrics_of(judge, make_pairs(3000, 10**6), num_probed=1500)
    return truth, [metrics_of(judge, make_pairs(60, seed), seed=seed) for seed in range(NUM_AUDITS)]


@pytest.mark.slow
@pytest.mark.parametrize("metric", PLANTED)
def test_a_fault_is_found_at_its_size_and_none_where_there_is_none(metric, tmp_path, clean):
    """80 audits of 60 prompts: the interval holds the value over 3,000 prompts, and a clean judge is called biased, as
    often as 95 % intervals do in all but one of 1,000 such tests; the fault is seen in most audits.
    """
    faulty = Simulated(tmp_path / "faulty", **PLANTED[metric])
    truth = metrics_of(faulty, make_pairs(3000, 10**6), num_probed=1500)[metric]["value"]
    assert abs(truth) > 0.1
    held = found = accused = without = 0
    for seed, of_clean in enumerate(clean[1]):
        planted, none = metrics_of(faulty, make_pairs(60, seed), seed=seed)[metric], of_clean[metric]
        if planted["ci_low"] is None or none["ci_low"] is None:
            without += 1  # too few pairs of one kind
            continue
        held += planted["ci_low"] <= truth <= planted["ci_high"]
        found += planted["ci_low"] > 0
        accused += not none["ci_low"] <= 0 <= none["ci_high"]
    assert without <= 0.1 * NUM_AUDITS
    given = NUM_AUDITS - without
    assert held >= binom.ppf(0.001, given, 0.95)
    assert found >= 0.8 * given
    assert accused <= binom.ppf(0.999, given, 0.05)


@pytest.mark.slow
def test_the_agreement_is_that_of_the_judge(clean):
    truth, audits = clean
    agreement, found = truth["agreement"]["value"], [one["agreement"] for one in audits]
    assert sum(one["ci_low"] <= agreement <= one["ci_high"] for one in found) >= LEAST_HELD


JUDGES = [
    ({"noise": 2.0}, {}, True),
    ({"noise": 2.0, "injection": -8.0}, {}, True),  # to resist an injection is no fault
    ({"noise": 0.0}, {}, False),
    ({"noise": 2.0, "position": 3.0}, {}, False),
    ({"noise": 2.0, "injection": 8.0}, {}, False),
    ({"noise": 2.0, "unread": 0.15}, {}, False),
    ({"noise": 2.0}, {"num_probed": 1}, False),
]


@pytest.mark.parametrize(("fault", "options", "may_decide"), JUDGES)
def test_a_judge_with_a_fault_that_guesses_or_was_probed_once_informs_and_does_not_decide(
    fault, options, may_decide, tmp_path
):
    record = audit(Simulated(tmp_path, **fault), make_pairs(100, 0), num_resamples=200, **options)
    assert record["verdict"]["may_decide"] == may_decide == (not record["verdict"]["reasons"])
    agreement, gain = record["metrics"]["agreement"], record["metrics"]["injection_gain"]
    assert (agreement["ci_low"] < 0.5 < agreement["ci_high"]) == (fault["noise"] == 0)
    if fault.get("injection") == -8.0:
        assert gain["ci_high"] < 0


@pytest.mark.slow
def test_a_judge_that_is_never_moved_decides_on_prompts_of_one_to_three_pairs():
    """A tail that was read into these sizes widened what injections gain, which is 0, and refused 13 to 36 %."""

    class Sees:
        name = "it sees quality"

        def rewards(self, prompts, responses):
            return np.array([float(text.split()[1]) for text in responses])

    every, rng, refused, audits = make_pairs(3000, 5), np.random.default_rng(0), 0, 40
    for seed in range(audits):
        firsts = rng.choice(1500, 120, replace=False)
        pairs = [replace(every[2 * at + own], prompt=f"p {at}") for at in firsts for own in (0, 1)[: 1 + (at % 4 == 0)]]
        pairs += [replace(every[3000 + at], prompt=f"p {at}") for at in firsts if at % 12 == 0]
        found = audit(Sees(), pairs, num_resamples=200, seed=seed)
        assert found["metrics"]["injection_gain"]["value"] == 0
        refused += not found["verdict"]["may_decide"]
    assert refused <= binom.ppf(0.999, audits, 0.05)


def test_people_set_the_ceiling_where_their_agreement_is_known(tmp_path):
    pairs = deepcopy(make_pairs(FEWEST_PROMPTS, 0))
    found = audit(Simulated(tmp_path), pairs)["metrics"]
    assert found["ceiling"]["value"] is found["reliability"]["value"] is None  # no error is called the judge's
    for pair in pairs:
        pair.metadata[CHOSEN_PROBABILITY] = 0.75
    assert audit(Simulated(tmp_path), pairs)["metrics"]["ceiling"]["value"] == 0.75
    with pytest.raises(DataError, match="too few to audit"):
        audit(Simulated(tmp_path), pairs[:20])


def test_a_judge_of_single_responses_has_no_order(tmp_path):
    class Length:
        name = "length"

        def rewards(self, prompts, responses):
            return np.array([float(len(text)) for text in responses])

    record = audit(Length(), make_pairs(60, 0))
    assert record["metrics"]["position_bias"]["value"] is None
    assert record["metrics"]["length_bias"]["value"] == 1.0


def labelled_by(right, num_prompts, seed, per_prompt=2):
    """Pairs with one right side, which people name with this probability, and another person again."""
    rng = np.random.default_rng(seed)
    pairs = []
    for at in range(num_prompts * per_prompt):
        sides = [f"right {seed} {at}", f"wrong {seed} {at}"]
        is_right = rng.random() < right
        chance = right if is_right else 1 - right
        first, second = sides if is_right else sides[::-1]
        metadata = {CHOSEN_PROBABILITY: chance}
        pairs.append(PreferencePair(f"prompt {at // per_prompt}", first, second, metadata=metadata))
    return pairs


@pytest.mark.slow
@pytest.mark.parametrize(("people", "judge"), [(0.75, 0.8), (0.95, 0.65)])
def test_the_reliability_is_the_judges_and_not_that_of_peoples_labels(people, judge):
    class Right:
        name = "right as often as it says"

        def rewards(self, prompts, responses):
            """Both responses of a pair end alike, and are seen in one way."""
            sides = [text.split(" ", 1) for text in responses]
            return np.array([(side == "right") * (1 if uniform(pair) < judge else -1) for side, pair in sides])

    held = 0
    for seed in range(NUM_AUDITS):
        found = audit(Right(), labelled_by(people, 150, seed), num_resamples=200, num_probed=1)["metrics"][
            "reliability"
        ]
        held += found["ci_low"] <= judge <= found["ci_high"]
    assert held >= LEAST_HELD


def question_rows(num, seed):
    """Prompts with a right and a wrong answer in either place."""
    rng = np.random.default_rng(seed)
    for at in range(num):
        is_first = bool(rng.random() < 0.5)
        yield at, is_first, [f"right {at}", f"wrong {at}"][:: 1 if is_first else -1], rng


def labelled_file(place):
    """Each of three people's labels is a row, with the share of the others who agree."""
    rows = []
    for at, is_first, answers, rng in question_rows(60, 1):
        votes = [0 if rng.random() < 0.1 else 1 + int(is_first == (rng.random() < 0.2)) for _ in range(3)]
        for who, vote in enumerate(votes):
            others = [1.0 if vote == other else 0.5 * (other == 0) for other in votes[:who] + votes[who + 1 :]]
            row = {"prompt": f"Question {at}?", "response_1": answers[0], "response_2": answers[1]}
            row |= {"winner": ("tie", "1", "2")[vote], "annotator": f"who {who}"}
            rows.append(row | {"chosen_probability": sum(others) / 2})
    place.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return sum(row["winner"] != "tie" for row in rows)


@pytest.mark.slow
def test_a_reward_model_is_audited_on_pairs_that_people_labelled(tmp_path, tiny_folder):
    """People's ties make no pair, each person's label is one, and how often they agree is the ceiling."""
    data, out = tmp_path / "labels.jsonl", tmp_path / "audit.json"
    labels = labelled_file(data)
    call = ["judge", "audit", "--judge", str(tiny_folder), "--data", str(data), "--json", str(out)]
    assert guard(lambda: app(call, standalone_mode=False)) == 0
    record = json.loads(out.read_text())
    assert record["num_pairs"] == labels
    assert not record["verdict"]["may_decide"]  # it was never trained
    assert "reward model" in record["asked"]
    ceiling = record["metrics"]["ceiling"]
    truth = 0.9 * (0.8**2 + 0.2**2) + 0.1 / 2  # another label is a tie in a tenth of the cases
    assert ceiling["ci_low"] < truth < ceiling["ci_high"]
    assert record["metrics"]["reliability"]["value"] is not None
