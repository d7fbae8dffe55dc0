"""A set of one's own, described by five lines of YAML: pairs, best of several answers, or several right answers.

    name: support-tickets
    file: tickets.jsonl          # next to the YAML, or a path
    kind: pairs                  # pairs | best-of-k | ties
    group: topic                 # a column by which scores are told apart; may be left out
    cluster: ticket_id           # a column of rows that are no independent observations; default: the prompt

`prompt`, `chosen` and `rejected` name their columns where those are called otherwise. In `pairs` both answers are
texts; in `best-of-k` rejected is a list of texts, in `ties` chosen is one, too.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from rmcore.config.files import read_mapping
from rmcore.core.errors import ConfigError
from rmcore.data.pair import opening
from rmcore.data.readers.turns import OF_THE_PROMPT
from rmcore.suites.question import OVERALL, Question, Row, Suite, best_is_right, by_group

YAML_SUFFIXES = (".yaml", ".yml")
Kind = Literal["pairs", "best-of-k", "ties"]
RULES: dict[Kind, str] = {
    "pairs": "share of pairs with the chosen answer strictly above",
    "best-of-k": "share of questions with the chosen answer strictly above all others",
    "ties": "share of questions with every right answer strictly above every other",
}
COLUMNS = ("prompt", "chosen", "rejected", "group", "cluster")
EXAMPLE = "write for example `name: mine`, `file: pairs.jsonl`, `kind: pairs`, a line each"


@dataclass(frozen=True, slots=True)
class OwnSet:
    """The lines of the YAML."""

    name: str
    file: str
    kind: Kind
    prompt: str = "prompt"
    chosen: str = "chosen"
    rejected: str = "rejected"
    group: str | None = None
    cluster: str | None = None


def read_own_suite(path: Path) -> tuple[Suite, str]:
    """Read the description of a set; gives it as a suite, and where its rows are.

    Raises:
        ConfigError: it cannot be read, or says too little, too much or nonsense.
    """
    own = _checked(path, read_mapping(path, EXAMPLE))
    file = Path(own.file) if own.file.startswith("~") else path.parent / own.file
    if not is_there(file):
        raise ConfigError(f"{path}: there is no file {own.file!r} (looked for {str(file)!r}).")

    def read(row: Row) -> Question:
        named = {own.prompt, own.chosen, own.rejected, own.group, own.cluster}
        prompt = row.prompt(own.prompt, [column for column in OF_THE_PROMPT if column not in named])
        lists = own.kind == "ties"
        chosen = row.texts(own.chosen) if lists else (row.text(own.chosen),)
        rejected = (row.text(own.rejected),) if own.kind == "pairs" else row.texts(own.rejected)
        if set(chosen) & set(rejected):
            raise row.wrong("an answer is both right and wrong")
        group = OVERALL if own.group is None else str(row.fields.get(own.group))
        cluster = opening(prompt) if own.cluster is None else str(row.fields.get(own.cluster))
        for column in (own.group, own.cluster):
            if column is not None and row.fields.get(column) in (None, ""):  # of a table of text: empty
                raise row.wrong(f"{column!r} is missing")
        if own.group is not None and group == OVERALL:
            raise row.wrong(f"{own.group!r} is {OVERALL!r}, which is what the score of all groups is called")
        name = str(row.number) if row.file is None else f"{row.file.name} {row.number}"
        return Question(name, prompt, (*chosen, *rejected), len(chosen), group, cluster)

    said = ", ".join(f"{name} is {getattr(own, name)}" for name in COLUMNS if getattr(own, name) not in (None, name))
    return Suite(
        name=own.name,
        title=own.name,
        hub="",
        split="train",
        terms="your own",
        rule=RULES[own.kind] + (f" ({said})" if said else ""),
        expected={},
        read=read,
        scores=lambda questions, rewards: by_group(best_is_right(questions, rewards), questions, of_groups=False),
    ), str(file.expanduser().resolve())


def is_there(path: Path) -> bool:
    """Whether there is such a file or folder, `~` being the home; also asked of what no path can be called."""
    try:
        return path.expanduser().exists()
    except (ValueError, RuntimeError):  # a null character; no home of that name
        return False


def _checked(path: Path, given: Mapping[str, Any]) -> OwnSet:
    known = {one.name for one in fields(OwnSet)}
    if unknown := sorted(map(str, set(given) - known)):
        raise ConfigError(f"{path}: {', '.join(map(repr, unknown))} is nothing that a set has; it has {sorted(known)}.")
    if wrong := [name for name, value in given.items() if not (isinstance(value, str) and value.strip())]:
        raise ConfigError(f"{path}: {wrong[0]} is {given[wrong[0]]!r} and no text; {EXAMPLE}.")
    if missing := [name for name in ("name", "file", "kind") if name not in given]:
        raise ConfigError(f"{path} does not say its {', '.join(missing)}; {EXAMPLE}.")
    if given["kind"] not in get_args(Kind):
        raise ConfigError(f"{path}: kind is {given['kind']!r} and none of {', '.join(get_args(Kind))}.")
    if not all(letter.isalnum() or letter in "-_." for letter in given["name"]):  # it names files
        raise ConfigError(f"{path}: name {given['name']!r} has other characters than letters, digits, -, _ and dots.")
    return OwnSet(**given)
