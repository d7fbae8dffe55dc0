"""The report of a study of what choosing labels saves: one HTML file for a reader who was not there."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from rmcore.reporting.figures import numbers
from rmcore.reporting.html.active import (
    CHECK_HEADINGS,
    CLAIM_HEADINGS,
    SAVING_HEADINGS,
    active_findings,
    check_rows,
    claim_rows,
    saving_rows,
)
from rmcore.reporting.html.page import date, write_page

TEMPLATE = "active.html.j2"
CAPTIONS = {
    "label_efficiency": "Mean over seeds; bands are 95 % intervals of random choice and of the best of the others. The "
    "dotted line is the accuracy with every label of the pool. Curves of a seed share their pairs, so their distance "
    "is surer than the bands suggest: the savings are taken within seeds.",
    "label_savings": "Right of zero a function needed fewer labels than random choice, left of it more. “Half of the "
    "way” is the accuracy midway between the seed set's and that of the whole pool. The dotted line is the claim.",
}
WORDS = {
    "acquisition function": "the rule that says which pairs to have labelled next",
    "random": "any pair, each as likely: what the others are compared with",
    "entropy": "the pairs whose label the model is least sure of",
    "variance": "the pairs on whose margin the members of an ensemble disagree most",
    "bald": "the pairs that members are sure of, each another way (mutual information of label and member)",
    "d-optimal": "the pairs that together tell most about the reward head: greedy log-determinant of their information",
    "saving": "1 − labels needed / labels that random choice needed for the same accuracy, validation labels counted",
    "not reached": "a target accuracy that a curve never got to in some seed; such a saving has no number",
    "wrong labels": "a share of all labels that were turned around before anything learned from them",
}


def write_active_report(
    found: Mapping[str, Any], figures: Mapping[str, Path], out: Path, *, config: Mapping[str, Any]
) -> Path:
    """Write the self-contained report of a study to `out`; returns `out`.

    Args:
        found: of `rmcore.active.analysis.analyse`, with the "registration" and, where it was asked for, the "check" by
            full fine-tuning (`analyse_check`).
        figures: PNG files by name, those of CAPTIONS.
        out: HTML file to write; its folder is made.
        config: of the run, as plain values.

    Raises:
        DataError: a figure is not a readable PNG file.
    """
    return write_page(TEMPLATE, view(found, config), figures, CAPTIONS, out)


def view(found: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Gather the values that the template prints, numbers as text."""
    check = found.get("check")
    headline, *method = active_findings(found)
    return {
        "study": config["study"],
        "headline": headline,
        "facts": [
            ("pairs", config["data"]["source"]),
            ("backbone", config["model"]["name"]),
            ("seeds", numbers.count(found["num_seeds"])),
            ("pool", f"{numbers.count(found['num_pool'])} pairs"),
        ],
        "registration": found["registration"],
        "frozen": date(found["registration"]["frozen_at"]),
        "claim_headings": CLAIM_HEADINGS,
        "claims": claim_rows(found),
        "saving_headings": SAVING_HEADINGS,
        "savings": saving_rows(found),
        "check_headings": CHECK_HEADINGS,
        "check": [] if check is None else check_rows(check),
        "check_seeds": None if check is None else check["num_seeds"],
        "check_pairs": None if check is None else numbers.count(check["num_test_pairs"]),
        "method": method,
        "config_yaml": yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True, width=100),
        "words": WORDS,
    }
