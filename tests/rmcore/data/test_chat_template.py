"""A chat template has so much time and memory, whatever it does with them, in any thread and process of ours.

The next one renders as usual.
"""

import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import psutil
import pytest
from jinja2 import TemplateError

from machine import PATIENCE_S
from rmcore.core.errors import ModelError
from rmcore.core.files import exclusive, is_free
from rmcore.data import chat_template, template_process
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


GROWN = "{% set n = namespace(a=START) %}{% for i in range(TIMES) %}{% set n.a = n.a OPERATOR n.a %}{% endfor %}"
NUMBER = GROWN.replace("START", "7").replace("OPERATOR", "*")
ONE_OPERATION = {
    "power": "{{ 9 ** (9 ** 9) }}",
    "quotient": NUMBER.replace("TIMES", "21") + "{{ (n.a * n.a + 1) // n.a > 0 }}",
    "product": NUMBER.replace("TIMES", "60"),
    "long text": "{{ 'a' * 4000000000 }}",
    "long list": "{% set a = [0] * 900000000 %}{{ a | length }}",
    "grown text": GROWN.replace("START", "'ab'").replace("OPERATOR", "~").replace("TIMES", "60"),
    "filled in": "{{ '%2000000000d' | format(1) }}",
    "in data": "{% if messages[0].content == 'Hello' %}{{ 'a' * 4000000000 }}{% endif %}",
}
"""Time or memory that one operation takes, or that few do."""


def renders():
    """The process that renders for this one."""
    [process] = [child for child in psutil.Process().children() if template_process.__file__ in child.cmdline()]
    return process


def tokenizer_with(template):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def ends(tokenizer, why=r"probably loops for ever"):
    with pytest.raises(ModelError, match=why):
        render_chat(tokenizer, MESSAGES)


@pytest.mark.slow
@pytest.mark.parametrize("template", [LOOP, RECURSION, FILTERS], ids=["loops", "recursion", "filters"])
def test_what_never_ends_is_ended_and_the_thread_goes_on(template):
    ends(tokenizer_with(template))
    assert render_chat(tokenizer_with(USUAL), MESSAGES) == "user: Hello\nassistant: Hi\n"


@pytest.mark.slow
@pytest.mark.parametrize("template", ONE_OPERATION.values(), ids=ONE_OPERATION)
def test_no_operation_takes_more_time_or_memory_than_a_template_may(template):
    before = resource.getrusage(resource.RUSAGE_SELF)
    tokenizer = tokenizer_with(template)
    ends(tokenizer, r"loops for ever|bytes of memory")
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert after.ru_utime - before.ru_utime < 2.0  # none of it in this process
    assert (after.ru_maxrss - before.ru_maxrss) * 1024 < chat_template.LIMIT_BYTES // 4
    tokenizer.chat_template = USUAL
    assert render_chat(tokenizer, MESSAGES) == "user: Hello\nassistant: Hi\n"


@pytest.mark.slow
def test_a_fork_of_a_process_that_has_rendered_ends_its_own():
    render_chat(tokenizer_with(USUAL), MESSAGES)
    process = multiprocessing.get_context("fork").Process(target=ends, args=(tokenizer_with(LOOP),))
    process.start()
    process.join(PATIENCE_S)
    assert process.exitcode == 0


def renders_without_standard_streams():
    for descriptor in range(3):
        os.close(descriptor)
    render_chat(tokenizer_with(USUAL), MESSAGES)


def test_a_process_without_standard_streams_renders():
    process = multiprocessing.get_context("fork").Process(target=renders_without_standard_streams)
    process.start()
    process.join(PATIENCE_S)
    assert process.exitcode == 0


@pytest.mark.slow
def test_a_process_that_renders_long_grows_no_further():
    """Of a million dialogues none is refused because of those before it."""
    tokenizer = tokenizer_with(
        "{% macro f(a) %}{{ a }}{% endmacro %}{% for m in messages %}{{ f(m.content) }}{% endfor %}"
    )
    sizes = []
    for _ in range(3):
        chat_template.render_chats(tokenizer, [(MESSAGES, {})] * 5000)
        sizes.append(int(Path(f"/proc/{renders().pid}/statm").read_text().split()[0]) * resource.getpagesize())
    assert sizes[2] - sizes[1] < 2**20


