"""A chat template that loops for ever is ended, in any thread and any process, and the next one renders as usual."""

import multiprocessing
import threading
import time

import pytest

from rmcore.core.errors import ModelError
from rmcore.data import chat_template
from rmcore.data.chat_template import render_chat
from rmcore.data.rendering import Renderer, Rendering
from rmcore.models.tiny import tiny_tokenizer

MESSAGES = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
LOOP = "{% for a in range(99999) %}" * 4 + "{% set b = a %}" + "{% endfor %}" * 4
RECURSION = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
FILTERS = "{% for a in range(99999) %}{% set b = range(99999) | map('string') | list %}{% endfor %}"
USUAL = "{% for message in messages %}{{ message['role'] }}: {{ message.content }}\n{% endfor %}"


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(chat_template, "LIMIT_SECONDS", 0.3)


def tokenizer_with(template):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def ends(tokenizer):
    with pytest.raises(ModelError, match=r"probably loops for ever"):
        render_chat(tokenizer, MESSAGES)


@pytest.mark.slow
@pytest.mark.parametrize("template", [LOOP, RECURSION, FILTERS], ids=["loops", "recursion", "filters"])
def test_what_never_ends_is_ended_and_the_thread_goes_on(template):
    ends(tokenizer_with(template))
    assert render_chat(tokenizer_with(USUAL), MESSAGES) == "user: Hello\nassistant: Hi\n"


@pytest.mark.slow
def test_threads_are_ended_each_for_itself():
    outcomes: dict[str, object] = {}
    looping, usual = tokenizer_with(LOOP), tokenizer_with(USUAL)

    def render(name, tokenizer, times):
        try:
            outcomes[name] = [render_chat(tokenizer, MESSAGES) for _ in range(times)][-1]
        except ModelError as error:
            outcomes[name] = error

    threads = [threading.Thread(target=render, args=(f"loop {n}", looping, 1)) for n in range(2)]
    threads += [threading.Thread(target=render, args=("usual", usual, 200))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert isinstance(outcomes["loop 0"], ModelError)
    assert isinstance(outcomes["loop 1"], ModelError)
    assert outcomes["usual"] == "user: Hello\nassistant: Hi\n"


@pytest.mark.slow
def test_a_fork_of_a_process_that_has_rendered_ends_its_own():
    render_chat(tokenizer_with(USUAL), MESSAGES)
    process = multiprocessing.get_context("fork").Process(target=ends, args=(tokenizer_with(LOOP),))
    process.start()
    process.join(60)
    assert process.exitcode == 0


def test_time_that_others_take_is_not_counted():
    tokenizer = tokenizer_with(USUAL)
    slow = type("Slow", (str,), {"__str__": lambda self: time.sleep(0.6) or "user"})
    assert "Hello" in render_chat(tokenizer, [{"role": slow("user"), "content": "Hello"}])


@pytest.mark.slow
def test_a_renderer_refuses_the_whole_template_and_not_one_row_after_the_other():
    tokenizer = tokenizer_with(USUAL)
    renderer = Renderer(tokenizer, Rendering("chat", 64))
    tokenizer.chat_template = LOOP
    with pytest.raises(ModelError, match="loops for ever"):
        renderer.try_sides([("Hello", "Hi"), ("And", "again")])


@pytest.mark.parametrize("template", ["{{ 9 ** 9 ** 9 }}", "{% set a = messages | length ** 99 %}{{ a }}"])
def test_powers_are_refused_before_they_compute(template):
    with pytest.raises(ModelError, match="takes a power"):
        render_chat(tokenizer_with(template), MESSAGES)


def test_arguments_that_are_handed_on_are_no_power():
    template = "{% macro f(role, content) %}{{ content }}{% endmacro %}{{ f(**messages[0]) }}"
    assert render_chat(tokenizer_with(template), MESSAGES) == "Hello"
