import ast
import gc
import sys
import threading

import pytest

from rmcore.core import files, fingerprints
from rmcore.core.fingerprints import code_digests

SOURCE = '''"""Docstring."""
from rmcore.b import helper
import rmcore.core.errors


def run():
    """Say something."""
    return helper() + 1  # a comment
'''


def package(tmp_path, **modules):
    folder = tmp_path / "rmcore"
    folder.mkdir(exist_ok=True)
    (folder / "__init__.py").touch()
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)
    return lambda: code_digests("rmcore.a", root=tmp_path)


GRAPHS = {
    "followed": ({"a": SOURCE, "b": "from rmcore.c import x\ndef helper(): return x", "c": "x = 1", "errors": "",
                  "d": ""}, "abc"),
    "names alike": ({"a": "import rmcore.configuration, rmcore.config", "configuration": "", "config": ""},
                    ("a", "configuration")),
    "settings, blocks and commands": (
        {"a": "import rmcore.settings, rmcore.blocks, rmcore.command, rmcore.settings_of_all",
         "settings": "", "blocks": "", "command": "", "settings_of_all": ""}, ("a", "settings_of_all")),
    "a circle": ({"a": "import rmcore.b", "b": "import rmcore.a"}, "ab"),
}  # fmt: skip


@pytest.mark.parametrize("name", GRAPHS)
def test_imports_are_followed_and_modules_without_effect_left_out(tmp_path, name):
    modules, expected = GRAPHS[name]
    assert set(package(tmp_path, **modules)()) == {f"rmcore.{one}" for one in expected}


def test_comments_docstrings_and_layout_do_not_count(tmp_path):
    modules = {"b": "def helper(): return 1", "errors": ""}
    before = package(tmp_path, a=SOURCE, **modules)()
    prettier = (
        SOURCE.replace("# a comment", "").replace("Say something", "Say more").replace("helper() + 1", "(helper() + 1)")
    )
    assert package(tmp_path, a=prettier, **modules)() == before


def test_a_change_in_an_imported_module_changes_only_its_digest(tmp_path):
    before = package(tmp_path, a=SOURCE, b="def helper(): return 1", errors="")()
    after = package(tmp_path, a=SOURCE, b="def helper(): return 2", errors="")()
    assert before["rmcore.a"] == after["rmcore.a"]
    assert before["rmcore.b"] != after["rmcore.b"]


@pytest.mark.slow
def test_real_stages_depend_on_what_they_run_and_not_on_each_other():
    train = code_digests("rmcore.stages.train")
    assert {"rmcore.stages.train", "rmcore.training.step", "rmcore.training.losses", "rmcore.data.rendering"} <= set(
        train
    )
    others = ("reporting.figures", "policy", "landscape", "core.store", "stages.stage", "stages.order")
    assert not any(name.startswith(tuple(f"rmcore.{one}" for one in others)) for name in train)
    assert "rmcore.training.losses" not in code_digests("rmcore.stages.readiness")


class _Finalized:
    """Garbage that runs Python code as it is collected."""

    def __init__(self):
        self.itself = self

    def __del__(self):
        sum(range(50))


@pytest.fixture
def thread_that_parses():
    """A thread that parses all the time and comes in whenever it may; the collector runs often."""
    often, thresholds, ended = sys.getswitchinterval(), gc.get_threshold(), threading.Event()

    def parse():
        while not ended.is_set():
            ast.parse("def signature(a=1): pass")

    thread = threading.Thread(target=parse)
    thread.start()
    sys.setswitchinterval(1e-6)
    gc.set_threshold(50)
    yield
    ended.set()
    thread.join()
    sys.setswitchinterval(often)
    gc.set_threshold(*thresholds)


def test_another_thread_may_parse_at_the_same_time(tmp_path, thread_that_parses):
    # It failed with a SystemError of CPython 3.11.7 in a cell of a matrix, once in some hundred cells.
    for number in range(20):
        digests = package(tmp_path, a=f"x = {number}\n" + "y = [[[1], 2], 3]\n" * 40)
        for _ in range(20):
            _Finalized()
        assert set(digests()) == {"rmcore.a"}
    assert gc.isenabled()


def test_code_is_parsed_once_until_it_changes(tmp_path, monkeypatch):
    monkeypatch.setenv(files.DIGESTS_VARIABLE, str(tmp_path / "digests.jsonl"))
    parsed, parse = [], ast.parse
    monkeypatch.setattr(ast, "parse", lambda text: parsed.append(text) or parse(text))

    def in_a_new_process():
        for remembered in (fingerprints._read_module, fingerprints._known_modules):
            remembered.cache_clear()
        parsed.clear()
        return digests()

    digests = package(tmp_path, a=SOURCE, b="def helper(): return 1", errors="")
    first = in_a_new_process()
    assert len(parsed) == len(first) == 2
    assert in_a_new_process() == first
    assert parsed == []
    package(tmp_path, b="def helper(): return 2")
    second = in_a_new_process()
    assert len(parsed) == 1
    assert first["rmcore.b"] != second["rmcore.b"]
    (tmp_path / "digests.jsonl").write_text("{\n")
    assert in_a_new_process() == second
    assert len(parsed) == 2
    fingerprints._known_modules.cache_clear()
