"""One key, one result: no clock, load or free memory of the machine decides what the stage landscape stores."""

import itertools
import json
import time
from collections import Counter
from types import SimpleNamespace

import psutil
import pytest
import torch
from typer.testing import CliRunner

from flows.cli import app
from flows.settings import changes_of, form_config, load_config
from rmcore.config.pipeline import PipelineConfig
from rmcore.core.errors import CurvatureError, DataError
from rmcore.core.tracking import NullTracker
from rmcore.data.pair import Message, PreferencePair
from rmcore.data.rendering import Renderer, Rendering
from rmcore.data.table import write_pairs
from rmcore.landscape.measure import draw_sample, random_order
from rmcore.landscape.operators import LossHessian
from rmcore.landscape.settings import PRODUCT_PASSES, LandscapeConfig
from rmcore.models.batching import pad_pairs
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.stages.stages import STAGES
from single_stage import stage_with

CONFIG = PipelineConfig(device="cpu", landscape=LandscapeConfig(num_pairs=4, lanczos_steps=3, trace_probes=2, top_k=2))


@pytest.fixture
def upstream(rm, gold_pairs, tmp_path):
    rm.save(tmp_path / "train" / "best")
    (tmp_path / "prepare").mkdir()
    write_pairs(gold_pairs[:20], tmp_path / "prepare" / "test.parquet")
    return {"train": tmp_path / "train", "prepare": tmp_path / "prepare"}


def outcome(upstream, out):
    """Bytes of every file that the artifact's digest covers."""
    out.mkdir()
    stage_with("landscape", CONFIG, upstream).run(out, NullTracker(), lambda *at: None)
    return {path.name: path.read_bytes() for glob in STAGES["landscape"].outcome for path in out.glob(glob)}


@pytest.mark.slow
def test_a_slow_device_and_a_busy_machine_store_the_same_bytes(upstream, tmp_path, monkeypatch):
    undisturbed = outcome(upstream, tmp_path / "idle")
    assert set(undisturbed) == {"spectrum.json"}

    # Each look at a clock finds an hour gone, little memory is free, and a product gives way to other processes.
    hours = itertools.count(0, 3600)
    for name in ("time", "monotonic", "perf_counter"):
        monkeypatch.setattr(time, name, lambda: float(next(hours)))
    memory = SimpleNamespace(**{**psutil.virtual_memory()._asdict(), "available": 2**28})
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    products = LossHessian.products

    def slow(self, vectors):
        torch.randn(500, 500, generator=torch.Generator().manual_seed(0)).matrix_exp()
        return products(self, vectors)

    monkeypatch.setattr(LossHessian, "products", slow)
    assert outcome(upstream, tmp_path / "busy") == undisturbed


def test_a_measurement_costs_the_training_passes_of_its_products():
    once = LandscapeConfig(lanczos_steps=6, trace_probes=4, num_pairs=8)
    assert STAGES["landscape"].training_passes(once) == PRODUCT_PASSES * (6 + 4 + 1) * 8
    twice = once.model_copy(update={"normalized": True})
    assert STAGES["landscape"].training_passes(twice) == PRODUCT_PASSES * (2 * (6 + 4) + 1) * 8
    assert STAGES["landscape"].passes.__module__ not in STAGES["landscape"].code()["code"]  # an estimate is in no key


def test_a_preset_of_a_large_model_measures_the_curvature_of_its_head_unless_told_otherwise(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("preset: h200\nlandscape: {num_pairs: 8}\n")
    assert load_config(None, file, []).landscape == LandscapeConfig(num_pairs=8, parameters="head")
    assert load_config(None, file, ["landscape.parameters=all"]).landscape.parameters == "all"
    assert load_config("minilm", None, ["landscape.num_pairs=4"]).landscape == LandscapeConfig(num_pairs=4)
    recorded = load_config("h200", None, ["data.source=pairs.csv", "model.name=mine", "study=mine"])
    again = load_config(None, None, ["landscape.num_pairs=8"], recorded)
    assert again.landscape == LandscapeConfig(num_pairs=8, parameters="head")
    told = load_config("h200", None, ["landscape.parameters=all"])
    for config in (told, load_config("h200", None, ["landscape.num_pairs=4"])):
        assert form_config("h200", {}, changes_of("h200", config)) == config


BAD = PreferencePair((Message("system", "be brief"), Message("user", "hi")), "c", "d", pair_id="bad")


@pytest.fixture
def strict(rm):
    """Its template refuses a system turn."""
    rm.tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system turn') }}{% endif %}"
        "{{ m['role'] + ': ' + m['content'] }}\n{% endfor %}"
    )
    rm.renderer = Renderer(rm.tokenizer, Rendering("chat", 128))
    return rm


