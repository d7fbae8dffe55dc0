"""The space of a search: what may stand in it, what a trial gets of it, and how mistakes are told."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from experiments.presets import PRESETS
from rmcore.config.model import LoraSettings
from rmcore.core.errors import ConfigError
from rmcore.study.search_space import (
    Choices,
    Range,
    default_space,
    parse_space,
    read_space,
    text_of,
    value_of,
    with_settings,
)

BASE = PRESETS["minilm"]
SEARCHABLE = [name for name, one in PRESETS.items() if one.model.name != "policy"]


@pytest.mark.parametrize("name", SEARCHABLE)
def test_the_defaults_lie_in_the_default_space_of_every_preset(name):
    base = PRESETS[name]
    space = default_space(base)
    drawn = space.drawn_of(base)
    assert drawn.keys() == space.settings.keys()
    assert with_settings(base, space.values(drawn)) == base.model_copy(
        update={"train": base.train.model_copy(update={"steps": base.train.steps})}
    )


@pytest.mark.parametrize("name", ["minilm", "h200", "demo"])
def test_a_space_is_written_as_it_is_read(name):
    base = PRESETS[name]
    space = default_space(base)
    assert parse_space(yaml.safe_load(yaml.safe_dump(space.to_dict())), base) == space


@given(st.data())
def test_whatever_is_drawn_is_a_config_and_is_found_in_it_again(data):
    space = default_space(BASE)
    drawn = {}
    for name, one in space.settings.items():
        if isinstance(one, Choices):
            drawn[name] = data.draw(st.sampled_from(one.values))
        else:
            drawn[name] = data.draw(st.floats(one.low, one.high))
    config = space.config(BASE, drawn)
    values = space.values(drawn)
    assert {name: value_of(config, name) for name in values} == pytest.approx(values)
    again = space.drawn_of(config)
    for name, value in drawn.items():
        # Six digits of a product are kept, so what lies on an end may fall beside it.
        expected = pytest.approx(value, rel=1e-5) if isinstance(value, float) else value
        assert name not in again or again[name] == expected


def test_the_learning_rate_suits_the_optimizer_and_adapters():
    space = default_space(BASE)
    plain = space.drawn_of(BASE)
    rates = {
        (name, rank): space.values(plain | {"train.optimizer": name, "model.lora.rank": rank})["train.lr"]
        for name in ("adamw", "muon", "lion")
        for rank in (None, 8)
    }
    assert rates["adamw", None] == BASE.train.lr
    assert rates["lion", None] < rates["adamw", None] < rates["muon", None]
    assert rates["adamw", 8] > rates["adamw", None]


def test_a_rank_brings_adapters_and_null_removes_them():
    assert with_settings(BASE, {"model.lora.rank": 4}).model.lora == LoraSettings(rank=4)
    lora = PRESETS["h200"]
    assert with_settings(lora, {"model.lora.rank": None, "model.lora.dropout": 0.1}).model.lora is None
    assert with_settings(lora, {"model.lora.rank": 4}).model.lora == LoraSettings(rank=4)


def test_epochs_take_the_place_of_steps():
    steps = with_settings(BASE, {"train.steps": 10})
    assert with_settings(steps, {"train.epochs": 2.0}).train.steps is None


def test_numbers_are_the_settings_own_kind():
    given = {"train.epochs": {"low": 1, "high": 3}, "train.pairs_per_step": {"low": 4, "high": 32}}
    space = parse_space(given | {"train.lr": {"low": "1e-6", "high": "1e-4", "log": True}}, BASE)
    assert space.settings["train.epochs"] == Range(1.0, 3.0)
    assert space.settings["train.pairs_per_step"] == Range(4, 32, is_int=True)
    assert space.settings["train.lr"] == Range(1e-6, 1e-4, log=True)
    assert parse_space({"train.lr": ["1e-5", 1]}, BASE).settings["train.lr"] == Choices((1e-5, 1.0))


@pytest.mark.parametrize(
    ("space", "said"),
    [
        ({}, "the space is empty"),
        (None, "the space is empty"),
        ({"train.lrr": [1e-4]}, "did you mean 'lr'"),
        ({"trian.lr": [1e-4]}, "only settings of train and model"),
        ({"data.limit": [10, 20]}, "only settings of train and model"),
        ({"seed": [0, 1]}, "only settings of train and model"),
        ({"train.stop_step": [3]}, "the rungs of the search set it"),
        ({"model.name": ["tiny", "minilm"]}, "a search is about one model"),
        ({"model.lora": [None]}, "name model.lora.rank"),
        ({"train.lr": 1e-4}, "To fix a setting, use --set"),
        ({"train.lr": []}, "no choices"),
        ({"train.lr": {"low": 1e-3}}, "no high"),
        ({"train.lr": {"low": 1e-3, "high": 1e-4}}, "low has to be below high"),
        ({"train.lr": {"low": 1e-3, "high": 1e-3}}, "low has to be below high"),
        ({"train.lr": {"low": 0, "high": 1}}, "may not be 0.*greater than 0"),
        ({"train.weight_decay": {"low": 0, "high": 1, "log": True}}, "has no logarithm"),
        ({"train.lr": {"low": 1e-5, "high": 1e-3, "log": "yes"}}, "write true or false"),
        ({"train.lr": {"low": "small", "high": 1}}, "has numbers for ends"),
        ({"train.lr": {"min": 1e-5, "max": 1e-3}}, "a range has low, high"),
        ({"train.optimizer": ["adamw", "sophia"]}, "may not be sophia.*'lion'"),
        ({"train.schedule": {"low": 1, "high": 2}}, "may not be 1"),
        ({"train.label_smoothing": [0.0, 0]}, "twice"),
        ({"train.callbacks": [["calibration"]]}, "choices are single values"),
        ({"train.lr": {"low": 1e-5, "high": 1e-3, "scale": {"train.optimizer": {"lion": 1}}}}, "no setting with ch"),
        ({"train.lr": {"low": 1e-5, "high": 1e-3, "scale": {"train.optimizer": {"lion": 0}}}}, "above 0"),
        ({"train.steps": [5], "train.epochs": [1.0]}, "leave one of them out"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_searched_is_refused_and_named(space, said):
    with pytest.raises(ConfigError, match=said):
        parse_space(space, BASE)


def test_settings_that_do_not_fit_together_are_told_with_their_values():
    space = parse_space({"model.head_only": [True, False], "model.lora.rank": [None, 8]}, BASE)
    assert space.config(BASE, {"model.head_only": True, "model.lora.rank": None}).model.head_only
    with pytest.raises(ConfigError, match=r"model.head_only=true, model.lora.rank=8.*choose one of them"):
        space.config(BASE, {"model.head_only": True, "model.lora.rank": 8})


def test_a_file_that_holds_no_space_is_refused(tmp_path):
    file = tmp_path / "space.yaml"
    file.write_text("- train.lr\n")
    with pytest.raises(ConfigError, match=r"holds a list; write for example `train.lr"):
        read_space(file)


@given(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False))
def test_values_are_written_as_yaml_reads_them(value):
    read = yaml.safe_load(text_of(value))
    assert read == value or float(read) == pytest.approx(value, rel=1e-5)
