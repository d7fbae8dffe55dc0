"""A docstring states what is given or done; it does not begin as a fragment."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FRAGMENTS = ("Of ", "What ")


def fragments(source):
    """The lines of docstrings, of attributes too, that begin as a fragment."""
    blocks = [node.body for node in ast.walk(ast.parse(source)) if isinstance(getattr(node, "body", None), list)]
    texts = [item.value for block in blocks for item in block if isinstance(item, ast.Expr)]
    return sorted(
        text.lineno
        for text in texts
        if isinstance(text, ast.Constant) and isinstance(text.value, str) and text.value.lstrip().startswith(FRAGMENTS)
    )


def test_fragments_of_modules_classes_functions_and_attributes_are_found():
    source = '"""What it is."""\nx = 1\n"""Of y."""\ndef f():\n    """What it gives."""\n    """Share of y."""\n'
    assert fragments(source) == [1, 3, 5]


@pytest.mark.slow
@pytest.mark.parametrize("package", ["rmcore", "tasks", "flows", "experiments"])
def test_docstrings_are_statements(package):
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sorted((ROOT / package).rglob("*.py"))
        for line in fragments(path.read_text())
    ]
    assert not found, "say what is given or done instead of beginning with `Of` or `What`"
