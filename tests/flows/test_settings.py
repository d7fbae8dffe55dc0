import json
import re

import pytest
from pydantic import ValidationError

from experiments.presets import PRESETS
from flows import cli_common, cli_experiment
from flows.cli import app
from flows.cli_common import FlowOptions, run_configured, settings_of
from flows.cli_experiment import MatrixOptions, run_or_plan
from flows.settings import changes_of, form_config, load_config
from rmcore.cli.guard import describe_validation, guard
from rmcore.config.base import MAX_WHOLE, Settings, _types
from rmcore.config.data import DataConfig
from rmcore.config.files import parse_yaml
from rmcore.core.errors import ConfigError, DataError, ModelError
from tasks.run_record import compared_settings


def test_file_then_assignments_change_the_preset(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("train: {lr: 0.1, epochs: 2}\nstudy: mine\n")
    config = load_config("demo", file, ["train.lr=1e-4", "train.save_every=null", "model.use_chat_template=false"])
    assert (config.train.lr, config.train.epochs, config.study) == (1e-4, 2, "mine")
    assert config.train.save_every is None
    assert config.model.use_chat_template is False
    assert config.data == PRESETS["demo"].data


RECORDED = PRESETS["rlhf"].model_copy(
    update={"rlhf": PRESETS["rlhf"].rlhf.model_copy(update={"more_rewards": {"mine.rules:brief": -0.5}})}
)


@pytest.mark.parametrize(
    ("assignments", "wanted"),
    [
        (["rlhf.more_rewards={}"], None),
        (["rlhf.more_rewards=null"], None),
        (["rlhf.more_rewards={other:fn: 1}"], {"other:fn": 1}),
        (["rlhf={more_rewards: {other:fn: 1}}"], {"other:fn": 1}),
        (["rlhf.more_rewards.a/b.c=1", "rlhf.more_rewards.d=2"], {"mine.rules:brief": -0.5, "a/b.c": 1, "d": 2}),
        (["rlhf.more_rewards.mine.rules:brief=2"], {"mine.rules:brief": 2}),
        (["rlhf.more_rewards=null", "rlhf.more_rewards.mine.rules:brief=2"], {"mine.rules:brief": 2}),
        (["rlhf.steps=7"], {"mine.rules:brief": -0.5}),
    ],
)
def test_a_mapping_is_one_setting_and_each_of_its_keys_can_be_set(assignments, wanted):
    config = load_config(None, None, assignments, RECORDED)
    assert config.rlhf.more_rewards == wanted
    assert form_config("rlhf", {}, changes_of("rlhf", config)) == config


def test_mlflow_takes_the_parameters_of_any_mapping():
    from mlflow.utils.validation import _validate_param_name

    rewards = dict.fromkeys(("runs/best/", "a=b", "/data//rm+1", "me@host:reward", "x" * 300), 1.0)
    config = load_config("rlhf", None, [f"rlhf.more_rewards={json.dumps(rewards)}", "data.attribute_weights.clear@=2"])
    params = compared_settings(config)
    for name in params:
        _validate_param_name(name)
    assert json.loads(params["rlhf.more_rewards"]) == rewards
    assert json.loads(params["data.attribute_weights"]) == {"clear@": 2.0}


@pytest.mark.parametrize("name", ["2024", "null", "yes", "1e-3", "a: b", "#pairs", "{x}", "pairs 'of' \"mine\".jsonl"])
def test_an_option_is_text_whatever_yaml_would_read_in_it(name):
    given = {"data.source": name, "model.name": None, "train.steps": 7, "rlhf.learning_rate": 3e-5}
    config = load_config("rlhf", None, settings_of(given))
    assert (config.data.source, config.train.steps, config.rlhf.learning_rate) == (name, 7, 3e-5)
    assert config.model == PRESETS["rlhf"].model


@pytest.mark.parametrize(
    ("preset", "text", "assignments", "said"),
    [
        ("demp", None, [], "Did you mean 'demo'"),
        ("demo", None, ["train.lrr=1"], "no setting 'train.lrr'.*Did you mean 'train.lr'"),
        ("demo", None, ["train=1"], "train is a group of settings"),
        ("demo", None, ["lr"], "dotted.name=value"),
        ("demo", "train: {lr: 1}\nseed: 1\ntrain: {lr: 2}", [], r"names 'train' twice in one group, in lines 1 and 3"),
        ("demo", "seed: 010", [], r"config.yaml, line 1: YAML would read 010 as 8, .* base 8.*'010' in quotes"),
        ("demo", None, ["train.steps=010"], "--set train.steps=010: YAML would read 010 as 8, a number in base 8"),
        ("demo", None, ["train.lr=-1:30.5"], "would read -1:30.5 as -90.5, a number in base 60"),
        ("demo", None, ["train={steps: 1, steps: 2}"], "names 'steps' twice"),
    ],
)
def test_mistakes_are_named(tmp_path, preset, text, assignments, said):
    file = None
    if text is not None:
        file = tmp_path / "config.yaml"
        file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        load_config(preset, file, assignments)


@pytest.mark.parametrize(
    "wrong",
    [
        *(
            "preset: [a]",
            "preset: {a: b}",
            "preset: 7",
            "seed: 010",
            "seed: 1:30",
            "sede: 1",
            "train: {lrr: 1}",
            "train: 1",
        ),
        *("seed: {", "seed: ]", "\tseed: 1", "seed: 'a", "seed: *a", "seed: 2001-99-99", "seed: x", "train: {lr: -1}"),
        *(
            "seed: 2\nseed: 3",
            "a: b: c",
            "seed: !!python/object:a {}",
            "? [a]\n: b",
            "seed: 0" + "7" * 400,
            "- a",
            "{}: 1",
        ),
        *(
            "train:\n  steps: x",
            "train:\n\n  lrr: 1",
            "model: {lora: {rank: x}}",
            "seed: \udcff",
            "seed: \x01",
            "%YAML 9",
        ),
    ],
)
def test_a_mistake_in_a_file_names_it_and_its_line(tmp_path, wrong):
    """Whatever it is: below two lines that are right, the message has the file and a line from the third on."""
    file = tmp_path / "mine.yaml"
    file.write_bytes(f"# mine\ndevice: cpu\n{wrong}\n".encode("utf-8", "surrogateescape"))
    with pytest.raises((ConfigError, ValidationError)) as caught:
        load_config(None, file, [])
    error = caught.value
    said = describe_validation(error) if isinstance(error, ValidationError) else str(error)
    assert str(file) in said
    assert {int(line) for line in re.findall(r"lines? (\d+)", said)} & set(range(3, 7)), said


@pytest.mark.parametrize(
    "setting",
    ["train.steps=true", "train.lr=false", "seed=yes", "data.limit=on", "policy.num_prompts=true", "train.clip=no"],
)
def test_a_truth_value_is_no_number(setting):
    with pytest.raises(ValidationError, match=r"true or false is given where a number is required"):
        load_config("demo", None, [setting])


def test_what_yaml_reads_as_it_looks_is_taken(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("train: {lr: 0.1, epochs: 2}\nseed: 0\nstudy: '010'\n")
    config = load_config(
        "smoke", file, ["data.source='1:30'", "train.dropout=yes", "data.limit=1_000", "train.clip=0.5"]
    )
    assert (config.study, config.data.source, config.train.dropout) == ("010", "1:30", True)
    assert (config.data.limit, config.train.clip, config.seed) == (1000, 0.5, 0)


@pytest.mark.parametrize("name", PRESETS)
def test_what_a_config_changes_of_a_preset_makes_it_again(name):
    for other in PRESETS.values():
        changes = json.loads(json.dumps(changes_of(name, other)))
        assert form_config(name, {}, changes) == other
    assert changes_of(name, PRESETS[name]) == {}


def test_a_form_changes_its_preset_by_fields_and_by_names():
    overrides = {"model.max_seq_len": 64, "train": {"clip": 0.5}, "model.lora": {"rank": 4}, "policy": None}
    config = form_config("demo", {"train.epochs": 2, "data.source": "pairs.csv"}, overrides)
    assert (config.train.epochs, config.train.steps, config.train.clip) == (2, None, 0.5)
    assert (config.model.max_seq_len, config.model.lora.rank, config.policy) == (64, 4, None)
    assert config.train.lr == PRESETS["demo"].train.lr


@pytest.mark.parametrize(
    ("chosen", "overrides", "said"),
    [
        ({"train.lr": 1}, {"train": {"lr": 2}}, "train.lr is in a field of its own and in overrides"),
        ({"policy.name": "sft"}, {"policy": None}, "policy.name is in a field of its own"),
        ({"train.epochs": 1, "train.steps": 5}, {}, "steps and epochs are both given"),
        ({"train.epochs": 1}, {"train.steps": 5}, "steps and epochs are both given"),
        ({}, {"train.lrr": 1}, "no setting 'train.lrr'.*Did you mean 'train.lr'"),
        ({}, ["train.lr"], "overrides is a list; write settings by name"),
    ],
)
def test_what_a_form_contradicts_is_refused(chosen, overrides, said):
    with pytest.raises(ConfigError, match=said):
        form_config("demo", chosen, overrides)


def test_a_merged_key_may_be_set_anew():
    assert parse_yaml("{a: &a {lr: 1, steps: 2}, b: {<<: *a, lr: 3}}", "here")["b"] == {"lr": 3, "steps": 2}


ODD_VALUES = {
    "date": "2026-01-01",
    "no date": "2026-13-45",
    "date by its tag": "!!timestamp x",
    "huge": "1" + "0" * 400,
    "huger than Python writes": "9" * 5000,
    "huge in base 16": "0x" + "f" * 5000,
    "infinite": "1e999",
    "number by its tag": "!!int x",
    "no number by its tag": "!!int ''",
    "no fraction by its tag": "!!float x",
    "set": "!!set {a, b}",
    "bytes": "!!binary AAEC",
    "nested lists": "[" * 300 + "]" * 300,
    "nested mappings": "{a: " * 300 + "1" + "}" * 300,
    "itself": "&a [*a]",
    "itself in a mapping": "&a {lr: *a}",
    "bomb": "[&a0 x, " + ", ".join(f"&a{n + 1} [*a{n}, *a{n}]" for n in range(60)) + "]",
    "code": "!!python/object/apply:os.system ['true']",
    "pairs": "!!pairs [a: 1]",
}


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["train.lr", "study"])
@pytest.mark.parametrize("value", ODD_VALUES)
@pytest.mark.parametrize("in_file", [False, True], ids=["--set", "file"])
def test_an_odd_value_is_refused_in_words(tmp_path, capsys, setting, value, in_file):
    """As the command line refuses it: status 2 and a message, not a traceback."""
    text = ODD_VALUES[value]
    *groups, name = setting.split(".")
    file = tmp_path / "mine.yaml"
    file.write_text("".join(f"{group}: {{" for group in groups) + f"{name}: {text}" + "}" * len(groups))
    arguments = (file, []) if in_file else (None, [f"{setting}={text}"])
    status = guard(lambda: load_config("smoke", *arguments) and None)
    said = capsys.readouterr().err
    if status == 0:  # as text it is one that is allowed
        assert setting == "study"
        return
    assert status == 2
    assert said.startswith("error: ")
    assert len(said) < 1500


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        (["model.name=owner/model"], ModelError, "does not answer"),
        (["model.name=deberta"], ModelError, "does not answer"),
        (["policy={name: owner/policy}"], ModelError, "owner/policy"),
        (["data.source=owner/pairs"], DataError, "does not answer"),
    ],
)
def test_names_of_the_hub_are_asked_for_before_anything_starts(settings, error, said, monkeypatch, tmp_path):
    monkeypatch.setenv("RM_OPT_HOME", str(tmp_path))
    monkeypatch.setattr(cli_common, "prepare_terminal", lambda: None)
    with pytest.raises(error, match=said):
        run_configured("no_module:that_may_be_loaded", "smoke", FlowOptions(set_=settings))


