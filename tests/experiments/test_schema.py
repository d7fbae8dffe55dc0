"""Declarations of experiments: what they expand to, and what is refused, by the name of its field."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from experiments.schema import Experiment
from rmcore.core.manifests import make_key
from rmcore.core.metrics import CELL_METRICS, CELL_STAGES

ACCURACY = "eval/test_pairwise_accuracy"
LEVEL = {
    "name": "H1",
    "claim": "The arm is accurate.",
    "metric": ACCURACY,
    "comparison": "level",
    "arm": "high",
    "direction": "above",
    "threshold": 0.6,
}
DIFFERENCE = LEVEL | {"comparison": "difference"}
RATES = {"name": "lr", "levels": {"low": {"train.lr": 1e-4}, "high": {"train.lr": 1e-3}}}
WARMUP = {"name": "warmup", "levels": {"0": {"train.warmup_steps": 0}, "10": {"train.warmup_steps": 10}}}
DECLARED = {
    "name": "rates",
    "title": "Two learning rates",
    "question": "Does a larger learning rate help?",
    "base": {"data": {"source": "gold"}},
    "factors": [RATES],
    "control": "low",
    "seeds": [0, 1],
    "metrics": [ACCURACY, "cost/train_seconds"],
    "hypotheses": [DIFFERENCE],
    "budget_minutes": 10,
}


def declare(**changes):
    return Experiment.model_validate(DECLARED | changes)


def names(experiment):
    return [arm.name for arm in experiment.arms()]


def test_a_grid_has_every_combination_of_levels():
    experiment = declare(factors=[RATES, WARMUP], control="lr=low, warmup=10", hypotheses=[])
    assert names(experiment) == [f"lr={lr}, warmup={steps}" for lr in ("low", "high") for steps in ("0", "10")]
    seen = {arm.name: (arm.config.train.lr, arm.config.train.warmup_steps) for arm in experiment.arms()}
    assert seen["lr=high, warmup=10"] == (1e-3, 10)
    assert len(set(seen.values())) == 4


def test_one_at_a_time_has_the_base_and_each_level_alone():
    experiment = declare(factors=[RATES, WARMUP], design="one_at_a_time", control="base", hypotheses=[])
    assert names(experiment) == ["base", "lr=low", "lr=high", "warmup=0", "warmup=10"]
    base = experiment.arms()[0].config
    for arm in experiment.arms()[1:]:
        [(setting, value)] = arm.changes.items()
        name = setting.removeprefix("train.")
        train = base.train.model_copy(update={name: value})
        assert arm.config == base.model_copy(update={"train": train})


@pytest.mark.slow
@given(st.lists(st.sampled_from([1e-4, 2e-4, 1e-3]), min_size=1, max_size=8))
def test_equal_arms_are_one_with_all_their_names(rates):
    levels = {f"arm{number}": {"train.lr": rate} for number, rate in enumerate(rates)}
    experiment = declare(factors=[{"name": "lr", "levels": levels}], control=f"arm{len(rates) - 1}", hypotheses=[])
    arms = experiment.arms()
    assert [arm.config.train.lr for arm in arms] == list(dict.fromkeys(rates))
    for arm in arms:
        called = [arm.name, *arm.merged]
        assert called == [name for name, changes in levels.items() if changes["train.lr"] == arm.config.train.lr]
        assert {experiment.arm_name(name) for name in called} == {arm.name}


def test_a_group_can_be_given_whole_where_the_base_has_none():
    lora = {"model.lora": {"rank": 4}}
    [first, second] = declare(factors=[{"name": "w", "levels": {"low": {}, "high": lora}}]).arms()
    assert (first.config.model.lora, second.config.model.lora.rank) == (None, 4)


def level(**changes):
    return {"factors": [{"name": "lr", "levels": RATES["levels"] | {"bad": changes}}]}


def claim(**changes):
    return {"hypotheses": [DIFFERENCE | changes]}


REFUSED = {
    "unknown field": ({"seedz": [0]}, "seedz"),
    "unknown field of the base": ({"base": {"train": {"lrr": 1}}}, r"base\.train\.lrr"),
    "unknown setting": (level(**{"train.lrr": 1}), r"arm 'bad': no setting 'train.lrr'; did you mean 'lr'\?"),
    "unknown group": (level(**{"trian.lr": 1}), r"arm 'bad': no setting 'trian.lr'; did you mean 'train'\?"),
    "setting of an absent group": (level(**{"model.lora.rank": 4}), "before .rank is a value or null"),
    "seed as a factor": (level(seed=1), r"levels.bad: seed is no factor.*seeds"),
    "two factors change one setting": (
        {"factors": [RATES, {"name": "again", "levels": {"x": {"train.lr": 1.0}}}], "hypotheses": []},
        "factors: lr changes train.lr and again changes train.lr",
    ),
    "two factors change group and member": (
        {"factors": [RATES, {"name": "all", "levels": {"x": {"train": {}}}}], "hypotheses": []},
        "factors: lr changes train.lr and all changes train",
    ),
    "two arms of one name": (
        {"factors": [RATES, RATES], "design": "one_at_a_time", "control": "base", "hypotheses": []},
        "factors: two arms would be called 'lr=low'",
    ),
    "unknown metric": ({"metrics": ["eval/test_acuracy"]}, r"metrics.0: no metric 'eval/test_acuracy'"),
    "metric twice": ({"metrics": [ACCURACY, ACCURACY]}, "metrics: a metric is named twice"),
    "target metric without target": ({"metrics": [ACCURACY, "train/steps_to_target"]}, "metrics.1: .*target_accuracy"),
    "repeated seeds": ({"seeds": [0, 1, 0]}, "seeds: .* repeats a seed"),
    "control is no arm": ({"control": "medium"}, "control: there is no arm 'medium'; arms are low, high"),
    "unreported metric": (claim(metric="calib/test_ece_debiased"), r"hypotheses.0 \(H1\).metric: no cell reports"),
    "unknown arm": (claim(arm="medium"), r"hypotheses.0 \(H1\).arm: there is no arm 'medium'"),
    "unknown versus": (claim(versus="medium"), r"hypotheses.0 \(H1\).versus: there is no arm 'medium'"),
    "compared with itself": (claim(arm="low"), r"hypotheses.0 \(H1\): 'low' would be compared with itself"),
    "level with versus": (claim(comparison="level", versus="low"), r"hypotheses.0 \(H1\).versus: a level"),
    "ratio with zero": (claim(comparison="ratio", threshold=0), r"hypotheses.0 \(H1\).threshold: a ratio"),
    "merged with what it is compared with": (
        {"factors": [{"name": "lr", "levels": RATES["levels"] | {"same": {"train.lr": 1e-4}}}]} | claim(arm="same"),
        "'same' would be compared with itself",
    ),
    # It is allowed, and so is patience; together they are not, and only the arm has both.
    "arm invalid as a whole": (level(**{"train.best_metric": "last"}), r"arm 'bad': train: .*early_stopping_patience"),
    "two of one name": ({"hypotheses": [DIFFERENCE, LEVEL]}, "hypotheses: two have the same name"),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_does_not_hold_together_is_refused_and_named(changes, message):
    with pytest.raises(ValidationError, match=message):
        declare(**changes)


def test_a_metric_of_judged_answers_takes_a_file_of_them_in_every_arm():
    gain = {"metrics": ["eval/answers_gain_4"], "hypotheses": []}
    with pytest.raises(ValidationError, match=r"metrics.0: eval/answers_gain_4.*arm 'low'.*set evaluate.answers"):
        declare(**gain)
    given = {"data": {"source": "gold"}, "evaluate": {"answers": "/somewhere/judged.parquet"}}
    here = declare(**gain, base=given)
    there = declare(**gain, base=given | {"evaluate": {"answers": "elsewhere/judged.parquet"}})
    assert here.stages() == ["prepare", "train", "evaluate"]
    assert here.frozen() == there.frozen()  # where a file is decides nothing; its content is registered apart


def test_stages_are_those_that_the_metrics_need():
    assert declare(metrics=["train/num_steps"], hypotheses=[]).stages() == ["prepare", "train"]
    assert declare().stages() == ["prepare", "train", "evaluate"]
    others = {spec.stage: name for name, spec in CELL_METRICS.items() if spec.stage in CELL_STAGES[3:]}
    for stage, name in others.items():
        assert declare(metrics=[ACCURACY, name]).stages() == ["prepare", "train", "evaluate", stage]


NOT_REGISTERED = {
    "title": {"title": "Another heading"},
    "budget": {"budget_minutes": 99},
    "place of the data": {"base": {"data": {"source": "/elsewhere/a.parquet"}}},
    "study": {"base": {"data": {"source": "/data/a.parquet"}, "study": "other"}},
    "device": {"base": {"data": {"source": "/data/a.parquet"}, "device": "cpu"}},
}
REGISTERED = {
    "threshold": claim(threshold=0.61),
    "direction": claim(direction="below"),
    "claim": claim(claim="It is claimed otherwise."),
    "hypotheses": {"hypotheses": []},
    "seeds": {"seeds": [0, 2]},
    "metric": {"metrics": [ACCURACY, "calib/test_ece_debiased"]},
    "main metric": {"metrics": ["cost/train_seconds", ACCURACY]},
    "control": {"control": "high", "hypotheses": [DIFFERENCE | {"arm": "low"}]},
    "level": {"factors": [{"name": "lr", "levels": RATES["levels"] | {"high": {"train.lr": 2e-3}}}]},
    "another arm": {"factors": [{"name": "lr", "levels": RATES["levels"] | {"more": {"train.lr": 1.0}}}]},
    "base": {"base": {"data": {"source": "/data/a.parquet"}, "train": {"steps": 7}}},
    "file": {"base": {"data": {"source": "/data/b.parquet"}}},
    "question": {"question": "Is this another question?"},
    "target": {"target_accuracy": 0.6},
}
ON_FILE = {"base": {"data": {"source": "/data/a.parquet"}}}


def digest(changes):
    return make_key(declare(**(ON_FILE | changes)).frozen())


def test_what_decides_a_verdict_is_registered_and_nothing_else():
    registered = digest({})
    assert [name for name, changes in NOT_REGISTERED.items() if digest(changes) != registered] == []
    assert [name for name, changes in REGISTERED.items() if digest(changes) == registered] == []
    mine, theirs = ({"base": {"data": {"source": f"{owner}/shp"}}} for owner in ("mine", "theirs"))  # names of the hub
    assert digest(mine) != digest(theirs)

    def factor(folder):
        return [{"name": "data", "levels": {"low": {}, "high": {"data.source": f"{folder}/b.parquet"}}}]

    assert digest({"factors": factor("/here")}) == digest({"factors": factor("/there")})