def test_all_templates_of_a_process_are_rendered_by_one_other():
    """And it has none of this one's memory, which would be kept as it was."""
    texts, processes = set(), set()
    kept = np.ones(2**26)
    for template in (USUAL, USUAL + "{# another #}") * 2:
        texts.add(render_chat(tokenizer_with(template), MESSAGES))
        processes.add(renders())
    assert texts == {"user: Hello\nassistant: Hi\n"}
    [process] = processes
    assert process.memory_info().rss < kept.nbytes / 2


def test_a_lock_that_is_held_while_a_process_begins_is_free_when_it_is_released(tmp_path):
    tokenizer = tokenizer_with(USUAL)
    with exclusive(tmp_path / "lock"):
        render_chat(tokenizer, MESSAGES)
    assert is_free(tmp_path / "lock")


@pytest.mark.parametrize(
    "template",
    [
        USUAL,
        "{{ bos_token }}{% for m in messages %}{{ m | tojson }}{% if 'x' in m %}x{% endif %}{% endfor %}",
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}{{ style }}",
        "{% if add_generation_prompt %}go{% endif %}{{ tools }}{{ messages[0].thinking }}",
        "{{ raise_exception('no') if messages | length == 2 else messages.missing.deeper }}",
    ],
)
def test_the_text_is_that_of_apply_chat_template(template):
    tokenizer = tokenizer_with(template)
    tokenizer.bos_token = "<s>"
    dialogues = [
        (MESSAGES, {}),
        ([{"role": "user", "content": "half \ud800, \u2028, \x00 and \U0001f600", "x": None}], {"style": "plain"}),
        ([{"role": "a", "content": "\r\n", "reasoning_content": "because"}], {"add_generation_prompt": True}),
        ([*MESSAGES, {"role": "tool", "content": ""}], {"tools": [{"type": "function"}], "bos_token": "<b>"}),
        ([], {}),
    ]
    for dialogue, text in zip(dialogues, chat_template.render_chats(tokenizer, dialogues), strict=True):
        try:
            expected = tokenizer.apply_chat_template(dialogue[0], tokenize=False, **dialogue[1])
        except (ValueError, TemplateError):
            assert isinstance(text, TemplateError)
        else:
            assert text == expected


@pytest.mark.slow
def test_a_renderer_refuses_the_whole_template_and_not_one_row_after_the_other():
    tokenizer = tokenizer_with(USUAL)
    renderer = Renderer(tokenizer, Rendering("chat", 64))
    tokenizer.chat_template = LOOP
    with pytest.raises(ModelError, match="loops for ever"):
        renderer.try_sides([("Hello", "Hi"), ("And", "again")])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_to_the_process_that_renders_costs_no_dialogue(number):
    """A scheduler sends SIGTERM to all processes of a job, and the kernel ends one where memory is short."""
    tokenizer = tokenizer_with(USUAL)
    text = render_chat(tokenizer, MESSAGES)
    process = renders()
    process.send_signal(number)
    if number == signal.SIGKILL:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert render_chat(tokenizer, MESSAGES) == text
    assert (renders() == process) is (number != signal.SIGKILL)


KILLED = """
import os, signal
from types import SimpleNamespace
from rmcore.data import chat_template
chat_template._Process._next = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # once a request is under way
tokenizer = SimpleNamespace(get_chat_template=lambda *_: "{{ messages[0].content }}", special_tokens_map={})
chat_template.render_chats(tokenizer, [([{"role": "user", "content": "Hello"}], {})])
"""


def test_the_process_that_renders_ends_without_a_word_where_its_parent_is_killed():
    done = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True)  # until both have ended
    assert (done.returncode, done.stderr) == (-signal.SIGKILL, "")


def test_a_template_may_change_while_other_threads_render():
    tokenizer = tokenizer_with(USUAL)
    rendered: list[int] = []

    def render():
        for _ in range(10):
            rendered.append(len(chat_template.render_chats(tokenizer, [(MESSAGES, {})] * 20)))

    threads = [threading.Thread(target=render, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        tokenizer.chat_template = USUAL + "{# other #}" * (tokenizer.chat_template == USUAL)
        threads[0].join(0.01)
    assert rendered == [20] * 30
