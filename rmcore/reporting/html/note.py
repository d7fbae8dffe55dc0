"""A verdict as MLflow shows it: the description of a run or a model version, in its Markdown, and its first numbers.

MLflow's page renders descriptions as GitHub does and lets images, frames and links through; addresses, mentions and
`:smile:` become links and pictures by themselves. So every text from data is written with character references.
"""

import re
from collections.abc import Mapping, Sequence

from rmcore.core.metrics import metric_spec
from rmcore.reporting.html.cards import metric_texts
from rmcore.reporting.schema import Metric, NextRung, Verdict
from rmcore.reporting.verdict_style import VERDICT_STYLES

RUN_FILES = "run:"
"""Beginning of an address that names a file of the run described here; the tracker knows where the file is."""
_SPECIAL = re.compile(r"[&<>\\`*_\[\]{}#|~@]|:(?=\S)|(?<=www)\.|^[-+=]|^\d+[.)](?=\s|$)", re.IGNORECASE)
_SUMMARY = ("pairwise_accuracy", "accuracy_over_baseline", "ece_debiased")


def plain(text: str) -> str:
    """One line that every Markdown shows as it is.

    >>> plain("<b>50 * 2</b>")
    '&#60;b&#62;50 &#42; 2&#60;/b&#62;'
    """
    line = " ".join(text.split())
    return _SPECIAL.sub(lambda found: "".join(f"&#{ord(sign)};" for sign in found[0]), line)


def verdict_note(
    verdict: Verdict, more: NextRung | None, links: Mapping[str, str], places: Sequence[str] = (), numbers: str = ""
) -> str:
    """Describe a verdict in Markdown: its evidence level, what speaks against it, and what would raise it.

    Args:
        verdict: as it is.
        more: what would raise it.
        links: addresses by what they are called; one that begins with `RUN_FILES` is a file of the run.
        places: what else says where things are, for example a path on this machine.
        numbers: the main ones in one line.
    """
    lines = [f"### {VERDICT_STYLES[verdict['status']].sign} {plain(verdict['headline'])}", ""]
    # Two blanks break the line: what MLflow shows of a long description is its first three or four.
    lines += [f"**Evidence level {verdict['rung']} of 4**: {plain(verdict['evidence'])}  "]
    lines += [plain(numbers), ""] if numbers else [""]
    lines += _where(links, places)
    if verdict["reasons"]:
        lines += ["**What speaks against it**", "", *(f"- {plain(reason)}" for reason in verdict["reasons"]), ""]
    if more is not None:
        lines += [f"**Next step**: {plain(more['evidence'])}", ""]
        lines += [f"    {' '.join(more['command'].splitlines())}", "", f"It costs {plain(more['cost'])}."]
        lines += ["", plain(more["so_far"])] if "so_far" in more else []
    return "\n".join(lines).rstrip() + "\n"


def run_note(headline: str, links: Mapping[str, str], places: Sequence[str] = (), numbers: str = "") -> str:
    """The description of a run that ends in no verdict of the ladder: what it came to, its numbers, where things are.

    Arguments as of `verdict_note`.
    """
    lines = [f"### {plain(headline)}", "", *([plain(numbers), ""] if numbers else []), *_where(links, places)]
    return "\n".join(lines).rstrip() + "\n"


def experiment_note(headline: str, links: Mapping[str, str]) -> str:
    """The description of an experiment, whose page shows its first line until it is opened: so the links come first."""
    return linked(links, [headline]) + "\n"


def _where(links: Mapping[str, str], places: Sequence[str]) -> list[str]:
    return [linked(links, places), ""] if links or places else []


def linked(links: Mapping[str, str], places: Sequence[str]) -> str:
    """One line of links, by what they are called, and of other texts."""
    return " · ".join([*(f"[{plain(name)}]({address(link)})" for name, link in links.items()), *map(plain, places)])


def in_run(note: str, files: str) -> str:
    """A note whose links to files of its run lead to the page `files` of the run, where those are shown."""
    # No text from data holds this: brackets are character references there.
    return note.replace(f"]({RUN_FILES}", f"]({files}/")


def numbers_line(metrics: Mapping[str, Metric]) -> str:
    """The numbers on held-out pairs that are looked at first, in one line with their intervals."""
    parts = []
    for name in _SUMMARY:
        if name not in metrics:
            continue
        value, interval, has_interval = metric_texts(name, metrics[name])
        parts.append(f"{metric_spec(name).label} {value}" + (f" ({interval})" if has_interval else ""))
    return " · ".join(parts)


def address(link: str) -> str:
    """The address without the characters that would end a Markdown link."""
    return re.sub(r"[\s<>()\[\]`|\"'\\*~]", lambda sign: f"%{ord(sign[0]):02X}", link)