@pytest.mark.parametrize("plan", [True, False])
def test_an_experiment_asks_for_names_of_the_hub_before_anything_starts(plan, monkeypatch, tmp_path):
    monkeypatch.setenv("RM_OPT_HOME", str(tmp_path))
    monkeypatch.setattr(cli_experiment, "prepare_terminal", lambda: pytest.fail("the flow was started"))
    with pytest.raises(ModelError, match="owner/model"):
        run_or_plan("baseline", "smoke", MatrixOptions(plan=plan), {"seeds": 1, "model": "owner/model"})
    assert not list(tmp_path.iterdir())


def every_whole_number():
    """(settings, field) of every setting that takes a whole number, somewhere in its value."""
    kinds = Settings.__subclasses__()
    for kind in kinds:
        kinds += kind.__subclasses__()
    return [
        (kind, name) for kind in kinds for name, field in kind.model_fields.items() if int in _types(field.annotation)
    ]


@pytest.mark.parametrize(("kind", "name"), every_whole_number(), ids=lambda one: getattr(one, "__name__", one))
def test_no_setting_takes_a_whole_number_that_nothing_can_count(kind, name):
    for huge in (10**30, -(10**30), [10**30], {"a": 10**30}):
        with pytest.raises(ValidationError) as refused:
            kind.model_validate({name: huge})
        assert name in {error["loc"][0] for error in refused.value.errors()}


def test_the_largest_whole_number_is_one_that_json_holds():
    assert DataConfig(limit=MAX_WHOLE).limit == MAX_WHOLE == int(float(MAX_WHOLE))
    with pytest.raises(ValidationError, match="a whole number beyond 9,007,199,254,740,992"):
        DataConfig(limit=MAX_WHOLE + 1)


def test_a_plan_of_a_run_that_cannot_start_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RM_OPT_HOME", str(tmp_path / "home"))
    (tmp_path / "pairs.csv").write_text("question,good,bad\na,b,c\n")
    for words, said in ((["--device", "cuda:7"], "device=cuda:7"), ([], "no layout fits the columns")):
        call = ["run", "--data", str(tmp_path / "pairs.csv"), "--plan", *words]
        assert guard(lambda call=call: app(call, standalone_mode=False)) == 2
        assert said in capsys.readouterr().err