def test_a_curvature_is_drawn_among_the_pairs_that_can_be_read(strict, gold_pairs, capfd):
    config = LandscapeConfig(num_pairs=3)
    good, drawn = gold_pairs[:6], Counter()
    for seed in range(12):
        sample = draw_sample(strict, [BAD, *good], config, seed=seed)
        assert len(sample.pairs) == 3
        drawn.update(pair.pair_id for pair in sample.pairs)
        if 0 not in random_order(7, seed)[:3]:
            assert capfd.readouterr().err == ""
        else:
            assert "1 drawn pairs cannot be read by this model and are left out; pair bad" in capfd.readouterr().err
        plain = draw_sample(strict, good, config, seed=seed)
        assert [pair.pair_id for pair in plain.pairs] == [good[i].pair_id for i in sorted(random_order(6, seed)[:3])]
    assert set(drawn) == {pair.pair_id for pair in good}
    assert len(draw_sample(strict, [*good, BAD], LandscapeConfig(num_pairs=9), seed=0).pairs) == 6
    with pytest.raises(DataError, match=r"none of the 2 pairs can be read .*no system turn"):
        draw_sample(strict, [BAD, BAD], config, seed=0)


@pytest.mark.slow
def test_a_model_that_was_packed_has_the_same_curvature_and_rounded_weights_have_none(tiny_folder, gold_pairs):
    products = []
    for packed in (False, True):
        rm = BradleyTerryRM.from_pretrained(tiny_folder, device="cpu", max_seq_len=96)
        assert not packed or rm.packing() is not None
        rows = [pad_pairs(rm.renderer.tokenize_pairs(gold_pairs[:4]), pad_id=rm.pad_id)]
        operator = LossHessian(rm, rows)
        vector = torch.randn(operator.num_parameters, generator=torch.Generator().manual_seed(0))
        products.append(operator.product(vector))
    assert float(products[0].norm()) > 0
    torch.testing.assert_close(products[1], products[0], rtol=1e-5, atol=1e-6 * float(products[0].abs().max()))
    rounded = BradleyTerryRM.from_pretrained(tiny_folder, device="cpu", max_seq_len=96, dtype="bfloat16")
    with pytest.raises(CurvatureError, match="bfloat16 parameters"):
        LossHessian(rounded, rows)


@pytest.mark.slow
def test_the_command_prints_and_writes_the_record_its_numbers_and_its_figure(upstream, tmp_path):
    shared = ["--checkpoint", tmp_path / "train" / "best", "--data", tmp_path / "prepare" / "test.parquet"]
    sizes = ["--num-pairs", 4, "--lanczos-steps", 3, "--trace-probes", 2, "--top-k", 2, "--parameters", "head"]
    words = ["analyze", "-t", "hessian", *shared, *sizes, "--normalized", "--json", tmp_path / "record.json"]
    done = CliRunner().invoke(app, [*map(str, words), "--out", str(tmp_path / "curvature")])
    assert done.exit_code == 0, done.output
    told, record = (json.loads((tmp_path / name).read_text()) for name in ("record.json", "curvature/spectrum.json"))
    assert record.items() <= told.items()
    assert (record["method"], record["parameters"], record["num_pairs"]) == ("lanczos", "head", 4)
    assert record["normalized"]["temperature"] > 0
    assert {path.name for path in (tmp_path / "curvature" / "figures").iterdir()} == {"eigenvalues.png"}
    assert "Sharpness alone says nothing" in done.output
    metrics = json.loads((tmp_path / "curvature" / "summary.json").read_text())["metrics"]
    assert metrics["hessian/test_lambda_max_normalized"] == record["normalized"]["lambda_max"]
    assert metrics["hessian/test_lambda_max_standard_error"] == record["over_prompts"]["standard_error"]
    assert all(name.count("/") == 1 for name in metrics)
