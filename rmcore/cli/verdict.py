"""A verdict as the terminal shows it, after a run and after a measurement alike."""

from collections.abc import Mapping
from typing import Any


def print_verdict(verdict: Mapping[str, Any], more: Mapping[str, Any] | None) -> None:
    """Show a verdict with its rung, what speaks against it, and what would raise it."""
    print(f"verdict     {verdict['headline']}")
    for reason in verdict["reasons"]:
        print(f"            - {reason}")
    print(f"rung        {verdict['rung']} of 4: {verdict['evidence']}")
    if more is not None:
        print(f"to raise it {more['evidence']} (rung {more['rung']}):")
        print(f"            {more['command']}")
        print(f"            costs {more['cost']}")
