"""`rm-opt export` as a user types it: one plain folder with the same rewards, or a clear refusal and no folder."""

import json
import re
import shutil
import sys

import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file

from command_line import rm_opt
from rmcore.cli import export
from rmcore.config.model import LoraSettings, ModelConfig
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.models.seal import check_seal

WRITTEN = {
    *("README.md", "chat_template.jinja", "config.json", "model.safetensors"),
    *("rm_preference.json", "rm_rendering.json", "rm_seal.json", "tokenizer.json", "tokenizer_config.json"),
}
PROMPTS = ["What is 2 + 2?", "Sort: pear, fig", "Name a fruit " * 6]
RESPONSES = ["4", "fig, pear. Of course, gladly.", "lemon"]


def trained(folder, out, **settings):
    """Save `tiny` as after a training: with weights, adapters too, that differ from the base's."""
    config = ModelConfig(name=str(folder), max_seq_len=96, **settings)
    rm = BradleyTerryRM.new(config, seed=0, device=torch.device("cpu"))
    torch.manual_seed(1)
    for name, parameter in rm.model.named_parameters():
        if parameter.requires_grad and "lora_A" not in name:
            parameter.data += 0.02 * torch.randn_like(parameter)
    rm.save(out)
    return rm


@pytest.fixture(scope="module")
def with_lora(tiny_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora")
    return folder, trained(tiny_folder, folder, lora=LoraSettings(rank=4)).score(PROMPTS, RESPONSES)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-4), ("bfloat16", 2**-5)])
@pytest.mark.parametrize("source", ["adapter", "merged"])
def test_an_export_is_a_plain_folder_with_the_same_rewards(source, dtype, bound, with_lora, tmp_path):
    folder, live = with_lora
    checkpoint = folder / "adapter" if source == "adapter" else folder
    out = tmp_path / "out"
    status, said, errors = rm_opt("export", "--checkpoint", checkpoint, "--out", out, "--dtype", dtype)
    assert status == 0, errors
    difference, allowed = map(float, re.search(r"rewards: (\S+) \(allowed: (\S+)\)", said).groups())
    assert difference <= allowed
    assert allowed >= 0.99 * bound
    assert (difference > 1e-4) == (dtype == "bfloat16")  # rounding is what there is to see, and only there
    weights = load_file(out / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {getattr(torch, dtype)}
    assert json.loads((out / "config.json").read_text())["dtype"] == dtype
    assert not any("lora" in key for key in weights)
    assert {path.name for path in out.iterdir()} == WRITTEN
    check_seal(out)
    rm = BradleyTerryRM.from_pretrained(out, device="cpu")
    scale = max(1.0, float(np.abs(live).max()))
    np.testing.assert_allclose(rm.score(PROMPTS, RESPONSES), live, atol=bound * scale)
    model = hf.AutoModelForSequenceClassification.from_pretrained(out, dtype=torch.float32).eval()
    sides = rm.renderer.tokenize_sides(list(zip(PROMPTS, RESPONSES, strict=True)))
    plain = [model(input_ids=torch.tensor([side.ids])).logits.item() for side in sides]
    np.testing.assert_allclose(plain, rm.score(PROMPTS, RESPONSES), atol=1e-5)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_empty_folder_may_stand_there_and_a_full_one_may_not(with_lora, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    arguments = ("--checkpoint", with_lora[0], "--out", out)
    status, _, errors = rm_opt("export", *arguments)
    assert status == 2
    assert "exists and is not empty" in errors
    assert [path.name for path in out.iterdir()] == ["notes.txt"]
    (out / "notes.txt").unlink()
    assert rm_opt("export", *arguments)[0] == 0
    assert (out / "model.safetensors").is_file()


def test_rewards_that_do_not_agree_leave_no_folder(with_lora, tmp_path, monkeypatch):
    monkeypatch.setitem(export.BOUNDS, export.Dtype.bfloat16, 1e-7)
    arguments = ("--checkpoint", with_lora[0], "--out", tmp_path / "out", "--dtype", "bfloat16")
    status, _, errors = rm_opt("export", *arguments)
    assert status == 2
    assert "differ by up to" in errors
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_rendering_function_must_be_named_again(tiny_folder, tmp_path, monkeypatch):
    (tmp_path / "export_rendering.py").write_text(
        "def join(prompt, completion):\n    return f'{prompt} => {completion}'\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    trained(tiny_folder, tmp_path / "custom", render_fn="export_rendering:join")
    arguments = ("--checkpoint", tmp_path / "custom", "--out", tmp_path / "out")
    status, _, errors = rm_opt("export", *arguments)
    assert status == 2
    assert "--render-fn export_rendering:join" in errors
    assert not (tmp_path / "out").exists()
    status, _, errors = rm_opt("export", *arguments, "--render-fn", "export_rendering:join")
    assert status == 0, errors
    recorded = json.loads((tmp_path / "out" / "rm_rendering.json").read_text())
    assert recorded["render_fn"] == "export_rendering:join"


def test_a_rendering_function_that_nothing_asked_for_is_refused(with_lora, tmp_path):
    arguments = ("--checkpoint", with_lora[0], "--out", tmp_path / "out", "--render-fn", "os.path:join")
    status, _, errors = rm_opt("export", *arguments)
    assert status == 2
    assert "whose rewards it would change" in errors
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("damage", ["absent", "base gone"])
def test_what_cannot_be_loaded_is_one_clear_error(damage, tiny_folder, tmp_path):
    base = shutil.copytree(tiny_folder, tmp_path / "base")
    trained(base, tmp_path / "saved", lora=LoraSettings())
    shutil.rmtree(base if damage == "base gone" else tmp_path / "saved")
    status, _, errors = rm_opt("export", "--checkpoint", tmp_path / "saved" / "adapter", "--out", tmp_path / "out")
    assert status == 2
    assert str(base if damage == "base gone" else tmp_path / "saved") in errors
    assert not (tmp_path / "out").exists()
