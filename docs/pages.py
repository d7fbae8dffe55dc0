"""Put the pages of the site together: the written ones, what they link to in the checkout, and the reference.

    PYTHONPATH=tests/support python docs/pages.py build/docs && mkdocs build --strict --config-file docs/mkdocs.yml

The written pages are read on GitHub, too, so their links are those of the checkout. A page of the checkout that one of
them leads to comes along, code as a page with its text: so the site is whole without any other place.
"""

import ast
import json
import posixpath
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HERE = "docs"
CHECKOUT = "checkout"
"""Folder of the site for files outside of docs/."""
STYLE = "site.css"
LINK = re.compile(r"(?<=\]\()(?!\w+:)([^)#\s]*)(#[^)\s]*)?(?=\))")
"""The target of a relative link or picture, and its anchor."""
FENCE = re.compile(r"^\s*(```+)")
MARKER = re.compile(r"^([-*]|\d+\.) ")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".slurm": "bash"}


def assemble(out: Path) -> None:
    """Write all pages and pictures into an emptied folder.

    Raises:
        FileNotFoundError: a link leads nowhere; the message names the page.
    """
    import gallery
    import reference

    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    waiting = [f"{HERE}/{path.name}" for path in sorted((ROOT / HERE).glob("*.md"))]
    done: set[str] = set()
    settings = reference.names()
    while waiting:
        path = waiting.pop()
        if path in done:
            continue
        done.add(path)
        source, target = ROOT / path, out / page_of(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix == ".png":
            shutil.copy(source, target)
            continue
        if source.suffix in (".md", ".ipynb"):
            text, linked = relinked(source.read_text() if source.suffix == ".md" else notebook(source), path)
            waiting += linked
            target.write_text(_with_link_to_settings(for_markdown_py(text), path, settings))
        else:
            target.write_text(_listing(path) if source.is_dir() else _source(path))
    shutil.copy(ROOT / HERE / STYLE, out / STYLE)
    (out / "commands.md").write_text(reference.commands_page())
    (out / "settings.md").write_text(reference.settings_page())
    (out / "figures.md").write_text(gallery.page())
    gallery.draw(out / gallery.FOLDER)


def page_of(path: str) -> str:
    """Return the path of a file or folder of the checkout among the pages; those of docs/ are at the top."""
    folder, name = posixpath.split(path)
    place = name if folder == HERE else posixpath.join(CHECKOUT, path)
    if (ROOT / path).is_dir():
        return posixpath.join(place, "index.md")
    return place if Path(path).suffix in (".md", ".png") else f"{place}.md"


def linked_path(target: str, page: str) -> str:
    """The file or folder of the checkout that a relative link of a page leads to.

    Raises:
        FileNotFoundError: there is none.
    """
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), target)) if target else page
    if not (ROOT / path).exists():
        raise FileNotFoundError(f"{page} links to {target}, and there is no {path}; correct the link")
    readme = posixpath.join(path, "README.md")
    return readme if (ROOT / readme).is_file() else path


def relinked(text: str, page: str) -> tuple[str, list[str]]:
    """A page with its links as they are in the site, and the paths that it links to."""
    found: list[str] = []

    def moved(match: re.Match[str]) -> str:
        anchor = match[2] or ""
        if not match[1]:
            return anchor
        path = linked_path(match[1], page)
        found.append(path)
        return posixpath.relpath(page_of(path), posixpath.dirname(page_of(page)) or ".") + anchor

    return outside_fences(text, lambda line: LINK.sub(moved, line)), found


def notebook(path: Path) -> str:
    """A notebook as a page: its texts, and its cells as Python."""
    cells = json.loads(path.read_text())["cells"]
    sources = [(cell["cell_type"], "".join(cell["source"])) for cell in cells]
    return "\n\n".join(text if kind == "markdown" else f"```python\n{text}\n```" for kind, text in sources) + "\n"


def outside_fences(text: str, change: Callable[[str], str]) -> str:
    """The text with every line changed that is in no block of code."""
    lines, fence = [], ""
    for line in text.splitlines():
        mark = FENCE.match(line)
        if mark and (not fence or mark[1] == fence):
            fence = "" if fence else mark[1]
            lines.append(line)
        else:
            lines.append(line if fence else change(line))
    return "\n".join(lines) + "\n"


def headings(text: str) -> list[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    found: list[str] = []

    def note(line: str) -> str:
        heading = re.match(r"#{1,6} +(.*?) *$", line)
        if heading:
            plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading[1])
            found.append(re.sub(r"[^\w\- ]", "", plain).strip().lower().replace(" ", "-"))
        return line

    outside_fences(text, note)
    return found


def for_markdown_py(text: str) -> str:
    """The page for Python-Markdown, which wants four spaces where GitHub takes two or three: in an item of a list."""
    lines: list[str] = []
    in_list = nested = False
    before = ""
    for line in text.splitlines():
        if MARKER.match(line):
            in_list, nested = True, False
        elif line and not line.startswith(" ") and not before:
            in_list = False
        deeper = re.match(r" {2,3}(\S.*)", line) if in_list else None
        if deeper and MARKER.match(deeper[1]) and not nested:
            lines += [""] if before else []  # a list below an item begins after a blank line
            nested = True
        lines.append(" " * 4 + deeper[1] if deeper else line)
        before = line
    return "\n".join(lines) + "\n"


def _with_link_to_settings(text: str, page: str, names: frozenset[str]) -> str:
    """Setting names in code become links to what the reference says of them; not in headings, nor inside links."""
    settings = posixpath.relpath("settings.md", posixpath.dirname(page_of(page)) or ".")

    def linked(match: re.Match[str]) -> str:
        name = match[1]
        return f"[`{name}`]({settings}#{name})" if name in names else match[0]

    def change(line: str) -> str:
        return line if line.startswith("#") else re.sub(r"(?<![\[`])`([a-z_]+(?:\.[a-z_]+)+)`(?!`)", linked, line)

    return outside_fences(text, change)


def _source(path: str) -> str:
    language = LANGUAGES.get(Path(path).suffix, "text")
    return f"---\nsearch:\n  exclude: true\n---\n\n# {path}\n\n`````{language}\n{(ROOT / path).read_text()}`````\n"


def _listing(path: str) -> str:
    """A folder of modules as a table of what each is for."""
    rows = ["| file | what |", "| --- | --- |"]
    for file in sorted((ROOT / path).glob("*.py")):
        about = (ast.get_docstring(ast.parse(file.read_text())) or "").split("\n\n")[0].replace("\n", " ")
        rows.append(f"| `{file.name}` | {about.replace('|', '&#124;').replace('<', '&lt;')} |")
    return "---\nsearch:\n  exclude: true\n---\n\n# " + path + "\n\n" + "\n".join(rows) + "\n"


if __name__ == "__main__":
    assemble(Path(sys.argv[1]))
