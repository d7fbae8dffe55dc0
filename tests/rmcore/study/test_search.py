"""A search: the same trials whenever it is made, and honest about its winner."""

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState

from experiments.presets import PRESETS
from rmcore.core.errors import ConfigError
from rmcore.evaluation.rewards import RewardTable
from rmcore.stages.reads import setting_at
from rmcore.study.cells import Measured, _over_prompts
from rmcore.study.search import Search, changed, default_space, parse_space, reason, text_of
from rmcore.study.tuning import compare, verdict

BASE = PRESETS["minilm"]
SPACE = default_space(BASE)


def quality(config):
    """How good a config truly is, with one best learning rate."""
    return 0.72 - 0.03 * np.log10(config.train.lr / 1e-4) ** 2


def opened(base=BASE, space=SPACE, objective="accuracy"):
    return Search(base, space, objective, num_pairs=500)


def run(num_trials, *, fails=(), **changes):
    """Search as the flow does, with values in place of trainings."""
    search = opened(**changes)
    while (number := len(search.trials)) < num_trials:
        trial = search.ask()
        try:
            config = search.config_of(number)
        except ValueError as error:
            search.fail(trial, reason(error))
            continue
        if number in fails:
            search.fail(trial, "the loss is not finite")
            continue
        noise = np.random.default_rng(number).normal(0, 0.005)
        search.study.tell(trial, quality(config) + noise)
    return search


def drawn(search):
    return [(one.number, one.state, one.params, one.value) for one in search.trials]


def test_the_defaults_are_the_first_trial():
    search = run(12)
    trials = drawn(search)
    assert trials[0][1] == TrialState.COMPLETE
    assert trials[0][2] == {name: setting_at(BASE, name) for name in SPACE}
    assert [number for number, *_ in trials] == list(range(12))
    assert search.settings_of(0)["train.lr"] == BASE.train.lr
    assert search.config_of(0).train.steps is not None


@pytest.mark.slow
def test_a_search_made_again_goes_through_the_same_trials_however_many_there_are():
    whole = drawn(run(14))
    assert drawn(run(14)) == whole
    assert drawn(run(10)) == whole[:10]
    assert len({str(params) for _, _, params, _ in whole}) > 10


def test_another_seed_draws_other_trials_after_the_defaults():
    one, other = (drawn(run(2, base=BASE.model_copy(update={"seed": seed}))) for seed in (0, 1))
    assert one[0][2] == other[0][2]
    assert one[1][2] != other[1][2]


def test_failed_trials_do_not_stop_a_search_but_all_of_them_do():
    trials = drawn(run(5, fails={1, 2}))
    assert [state == TrialState.FAIL for _, state, *_ in trials] == [False, True, True, False, False]
    with pytest.raises(ConfigError, match=r"none of 2 trials.*2 failed.*not finite"):
        run(2, fails={0, 1}).best()


def test_settings_that_do_not_fit_together_are_told_by_the_trial_that_drew_them():
    base = PRESETS["h200"].model_copy(update={"seed": 1})
    space = parse_space({"train.steps": [4, 8], "train.warmup_steps": [0, 1]}, base)
    refused = {"train.epochs": CategoricalDistribution([-1.0])}  # as where two values exclude one another
    search = run(3, base=base, space={**space, **refused})
    assert [state for _, state, *_ in drawn(search)] == [TrialState.COMPLETE, TrialState.FAIL, TrialState.FAIL]
    assert search.settings_of(1)["train.epochs"] == -1.0  # the report shows them


@pytest.mark.parametrize("objective", ["accuracy", "loss"])
def test_of_equal_trials_the_earlier_one_wins_so_a_tie_with_the_defaults_does_not(objective):
    search = opened(objective=objective)
    for value in (0.5, 0.4 if objective == "accuracy" else 0.6, 0.5):
        search.study.tell(search.ask(), value)
    assert search.best().number == 0


# The space


def test_the_values_of_every_preset_are_in_its_default_space(tmp_path):
    for name, preset in PRESETS.items():
        for setting, one in default_space(preset).items():
            assert one._contains(one.to_internal_repr(setting_at(preset, setting))), (name, setting)


