"""How long a stage would take, by what such stages took."""

import time

import pytest

from rmcore.config.model import LoraSettings
from rmcore.config.pipeline import PipelineConfig, sections
from rmcore.core.metrics import CELL_STAGES
from rmcore.stages.stages import OPTIONAL, STAGES
from rmcore.study.estimates import FORWARD_SHARE, Estimates, SpeedProbe, kind, probe_kind
from rmcore.study.probe import probe

PROBE = SpeedProbe(pairs_per_second=20.0, start_seconds=7.0, num_train=1000, num_scored=300)


def config(**changes):
    train = {"steps": 40, "pairs_per_step": 8} | changes.pop("train", {})
    return PipelineConfig.model_validate({"device": "cpu", "train": train} | changes)


@pytest.fixture
def finished(publish, store):
    """Estimates from one finished cell: 320 pairs in 8 s of steps, 10 s in all, with the settings of `config`."""

    def estimates(made=None, probes=None, **training):
        made = made or config()
        refs = {"prepare": publish("prepare", made, {}, wall_seconds=3.0)}
        refs["train"] = publish("train", made, refs, wall_seconds=10.0, **training)
        publish("evaluate", made, refs, wall_seconds=5.0)
        return Estimates(store.entries(), probes or {})

    return estimates


@pytest.mark.slow
def test_training_time_is_pairs_over_throughput_and_what_is_spent_outside_of_steps(finished):
    estimates = finished(probes={probe_kind(config()): PROBE})  # a finished training is believed before a probe
    assert estimates.seconds(config(), "train") == pytest.approx(10.0)
    for steps in (1, 80, 1000):
        longer = config(train={"steps": steps})
        assert estimates.seconds(longer, "train") == pytest.approx(2.0 + steps * 8 / 40)


UNLIKE = [
    {"model": {"name": "minilm"}},
    {"model": {"max_seq_len": 1024}},
    {"model": {"lora": LoraSettings()}},
    {"train": {"precision": "bf16"}},
    {"train": {"batching": "plain", "token_budget": 8192}},
    {"train": {"packing": False}},
    {"train": {"gradient_checkpointing": True}},
    {"train": {"pairs_per_step": 64}},
    {"train": {"optimizer": "sam"}},
    {"device": "cuda"},
]


def test_another_kind_of_training_is_unknown_until_it_is_probed(finished):
    estimates = finished()
    for other in (config(**changes) for changes in UNLIKE):
        assert kind(other) != kind(config())
        assert estimates.seconds(other, "train") is None
        assert not estimates.knows(other)
        probed = Estimates(estimates.entries, {probe_kind(other): PROBE})
        assert probed.seconds(other, "train") == pytest.approx(7.0 + 40 * other.train.pairs_per_step / 20)
        assert probed.knows(other)


def test_the_pairs_of_an_epoch_are_those_of_the_data_that_a_probe_has_counted(finished):
    """Another data set of the same kind may be a thousand times larger."""
    thrice = config(train={"steps": None, "epochs": 3.0})
    larger = config(train={"steps": None, "epochs": 3.0}, data={"gold": {"num_prompts": 9999}})
    estimates = finished(config(train={"steps": None, "epochs": 1.0}), probes={probe_kind(thrice): PROBE})
    assert estimates.seconds(thrice, "train") == pytest.approx(2.0 + 3 * 1000 / 40)
    assert estimates.seconds(larger, "train") is None
    assert finished().seconds(thrice, "train") is None  # steps say how fast it was, not how long its data are


def test_a_damaged_record_is_passed_over(finished, store, publish):
    estimates = finished()
    [entry] = [entry for entry in estimates.entries if entry.stage == "train"]
    (entry.path / "training.json").write_text("{")
    assert estimates.seconds(config(), "train") is None
    whole = finished(config(seed=1), num_pairs=640)
    assert whole.seconds(config(), "train") == pytest.approx(320 / 80 + 2.0)


def test_the_other_stages_take_what_they_took(finished):
    estimates = finished()
    assert estimates.seconds(config(seed=9), "prepare") == 3.0
    assert estimates.seconds(config(seed=9, train={"lr": 1.0}), "evaluate") == 5.0
    assert estimates.seconds(config(evaluate={"train_pairs": 7}), "evaluate") is None
    assert estimates.seconds(config(model={"max_seq_len": 1024}), "evaluate") is None


def test_where_a_stage_was_never_run_the_probe_tells(finished):
    """A known training does not make what is measured after it known: nothing would ever be known of it."""
    made = config(**sections("smoke"), evaluate={"train_pairs": 100})
    estimates = finished()
    probed = Estimates(estimates.entries, {probe_kind(made): PROBE})
    assert estimates.seconds(made, "train") is not None
    assert probed.seconds(made, "evaluate") == pytest.approx(7.0 + FORWARD_SHARE * (300 + 100) / 20)
    for name in {*OPTIONAL} & {*CELL_STAGES}:
        assert estimates.seconds(made, name) is None
        assert not estimates.knows(made)
        passes = STAGES[name].training_passes(getattr(made, name))
        assert probed.seconds(made, name) == pytest.approx(7.0 + passes / 20)
    assert probed.knows(made)


TINY = {"data": {"gold": {"num_prompts": 20, "pairs_per_prompt": 1}}, "model": {"name": "tiny", "max_seq_len": 128}}


def test_a_probe_times_real_steps_and_counts_the_data():
    started = time.time()
    found = probe(config(**TINY, train={"pairs_per_step": 4, "token_budget": 8192}), started)
    took = time.time() - started
    assert 0 < found.start_seconds < took
    assert 2 * 4 / found.pairs_per_second < took
    assert found.num_train + found.num_scored == 20
