"""Digest of the code that a stage runs: computed from the import graph, not declared.

A stage's outcome can change when its own module or anything it imports from rmcore changes. Comments, docstrings and
formatting cannot change it, and neither can the modules in `WITHOUT_EFFECT` and files called as in
`FILES_WITHOUT_EFFECT`: settings enter a key by value, figures and reports are redrawn from the numbers.
"""

import ast
import gc
import hashlib
import os
import sys
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path

from rmcore.core.files import digests_memory, remember, remembered

PACKAGE = "rmcore"
WITHOUT_EFFECT = (
    "rmcore.config",
    "rmcore.core.capabilities",
    "rmcore.core.errors",
    "rmcore.core.tracking",
    "rmcore.core.progress",
    "rmcore.reporting",
    "rmcore.stages.stage",
    "rmcore.stages.stages",
)
FILES_WITHOUT_EFFECT = (".settings", ".blocks", ".command")
"""The same by the names of files, in any folder."""
_PACKAGE_FILE = "__init__.py"
_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")
"""Fields of statements that hold statements."""
_PARSING = threading.Lock()
"""One thread at a time: a second would take the collector's pause for its own state."""


def code_digests(module: str, root: Path | None = None) -> dict[str, str]:
    """Digest of `module` and of every rmcore module it imports, directly or not, by module name.

    Args:
        module: dotted name, for example `rmcore.stages.train`.
        root: folder that holds the package; default, where this file is installed.
    """
    base = str(root or Path(__file__).resolve().parents[2])
    digests: dict[str, str] = {}
    files: dict[str, tuple[str, int] | None] = {}
    todo = [module]
    prefixes = tuple(f"{left_out}." for left_out in WITHOUT_EFFECT)
    while todo:
        name = todo.pop()
        if name in files or name in WITHOUT_EFFECT or name.startswith(prefixes) or name.endswith(FILES_WITHOUT_EFFECT):
            continue
        # Most imported names are classes and functions: only of a package may one be a module, which needs a look.
        parent = files.get(name.rpartition(".")[0])
        files[name] = None if parent is not None and not parent[0].endswith(_PACKAGE_FILE) else _module_file(name, base)
        if (found := files[name]) is not None:
            digests[name], imports = _read_module(*found)
            todo.extend(reversed(imports))
    return dict(sorted(digests.items()))


def _module_file(name: str, base: str) -> tuple[str, int] | None:
    """Path and modification time of a module's file; None where it is none. Strings, as plans ask a thousand times."""
    stem = os.path.join(base, *name.split("."))
    for path in (f"{stem}.py", os.path.join(stem, _PACKAGE_FILE)):
        with suppress(FileNotFoundError, NotADirectoryError):
            return path, os.stat(path).st_mtime_ns
    return None


@cache
def _read_module(path: str, modified_ns: int) -> tuple[str, tuple[str, ...]]:
    """Digest of a module's code, and what it imports.

    They are remembered by the module's bytes, as to parse all modules takes half a second. What another Python or
    another way to digest has found is left alone.
    """
    source = Path(path).read_bytes()
    content = hashlib.sha256(source).hexdigest()
    known = _known_modules()
    if content not in known:
        known[content] = _parse_module(source.decode())
        remember(digests_memory(), {"by": _own_name(), "content": content, "module": known[content]})
    return known[content]


@cache
def _own_name() -> str:
    return f"{sys.hexversion:x} {hashlib.sha256(Path(__file__).read_bytes()).hexdigest()}"


@cache
def _known_modules() -> dict[str, tuple[str, tuple[str, ...]]]:
    known = {}
    for row in remembered(digests_memory()):
        if row.get("by") == _own_name():
            with suppress(KeyError, TypeError, ValueError):  # damaged: it is parsed again
                digest, imports = row["module"]
                known[row["content"]] = str(digest), tuple(map(str, imports))
    return known


def _parse_module(source: str) -> tuple[str, tuple[str, ...]]:
    tree = _parse(source)
    imports: list[str] = []
    todo: list[ast.AST] = [tree]
    while todo:  # statements alone, as neither an import nor a docstring is in an expression: `ast.walk` takes a second
        node = todo.pop()
        for block in _BLOCKS:
            todo.extend(getattr(node, block, ()))
        if isinstance(node, ast.Import):
            imports.extend(alias.name for alias in node.names if alias.name.split(".")[0] == PACKAGE)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE:
            # `from rmcore.data import gold` may name a module; `_module_file` drops what is not one.
            imports.extend([str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)])
        elif isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            _drop_docstring(node)
    text = ast.dump(tree, annotate_fields=False, include_attributes=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16], tuple(imports)


def _parse(text: str) -> ast.Module:
    """Syntax tree of a module, also while other threads parse (Prefect's and MLflow's do, to read signatures).

    CPython before 3.11.8 counts the depth of all threads' trees in one variable and fails with "AST constructor
    recursion depth mismatch" where another thread parses in the midst (python/cpython 106905). It can only come in
    through the garbage collector, which runs Python code then; so that waits.
    """
    with _PARSING:
        collects = gc.isenabled()
        gc.disable()
        try:
            return ast.parse(text)
        finally:
            if collects:
                gc.enable()


def _drop_docstring(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> None:
    # A string on its own line has no effect anywhere, so attribute docstrings go too.
    body = [
        child
        for child in node.body
        if not (
            isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant) and isinstance(child.value.value, str)
        )
    ]
    node.body = body or [ast.Pass()]
