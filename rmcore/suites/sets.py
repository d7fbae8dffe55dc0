"""The benchmarks that are known by a name, and how one is named: NAME, NAME=PATH, a YAML of one's own, or `all`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rmcore.core.errors import ConfigError
from rmcore.data.readers.sources import source_digest
from rmcore.suites.own import YAML_SUFFIXES, is_there, read_own_suite
from rmcore.suites.pairwise import JUDGE_BENCH, LLMBAR, REWARD_BENCH, RMB
from rmcore.suites.ppe import PPE_CORRECTNESS, PPE_HUMAN
from rmcore.suites.question import Question, Suite, digest, read_questions
from rmcore.suites.reward_bench_2 import REWARD_BENCH_2
from rmcore.suites.rm_bench import RM_BENCH

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
