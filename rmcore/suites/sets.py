"""The benchmarks that are known by a name, and how one is named: NAME, NAME=PATH, a YAML of one's own, or `all`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from rmcore.config.files import read_mapping
from rmcore.core.errors import ConfigError
from rmcore.data.pair import opening
from rmcore.data.readers.sources import source_digest
from rmcore.data.readers.turns import OF_THE_PROMPT
from rmcore.suites.pairwise import JUDGE_BENCH, LLMBAR, REWARD_BENCH, RMB
from rmcore.suites.question import OVERALL, Question, Row, Suite, best_is_right, by_group, digest, read_questions
from rmcore.suites.several_answers import PPE_CORRECTNESS, PPE_HUMAN, REWARD_BENCH_2, RM_BENCH

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
    """Read the description of a set of one's own; gives it as a suite, and where its rows are.

        name: support-tickets
        file: tickets.jsonl          # next to the YAML, or a path
        kind: pairs                  # pairs | best-of-k | ties
        group: topic                 # a column by which scores are told apart; may be left out
        cluster: ticket_id           # a column of rows that are no independent observations; default: the prompt

    `prompt`, `chosen` and `rejected` name their columns where those are called otherwise. In `pairs` both answers are
    texts; in `best-of-k` rejected is a list of texts, in `ties` chosen is one, too.

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
        terms="your own",
        rule=RULES[own.kind] + (f" ({said})" if said else ""),
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


SUITES = {
    one.name: one
    for one in (REWARD_BENCH, REWARD_BENCH_2, RM_BENCH, LLMBAR, JUDGE_BENCH, RMB, PPE_HUMAN, PPE_CORRECTNESS)
}
ALL = "all"
"""Every benchmark that the hub has."""


@dataclass(frozen=True, slots=True)
class QuestionSet:
    """A benchmark that was read."""

    suite: Suite
    source: str
    """Where it was read from."""
    questions: Sequence[Question]
    missing: dict[str, int]
    """How many questions are missing, of each group of which some are."""

    @property
    def digest(self) -> str:
        """Hex digits that depend on all texts that are scored."""
        return digest(self.questions)


def read_sets(named: Sequence[str], *, partial: bool = False) -> list[QuestionSet]:
    """Read the benchmarks that are named, each as `NAME`, `NAME=PATH`, a YAML file of one's own set, or `all`.

    Args:
        named: names; several may stand in one with commas between them.
        partial: accept sets of which rows are missing.

    Raises:
        ConfigError: there is no such benchmark, its file is not there, or one is named twice.
        DataError: it cannot be read, or is not the benchmark that it is said to be.
    """
    chosen = _chosen(named)
    names = [suite.name for suite, _ in chosen]
    if len(set(names)) < len(names):
        raise ConfigError("a benchmark is named twice: its second result would stand in the place of its first.")
    return [QuestionSet(one, source, *read_questions(one, source, partial=partial)) for one, source in chosen]


def source_digests(named: Sequence[str]) -> dict[str, str]:
    """Digest what each benchmark that is named is read from: equal digests mean equal questions.

    Raises:
        ConfigError: see `read_sets`.
        DataError: a source is not there.
    """
    chosen = _chosen(named)
    return {f"{suite.name} {suite.rule}": source_digest(source) for suite, source in chosen}


def _chosen(named: Sequence[str]) -> list[tuple[Suite, str]]:
    """The benchmarks with their sources; a place that is there may hold commas and equals signs."""
    parts = [[one] if is_there(Path(one)) or is_there(Path(one.partition("=")[2])) else one.split(",") for one in named]
    return [found for part in parts for name in part for found in _named(name.strip())]


def _named(given: str) -> Iterator[tuple[Suite, str]]:
    if given == ALL:
        yield from ((one, one.hub) for one in SUITES.values() if one.hub)
        return
    name, is_place, source = given.partition("=")
    if given.endswith(YAML_SUFFIXES) and (name not in SUITES or is_there(Path(given))):
        suite, rows = read_own_suite(Path(given).expanduser() if is_there(Path(given)) else Path(given))
        if suite.name in (*SUITES, ALL):
            raise ConfigError(
                f"{given} calls a set {suite.name!r}, as a public benchmark is called: take another name."
            )
        yield suite, rows
        return
    if name not in SUITES:
        raise ConfigError(
            f"there is no benchmark {name!r}; name one of {', '.join(SUITES)}, or NAME=PATH, or a YAML file of "
            "your own set (docs/benchmarks.md)."
        )
    found = SUITES[name]
    if is_place and not (source and is_there(Path(source))):
        raise ConfigError(f"--suite {given}: there is no file or folder {source!r}; {name} alone names the hub's.")
    if not is_place and not found.hub:
        raise ConfigError(
            f"{name} is no single data set of the hub: fetch its files (docs/benchmarks.md) and give "
            f"--suite {name}=FOLDER."
        )
    yield found, source if is_place else found.hub
