"""Digest of the code that a stage runs: computed from the import graph, not declared.

A stage's outcome can change when its own module or anything it imports from rmcore changes. Comments, docstrings and
formatting cannot change it, and neither can the modules in `WITHOUT_EFFECT`: settings enter a key by value, figures
and reports are redrawn from the numbers. What else a stage imports and its key leaves out, its registration names.
"""

import ast
import hashlib
from functools import cache
from pathlib import Path

PACKAGE = "rmcore"
WITHOUT_EFFECT = (
    "rmcore.config",
    "rmcore.core.errors",
    "rmcore.core.tracking",
    "rmcore.core.progress",
    "rmcore.reporting",
    "rmcore.stages.settings",
)


def code_digests(module: str, hidden: tuple[str, ...] = (), root: Path | None = None) -> dict[str, str]:
    """Digest of `module` and of every rmcore module it imports, directly or not, by module name.

    Args:
        module: dotted name, for example `rmcore.stages.train`.
        hidden: modules and packages that are not digested, nor what only they import.
        root: folder that holds the package; default, where this file is installed.
    """
    base = root or Path(__file__).resolve().parents[2]
    digests: dict[str, str] = {}
    seen: set[str] = set()  # also what turns out to be no module: most imported names are classes and functions
    todo = [module]
    without = (*WITHOUT_EFFECT, *hidden)
    while todo:
        name = todo.pop()
        if name in seen or any(name == left_out or name.startswith(f"{left_out}.") for left_out in without):
            continue
        seen.add(name)
        path = _module_file(name, base)
        if path is None:
            continue
        digest, imports = _read_module(path, path.stat().st_mtime_ns)
        digests[name] = digest
        todo.extend(imports)
    return dict(sorted(digests.items()))


def _module_file(name: str, base: Path) -> Path | None:
    stem = base.joinpath(*name.split("."))
    for path in (stem.with_suffix(".py"), stem / "__init__.py"):
        if path.is_file():
            return path
    return None


@cache
def _read_module(path: Path, modified_ns: int) -> tuple[str, tuple[str, ...]]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imports: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imports.extend(alias.name for alias in node.names if alias.name.split(".")[0] == PACKAGE)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE:
            # `from rmcore.data import gold` may name a module; `_module_file` drops what is not one.
            imports.extend([str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)])
        elif isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            _drop_docstring(node)
    text = ast.dump(tree, annotate_fields=False, include_attributes=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16], tuple(imports)


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
