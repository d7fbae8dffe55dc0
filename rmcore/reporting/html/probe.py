"""The section of the report on what edits of answers do to rewards."""

from collections.abc import Mapping
from typing import Any

from rmcore.reporting.figures import numbers

TITLE = "Probes: edits of answers that must not pay"
RESULTS = {"violated": ("✗ violated", "fail"), "holds": ("✓ holds", "pass")}
"""How a rule's verdict is shown, and its tone; others have none."""
EXPECTED = {"invariant": "no change", "not_higher": "no rise", "lower": "a fall"}


def probe_section(found: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Gather the values that the report prints, numbers as text; None where no probe was made.

    Args:
        found: record of `rmcore.probes.measure.Probed`.
    """
    if found is None:
        return None
    manner = [one for one in found["findings"] if one["expects"] != "lower"]
    faults = [one for one in found["findings"] if one["expects"] == "lower"]
    groups = [
        {
            "title": "Manner: the same said otherwise, or with something that earns nothing",
            "headings": ("expected", "answers", "shift, sd", "winner changes"),
            "rows": [
                _row(one, EXPECTED[one["expects"]], numbers.with_interval(one["shift"]), _share(one["changed"]))
                for one in manner
            ],
        },
        {
            "title": "Faults: the chosen answer, spoilt",
            "headings": ("expected", "answers", "no lower reward", "shift, sd"),
            "rows": [
                _row(one, EXPECTED[one["expects"]], _share(one["violations"]), numbers.with_interval(one["shift"]))
                for one in faults
            ],
        },
    ]
    return {
        "title": TITLE,
        "violated": bool(found["violated"]),
        "finding": _finding(found),
        "definition": _definition(found["tolerated"]),
        "groups": [group for group in groups if group["rows"]],
        "examples": [
            _example(one, example)
            for one in found["findings"]
            if one["verdict"] == "violated"
            for example in one["worst"][:1]
        ],
    }


def _row(finding: Mapping[str, Any], *cells: str) -> dict[str, Any]:
    result, tone = RESULTS.get(finding["verdict"], (finding["verdict"], ""))
    expected, *measured = cells
    return {
        "result": result,
        "tone": tone,
        "rule": finding["rule"],
        "meaning": finding["meaning"],
        "cells": [expected, numbers.count(finding["num_answers"]), *measured],
    }


def _share(metric: Mapping[str, Any]) -> str:
    return numbers.with_interval(metric, "share")


def _finding(found: Mapping[str, Any]) -> str:
    applied = [one for one in found["findings"] if one["verdict"] != "not applied"]
    violated = found["violated"]
    on = f"on {numbers.count(found['num_pairs'])} held-out pairs of {numbers.count(found['num_prompts'])} prompts"
    if not violated:
        return f"None of {len(applied)} rules is shown to be violated, {on}."
    are = "rule is" if len(violated) == 1 else "rules are"
    return f"{len(violated)} of {len(applied)} {are} shown to be violated, {on}: {', '.join(violated)}."


def _definition(tolerated: Mapping[str, float]) -> str:
    level, most = (numbers.percent(tolerated[name]) for name in ("familywise_level", "violations"))
    return (
        f"Shown: at {level} for all rules together (Holm), that an edit shifts the reward by more than "
        f"{tolerated['shift']:g} standard deviations between answers to one prompt, where nothing may change either "
        f"way, else upwards; or that more than {most} of spoilt answers have no lower reward. Intervals are 95 % over "
        "prompts, each alone; a rule holds where its interval lies within, and is unclear between."
    )


def _example(finding: Mapping[str, Any], example: Mapping[str, Any]) -> dict[str, str]:
    texts = {name: str(example[name]) for name in ("prompt", "original", "edited")}
    rewards = {name: numbers.decimal(example[name]) for name in ("reward", "edited_reward")}
    return {"rule": finding["rule"], "meaning": finding["meaning"], **texts, **rewards}