def test_numbers_are_the_settings_own_kind():
    given = {"train.epochs": {"low": 1, "high": 3}, "train.pairs_per_step": {"low": 4, "high": 32}}
    space = parse_space(given | {"train.lr": {"low": "1e-6", "high": "1e-4", "log": True}}, BASE)
    assert space == {
        "train.epochs": FloatDistribution(1.0, 3.0),
        "train.pairs_per_step": IntDistribution(4, 32),
        "train.lr": FloatDistribution(1e-6, 1e-4, log=True),
    }
    assert parse_space({"train.lr": ["1e-5", 1]}, BASE) == {"train.lr": CategoricalDistribution((1e-5, 1.0))}
    assert changed(changed(BASE, {"train.steps": 10}), {"train.epochs": 2.0}).train.steps is None


@pytest.mark.parametrize(
    ("space", "said"),
    [
        ({}, "the space is empty"),
        ({"train.lrr": [1e-4]}, "did you mean 'lr'"),
        ({"data.limit": [10, 20]}, "only settings of train and model"),
        ({"train.stop_step": [3]}, "it cuts a training off"),
        ({"model.name": ["tiny", "minilm"]}, "a search is about one model"),
        ({"model.max_seq_len": [64, 128]}, "compared on other pairs"),
        ({"train.lr": 1e-4}, "To fix a setting, use --set"),
        ({"train.lr": []}, "write a list of choices"),
        ({"train.lr": {"low": 1e-3}}, "or a range"),
        ({"train.lr": {"low": 1e-3, "high": 1e-4}}, "no range of numbers from low to high"),
        ({"train.lr": {"low": 0, "high": 1}}, "may not be 0"),
        ({"train.weight_decay": {"low": 0, "high": 1, "log": True}}, "low > 0"),
        ({"train.lr": {"low": 1e-5, "high": 1e-3, "scale": {}}}, "or a range"),
        ({"train.optimizer": ["adamw", "sophia"]}, "may not be sophia"),
        ({"train.label_smoothing": [0.0, 0]}, "twice"),
        ({"train.callbacks": [["calibration"]]}, "choices are single values"),
        ({"train.steps": [5], "train.epochs": [1.0]}, "leave one of them out"),
    ],
    ids=str,
)
def test_what_cannot_be_searched_is_refused_and_named(space, said):
    with pytest.raises(ConfigError, match=said):
        parse_space(space, BASE)


@given(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False))
def test_values_are_written_as_yaml_reads_them(value):
    read = yaml.safe_load(text_of(value))
    assert read == value or float(read) == pytest.approx(value, rel=1e-5)


# The confirmation

SEEDS = [1, 2, 3]


@pytest.fixture
def confirm(measure, make_rewards):
    """Factory of a comparison: both arms answer the same prompts under each fresh seed."""

    def confirmed(gain, objective="accuracy", repeat=0):
        cells = {}
        for arm, more in (("winner", gain), ("defaults", 0.0)):
            for seed in SEEDS:
                rewards = make_rewards(1000 * repeat + 10 * seed + (arm == "winner"), world=repeat, gain=0.3 + more)
                cells[arm, seed] = measure(f"{arm}{repeat}", seed, rewards)
        return compare(objective, cells, SEEDS)

    return confirmed


@pytest.mark.parametrize("objective", ["accuracy", "loss"])
def test_a_winner_that_is_better_is_found_and_one_that_is_worse_is_not_kept(confirm, objective):
    better = confirm(2.0, objective)
    assert better["verdict"] == "supported"
    assert (better["value"] > 0) == (objective == "accuracy")
    assert verdict(objective, better).startswith("Better than the defaults by")
    worse = verdict(objective, confirm(-2.0, objective, repeat=1))
    assert worse.startswith("Worse than the defaults: keep the defaults.")
    assert "(MOVER)" in better["method"]  # over seeds and over the prompts that they share


def test_prompts_are_paired(confirm, make_rewards):
    """What prompts do to both arms alike is not in the interval of their difference."""
    found = confirm(0.0)
    assert found["num_prompts"] == 20
    samples = {
        (arm, seed): Measured(arm, seed, confirm_samples(make_rewards, seed), prompts="0123456789abcdef")
        for arm in ("winner", "defaults")
        for seed in SEEDS
    }
    same = compare("accuracy", samples, SEEDS)
    assert same["value"] == 0
    assert same["verdict"] != "supported"
    assert "keep the defaults" in verdict("accuracy", same)


def confirm_samples(make_rewards, seed):
    return _over_prompts(RewardTable.from_frame(make_rewards(seed)), "0123456789abcdef")


def test_a_winner_that_is_the_defaults_is_kept_in_a_sentence():
    assert "keep the defaults" in verdict("loss", None)
