"""A chat template has so much time and memory, whatever it does with them, in any thread and process of ours.

The next one renders as usual.
"""

import gc
import multiprocessing
import os
import resource
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest

from rmcore.core.errors import ModelError
from rmcore.core.files import exclusive, is_free
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
    monkeypatch.setattr(chat_template, "IDLE_SECONDS", 600.0)


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


def tokenizer_with(template):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def ends(tokenizer, why=r"probably loops for ever"):
    with pytest.raises(ModelError, match=why):
        render_chat(tokenizer, MESSAGES)


@pytest.fixture(params=[False, True], ids=["in a process of its own", "in this process"])
def where(request, monkeypatch):
    """As on Linux, and as on macOS."""
    monkeypatch.setattr(chat_template, "IN_PROCESS", request.param)


@pytest.mark.slow
@pytest.mark.usefixtures("where")
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


def renders_without_standard_streams():
    for descriptor in range(3):
        os.close(descriptor)
    render_chat(tokenizer_with(USUAL), MESSAGES)


def test_a_process_without_standard_streams_renders():
    process = multiprocessing.get_context("fork").Process(target=renders_without_standard_streams)
    process.start()
    process.join(60)
    assert process.exitcode == 0


def test_time_that_others_take_is_not_counted(monkeypatch):
    monkeypatch.setattr(chat_template, "IN_PROCESS", True)  # the kernel counts for the other
    slow = type("Slow", (str,), {"__str__": lambda self: time.sleep(0.6) or "user"})
    assert "Hello" in render_chat(tokenizer_with(USUAL), [{"role": slow("user"), "content": "Hello"}])


@pytest.mark.slow
def test_a_process_that_renders_long_grows_no_further():
    """Of a million dialogues none is refused because of those before it."""
    tokenizer = tokenizer_with(
        "{% macro f(a) %}{{ a }}{% endmacro %}{% for m in messages %}{{ f(m.content) }}{% endfor %}"
    )
    sizes = []
    for _ in range(3):
        chat_template.render_chats(tokenizer, [(MESSAGES, {})] * 5000)
        child = chat_template._children[tokenizer]
        sizes.append(int(Path(f"/proc/{child._pid}/statm").read_text().split()[0]) * resource.getpagesize())
    assert sizes[2] - sizes[1] < 2**20


def test_many_dialogues_cost_one_process_that_goes_with_its_tokenizer():
    tokenizer = tokenizer_with(USUAL)
    renderer = Renderer(tokenizer, Rendering("chat", 64))
    started = []
    with pytest.MonkeyPatch.context() as patched:
        fork = os.fork
        patched.setattr(os, "fork", lambda: started.append(fork()) or started[-1])
        for number in range(3):
            renderer.tokenize_sides([(f"Question {number} {index}", "Hi") for index in range(50)])
            renderer.render("One", "more")
    assert len(started) == 1
    del tokenizer, renderer
    gc.collect()
    with pytest.raises(ProcessLookupError):
        os.kill(started[0], 0)


@pytest.mark.parametrize("idle", [0.0, 0.001, 0.05])
def test_a_process_without_work_ends_and_costs_no_dialogue(monkeypatch, idle):
    """It has a copy of all memory that its parent has changed since; also where it ends while the next is sent."""
    monkeypatch.setattr(chat_template, "IDLE_SECONDS", idle)
    tokenizer = tokenizer_with(USUAL)
    for _ in range(2 if idle else 20):
        assert render_chat(tokenizer, MESSAGES) == "user: Hello\nassistant: Hi\n"
        if idle:
            os.waitid(os.P_PID, chat_template._children[tokenizer]._pid, os.WEXITED | os.WNOWAIT)


def test_what_the_process_renders_follows_the_tokenizer():
    tokenizer = tokenizer_with("{{ bos_token }}{{ messages[0].content }}")
    tokenizer.bos_token = "<s>"
    assert render_chat(tokenizer, MESSAGES) == "<s>Hello"
    tokenizer.bos_token = "<bos>"
    assert render_chat(tokenizer, MESSAGES) == "<bos>Hello"


def test_a_lock_that_is_held_while_a_process_begins_is_free_when_it_is_released(tmp_path):
    tokenizer = tokenizer_with(USUAL)
    with exclusive(tmp_path / "lock"):
        render_chat(tokenizer, MESSAGES)
    assert is_free(tmp_path / "lock")


def test_a_text_is_the_same_wherever_it_is_rendered(monkeypatch):
    messages = [
        {"role": "user", "content": "half \ud800, \u2028, \x00 and \U0001f600"},
        {"role": "a", "content": "\r\n"},
    ]
    texts = set()
    for in_process in (False, True):
        monkeypatch.setattr(chat_template, "IN_PROCESS", in_process)
        texts.add(render_chat(tokenizer_with(USUAL), messages))
    assert len(texts) == 1


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
    process = psutil.Process(chat_template._children[tokenizer]._pid)
    process.send_signal(number)
    if number == signal.SIGKILL:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert render_chat(tokenizer, MESSAGES) == text
    assert (chat_template._children[tokenizer]._pid == process.pid) is (number != signal.SIGKILL)


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
