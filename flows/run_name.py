"""Names of flow runs: as the caller gave it, else by what the run does."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from coolname.data import config
from prefect import runtime

_WORD_LISTS: dict[str, Any] = dict(config)
_SERVERS_WORDS = frozenset(word for words in _WORD_LISTS.values() for word in words.get("words", ()))
"""Prefect's server names a run that was given no name by an adjective and an animal: brave-otter."""
_FORMS_LETTERS = (
    "alpha|beta|gamma|delta|epsilon|zeta|eta|theta|iota|kappa|lambda|mu|nu|xi|omicron|pi|rho|sigma|tau|upsilon|phi|chi"
    "|psi|omega"
)
_FORMS_NAME = re.compile(rf"(?:{_FORMS_LETTERS})\d*(?:-[a-z]+){{1,4}}")
"""The form of Prefect's UI writes a Greek letter and a star or planet into the field of the name: theta3-vega-cloud."""


def is_made_up(name: str) -> bool:
    """Whether Prefect has made the name of a flow run up. One that looks so, such as beta-run, counts as such, too."""
    words = name.split("-")
    return bool(_FORMS_NAME.fullmatch(name)) or (len(words) == 2 and _SERVERS_WORDS.issuperset(words))


def named(suggest: Callable[[Mapping[str, Any]], str | None]) -> Callable[[], str]:
    """Make what `@flow(flow_run_name=…)` takes: a given name stays, a made-up one becomes the suggested one.

    Args:
        suggest: given the parameters of the run; None where they do not say.
    """

    def name() -> str:
        given = str(runtime.flow_run.name)
        return (suggest(runtime.flow_run.parameters) or given) if is_made_up(given) else given

    return name
