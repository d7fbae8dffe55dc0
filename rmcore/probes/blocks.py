"""The effects of edits of answers on rewards, as reports, cards and the terminal show them."""

from collections.abc import Mapping
from typing import Any

from rmcore.reporting.figures import numbers
from rmcore.reporting.html.blocks import Block, Named, Shown, Table, shorten
from rmcore.reporting.html.cards import SIDES

TITLE = "Probes: edits of answers that must not pay"
RESULTS = {"violated": "✗ violated", "holds": "✓ holds"}
"""How a rule's verdict is shown; others are shown as they are."""
FIRST = ("result", "rule", "expected", "answers", "prompts")
EXPECTED = {"invariant": "no change", "not_higher": "no rise", "lower": "a fall"}


def probe_block(found: Mapping[str, Any]) -> Block:
    """The effect of edits of answers on rewards, rule by rule, with the worst example of each violated one.

    Args:
        found: record of `rmcore.probes.measure.Probed`.
    """
    manner = [_row(one, numbers.with_interval(one["shift"])) for one in found["findings"] if one["expects"] != "lower"]
    faults = [
        _row(one, numbers.with_interval(one["violations"], "share"), numbers.with_interval(one["shift"]))
        for one in found["findings"]
        if one["expects"] == "lower"
    ]
    parts = [
        Block(
            "Manner: the same said otherwise, or with something that earns nothing",
            tables=(Table((*FIRST, "shift, sd"), manner, left=(0, 1, 2)),),
        ),
        Block(
            "Faults: the chosen answer, spoilt",
            tables=(Table((*FIRST, "no lower reward", "shift, sd"), faults, left=(0, 1, 2)),),
        ),
    ]
    violated = [one for one in found["findings"] if one["verdict"] == "violated"]
    worst = [_example(one, example) for one in violated for example in one["worst"][:1]]
    examples = Table(
        ("rule", "prompt", "as it was", "edited"),
        worst,
        left=range(4),
        title="Worst examples of the violated rules (texts from the data: they may offend)",
    )
    return Block(
        TITLE,
        text=(_finding(found), _measured(found), f"{_definition(found['tolerated'])} No verdict follows from them."),
        tables=(examples,) if worst else (),
        parts=[part for part in parts if part.tables[0].rows],
    )


def _row(finding: Mapping[str, Any], *measured: str) -> tuple[str | Named, ...]:
    verdict = finding["verdict"]
    rule = Named(finding["rule"], finding["meaning"])
    return (
        RESULTS.get(verdict, verdict),
        rule,
        EXPECTED[finding["expects"]],
        numbers.count(finding["num_answers"]),
        numbers.count(finding["num_prompts"]),
        *measured,
    )


def _finding(found: Mapping[str, Any]) -> str:
    applied = [one for one in found["findings"] if one["verdict"] != "not applied"]
    violated = found["violated"]
    on = f"on {numbers.count(found['num_pairs'])} held-out pairs of {numbers.count(found['num_prompts'])} prompts"
    if not violated:
        return f"✓ None of {len(applied)} rules is shown to be violated, {on}."
    are = "rule is" if len(violated) == 1 else "rules are"
    return f"✗ {len(violated)} of {len(applied)} {are} shown to be violated, {on}: {', '.join(violated)}."


def _measured(found: Mapping[str, Any]) -> str:
    accuracy, spread = numbers.with_interval(found["accuracy"], "share"), numbers.with_interval(found["spread"])
    said = f"Accuracy is {accuracy}; rewards of answers to one prompt have a standard deviation of {spread} logits."
    if found["num_unreadable"]:
        number = numbers.count(found["num_unreadable"])
        said += f" {number} answers cannot be read by this model, and their pairs are left out."
    return said


def _definition(tolerated: Mapping[str, float]) -> str:
    level, most = (numbers.percent(tolerated[name]) for name in ("familywise_level", "violations"))
    return (
        f"Shown: at {level} for all rules together (Holm), that an edit shifts the reward by more than "
        f"{tolerated['shift']:g} standard deviations between answers to one prompt, where nothing may change either "
        f"way, else upwards; or that more than {most} of spoilt answers have no lower reward. Intervals are 95 % over "
        "prompts, each alone; a rule holds where its interval is within the limit, and is unclear where it contains it."
    )


def _example(finding: Mapping[str, Any], example: Mapping[str, Any]) -> tuple[str | Named, ...]:
    before, after = (f"reward {numbers.decimal(example[name])}" for name in ("reward", "edited_reward"))
    return (
        Named(finding["rule"], finding["meaning"]),
        str(example["prompt"]),
        Named(str(example["original"]), before),
        Named(str(example["edited"]), after),
    )


def tables_of_pairs(found: Mapping[str, Any]) -> dict[str, list[Table]]:
    """Show below each of the worst mistakes what its sentences add.

    Args:
        found: `mistakes` has those of `rmcore.probes.effects.explain_mistakes`.
    """
    heading = "What the reward loses without each sentence, in logits"
    tables = {}
    for one in found["mistakes"]:
        rows = [
            (side, shorten(part["text"]), "not read" if part["effect"] is None else numbers.decimal(part["effect"]))
            for side in SIDES
            for part in one["effects"][side]
        ]
        tables[one["pair_id"]] = [Table(("answer", "sentence", "loses"), rows, left=range(2), title=heading)]
    return tables


SHOWN = Shown(
    probe_block,
    after="logged",
    stage="probe",
    name="Probes",
    is_folded=lambda found: not found["violated"],
    card=lambda found: ((probe_block(found)._replace(tables=()),), ()),  # no text of the data
    key_of_command="tolerated",
    tables_of_pairs=tables_of_pairs,
)
