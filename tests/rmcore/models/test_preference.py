"""A checkpoint knows the scale of its margins, through saving, loading, merging and exporting."""

import json

import pytest
import torch

from rmcore.cli.export import Dtype, export
from rmcore.config.model import LoraSettings, ModelConfig
from rmcore.core.errors import ModelError
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.models.seal import PREFERENCE_FILE, write_seal

CPU = torch.device("cpu")


@pytest.fixture
def saved(rm, tmp_path):
    """A checkpoint of beta 1, whose record a test changes; `rm` itself is shared."""
    rm.save(tmp_path / "model")
    return tmp_path / "model"


def load(folder):
    return BradleyTerryRM.from_pretrained(folder, device="cpu")


@pytest.mark.slow
def test_beta_survives_adapters_their_merge_and_export(saved, tmp_path):
    rm = BradleyTerryRM.new(ModelConfig(name=str(saved), max_seq_len=96, lora=LoraSettings()), seed=0, device=CPU)
    rm.beta = 0.25
    rm.save(tmp_path / "merged")
    adapter = load(tmp_path / "merged" / "adapter")
    assert adapter.has_adapters
    assert (load(tmp_path / "merged").beta, adapter.beta) == (0.25, 0.25)
    adapter.save(tmp_path / "again")
    assert load(tmp_path / "again").beta == 0.25
    export(str(tmp_path / "again"), tmp_path / "exported", Dtype.bfloat16)
    assert load(tmp_path / "exported").beta == 0.25


def test_a_checkpoint_without_a_record_has_beta_one(saved):
    (saved / PREFERENCE_FILE).unlink()
    write_seal(saved)
    assert load(saved).beta == 1.0


@pytest.mark.parametrize("value", [0, float("nan"), 10**400, "0.25", True])
def test_a_beta_that_is_no_scale_is_refused_with_its_file(saved, value):
    (saved / PREFERENCE_FILE).write_text(json.dumps({"beta": value}))
    with pytest.raises(ModelError, match=rf"model/{PREFERENCE_FILE} says beta="):
        load(saved)
