"""A verdict as the terminal shows it, after a run and after a measurement alike."""

from collections.abc import Mapping
from typing import Any


def print_verdict(verdict: Mapping[str, Any], more: Mapping[str, Any] | None) -> None:
    """Show a verdict with its evidence level, what speaks against it, and the next step."""
    print(f"verdict     {verdict['headline']}")
    for reason in verdict["reasons"]:
        print(f"            - {reason}")
    print(f"evidence    level {verdict['rung']} of 4: {verdict['evidence']}")
    if more is not None:
        level = f" (evidence level {more['rung']})" if more["rung"] > verdict["rung"] else ""
        print(f"next step   {more['evidence']}{level}:")
        print(f"            {more['command']}")
        print(f"            costs {more['cost']}")
