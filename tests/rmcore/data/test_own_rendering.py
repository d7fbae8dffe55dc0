"""A user's own rendering is used, recorded and required again."""

import dataclasses
import hashlib
import json
import subprocess
import sys

import pytest
from transformers import AutoTokenizer

from rmcore.core.errors import ConfigError, DataError, ModelError
from rmcore.data.pair import Message
from rmcore.data.render_fn import RenderFn, load_render_fn, render_fn_digest
from rmcore.data.rendering import Renderer, Rendering, choose_rendering

SOURCE = """
from rmcore.data.pair import prompt_messages

number = 3

def bracketed(prompt, completion):
    turns = "".join(f"<{turn.role}>{turn.content}" for turn in prompt_messages(prompt))
    return f"{turns}<answer>{completion}<end>"

def nothing(prompt, completion):
    return None
"""
DIALOGUE = (Message("system", "be brief"), Message("user", "hi"), Message("assistant", "yes?"), Message("user", "sum"))


@pytest.fixture(scope="module")
def tokenizer(tiny_folder):
    return AutoTokenizer.from_pretrained(tiny_folder)


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Name of a module in the current folder, which is not on sys.path, as for a console script."""
    name = f"my_rendering_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    yield name
    sys.modules.pop(name, None)


@pytest.mark.parametrize("parameters", ["", "prompt", "prompt, completion, more", "*, prompt, completion"])
def test_a_function_that_does_not_take_prompt_and_completion_is_refused_at_once(module, parameters):
    with open(f"{module}.py", "a") as file:
        file.write(f"\ndef odd({parameters}):\n    return ''\n")
    with pytest.raises(ConfigError, match=r"odd\(.*cannot be called with two arguments.*prompt, completion"):
        load_render_fn(f"{module}:odd")


def test_what_fails_in_a_function_is_named_with_its_place(module, tokenizer):
    with open(f"{module}.py", "a") as file:
        file.write("\ndef odd(prompt, completion):\n    return completion[99]\n")
    function = load_render_fn(f"{module}:odd")
    renderer = Renderer(tokenizer, Rendering("custom", 32, function.name), function)
    with pytest.raises(DataError, match=rf"odd failed with IndexError.*{module}.py, line \d+.*'hi', 'there'"):
        renderer.tokenize_sides([("hi", "there")])


def bracketed(prompt, completion):
    turns = [Message("user", prompt)] if isinstance(prompt, str) else prompt
    return "".join(f"<{turn.role}>{turn.content}" for turn in turns) + f"<answer>{completion}<end>"


OWN = RenderFn("own:bracketed", bracketed)


def own_renderer(tokenizer, limit=512, function=bracketed):
    return Renderer(tokenizer, Rendering("custom", limit, OWN.name), RenderFn(OWN.name, function))


def test_the_function_gets_the_prompt_and_its_text_is_tokenized_like_plain_text(tokenizer, module):
    name = f"{module}:bracketed"
    rendering = choose_rendering(tokenizer, use_chat_template=True, max_seq_len=99, render_fn=name)
    assert rendering == Rendering("custom", 99, name)
    renderer = Renderer(tokenizer, rendering, load_render_fn(name))
    expected = "<system>be brief<user>hi<assistant>yes?<user>sum<answer>4<end>"
    assert renderer.render(DIALOGUE, "4") == expected
    (side,) = renderer.tokenize_sides([(DIALOGUE, "4")])
    assert side.ids == [*tokenizer(expected)["input_ids"], *closing(tokenizer)]


def closing(tokenizer):
    return [] if tokenizer.eos_token_id == tokenizer.pad_token_id else [tokenizer.eos_token_id]


@pytest.mark.parametrize("returned", ["something else", "", None, b"a"])
def test_a_text_without_the_completion_is_refused(tokenizer, returned):
    renderer = own_renderer(tokenizer, function=lambda prompt, completion: returned)
    with pytest.raises(DataError, match=r"render_fn own:bracketed (dropped or rewrote|returned)"):
        renderer.render("p", "the completion")


def test_the_record_is_read_back_and_one_that_lacks_the_function_is_refused(tmp_path, tokenizer):
    rendering = Rendering("custom", 64, "my.module:render")
    rendering.save(tmp_path)
    assert Rendering.load(tmp_path) == rendering
    (tmp_path / "rm_rendering.json").write_text(json.dumps({"format": "custom", "max_seq_len": 8}))
    with pytest.raises(ModelError, match="render_fn=None"):
        Rendering.load(tmp_path)
    with pytest.raises(ModelError, match="only it, names a function"):
        dataclasses.replace(rendering, format="chat")


def test_a_recorded_function_is_never_imported_unasked_and_another_one_is_refused(tmp_path, monkeypatch, tokenizer):
    (tmp_path / "hostile_module.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    Rendering("custom", 64, "hostile_module:f").save(tmp_path)
    recorded = Rendering.load(tmp_path)
    with pytest.raises(ModelError, match=r"by hostile_module:f, .* not imported .*--render-fn hostile_module:f"):
        Renderer(tokenizer, recorded)
    with pytest.raises(ModelError, match=r"own:bracketed was passed; .*render_fn='hostile_module:f'"):
        Renderer(tokenizer, recorded, OWN)
    assert "hostile_module" not in sys.modules
    for form in ("chat", "plain"):
        with pytest.raises(ModelError, match=f"own:bracketed was passed to a model of the {form} format"):
            Renderer(tokenizer, Rendering(form, 64), OWN)


def test_what_cannot_be_imported_is_a_config_error(module, tmp_path):
    (tmp_path / "broken_syntax_here.py").write_text("def f(:\n")
    (tmp_path / "divides_by_zero.py").write_text("1 / 0\n")
    (tmp_path / "lacks_a_library.py").write_text("import no_such_library_anywhere\n")
    refused = {
        "no_such_module_anywhere:f": "cannot be imported .*current folder",
        "broken_syntax_here:f": "cannot be imported",
        "divides_by_zero:f": "cannot be imported .ZeroDivisionError",
        "lacks_a_library:f": "No module named 'no_such_library_anywhere'",
        f"{module}:absent": rf"{module}\.py\) has no absent",
        f"{module}:number": "is a int and cannot be called",
        "json": "does not name a function",
        ":f": "does not name a function",
    }
    for name, message in refused.items():
        with pytest.raises(ConfigError, match=message):
            load_render_fn(name)
    for name in ("no_such_module_anywhere:f", "no_such_package.inner:f", "sys:path", "json"):
        with pytest.raises(ConfigError, match="render_fn="):
            render_fn_digest(name)


def test_the_digest_follows_the_source_and_imports_nothing(module, tmp_path):
    source = tmp_path / f"{module}.py"
    assert render_fn_digest(f"{module}:bracketed") == hashlib.sha256(source.read_bytes()).hexdigest()
    before = render_fn_digest(f"{module}:bracketed")
    source.write_text(SOURCE + "\nraise SystemExit\n")
    assert render_fn_digest(f"{module}:bracketed") != before
    assert module not in sys.modules


def test_a_stage_process_finds_the_current_folder_and_no_file_in_it_replaces_a_library(module, tmp_path):
    (tmp_path / "wave.py").write_text("raise SystemExit('the file of the current folder')\n")
    code = (
        "import sys; from rmcore.data.render_fn import load_render_fn; assert '' not in sys.path; "
        f"print(load_render_fn('{module}:bracketed')('p', 'a')); import wave; wave.open"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "<user>p<answer>a<end>"), done.stderr


def test_a_dialogue_is_one_text_in_the_plain_format(tokenizer):
    text = Renderer(tokenizer, Rendering("plain", 512)).render(DIALOGUE, "4")
    assert text == "Prompt: System: be brief\n\nUser: hi\n\nAssistant: yes?\n\nUser: sum\n\nResponse: 4"
