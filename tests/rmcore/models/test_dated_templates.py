"""Chat templates that write the day's date: what a model is trained on and scored by does not depend on the day."""

import datetime
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import transformers as hf

from rmcore.config.model import LoraSettings, ModelConfig
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.models.trained import load_renderer

CPU = torch.device("cpu")
SIDE = ("Name a fruit", "A pear.")
TURNS = [{"role": "user", "content": SIDE[0]}, {"role": "assistant", "content": SIDE[1]}]
LLAMA = (Path(find_spec("trl").origin).parent / "chat_templates" / "llama3_2.jinja").read_text()
SMOL = (
    "{%- set today = strftime_now('%d %B %Y') -%}{{ '<|im_start|>system\nToday is ' ~ today ~ '<|im_end|>' }}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}{% endfor %}"
)


FIRST, SECOND = "EAST-14", "WEST+12"
"""Zones of time in which it is never the same day."""


@pytest.fixture
def go_to(monkeypatch):
    """Makes it the day of a zone."""

    def go(zone):
        monkeypatch.setenv("TZ", zone)
        time.tzset()

    go(FIRST)
    yield go
    monkeypatch.undo()
    time.tzset()


def with_template(tiny_folder, folder, template):
    for part in (hf.AutoModelForSequenceClassification, hf.AutoTokenizer):
        loaded = part.from_pretrained(tiny_folder)
        if part is hf.AutoTokenizer:
            loaded.chat_template = template
        loaded.save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("template", [LLAMA, SMOL, {"default": SMOL, "tool_use": LLAMA}], ids=["llama", "smol", "two"])
@pytest.mark.parametrize("lora", [None, LoraSettings()], ids=["whole", "adapter"])
def test_a_trained_model_s_tokens_are_those_of_every_day(template, lora, go_to, tiny_folder, tmp_path, capsys):
    """A training that is resumed after midnight, its checkpoint, and other readers of that."""
    base = with_template(tiny_folder, tmp_path / "base", template)
    config = ModelConfig(name=str(base), max_seq_len=512, lora=lora)
    rm = BradleyTerryRM.new(config, seed=0, device=CPU)
    assert "26 Jul" in rm.renderer.render(*SIDE)
    assert "writes the day's date" in capsys.readouterr().err
    (side,) = rm.renderer.tokenize_sides([SIDE])
    go_to(SECOND)
    assert BradleyTerryRM.new(config, seed=0, device=CPU).renderer.tokenize_sides([SIDE]) == [side]
    rm.save(tmp_path / "best")
    folders = [tmp_path / "best"] if lora is None else [tmp_path / "best", tmp_path / "best" / "adapter"]
    capsys.readouterr()
    for folder in folders:
        assert BradleyTerryRM.from_pretrained(folder, device="cpu").renderer.tokenize_sides([SIDE]) == [side]
        assert load_renderer(str(folder), max_seq_len=None, render_fn=None).tokenize_sides([SIDE]) == [side]
        text = hf.AutoTokenizer.from_pretrained(folder).apply_chat_template(TURNS, tokenize=False)
        assert text == rm.renderer.render(*SIDE)
    assert "date" not in capsys.readouterr().err


def test_a_model_that_was_trained_on_the_day_s_date_is_read_as_before_and_said(go_to, tiny_folder, tmp_path, capsys):
    folder = with_template(tiny_folder, tmp_path / "model", SMOL)
    rm = BradleyTerryRM.from_pretrained(folder, device="cpu")
    assert f"Today is {datetime.datetime.now():%d %B %Y}" in rm.renderer.render(*SIDE)
    go_to(SECOND)
    assert f"Today is {datetime.datetime.now():%d %B %Y}" in rm.renderer.render(*SIDE)
    assert "depend on the day" in capsys.readouterr().err


@pytest.mark.parametrize("use_chat_template", [True, False])
def test_a_template_that_is_not_asked_for_a_date_stays(use_chat_template, tiny_folder, tmp_path, capsys):
    """One with a date of its own (Llama 3.1's is always 26 Jul 2024), and one that nothing is rendered by."""
    template = "{% if not date_string is defined %}{% set date_string = '1 Jan 2020' %}{% endif %}{{ date_string }}"
    template = template + SMOL.partition("-%}")[2].replace("~ today ~", "~") if use_chat_template else SMOL
    base = with_template(tiny_folder, tmp_path / "base", template)
    config = ModelConfig(name=str(base), max_seq_len=96, use_chat_template=use_chat_template)
    rm = BradleyTerryRM.new(config, seed=0, device=CPU)
    assert rm.tokenizer.chat_template == template
    assert ("1 Jan 2020" in rm.renderer.render(*SIDE)) == use_chat_template
    assert "date" not in capsys.readouterr().err
