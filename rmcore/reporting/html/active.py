"""Labels saved by choosing them, in words: in a terminal, in Prefect's artifacts, in the log of experiments."""

from collections.abc import Mapping
from typing import Any

from rmcore.reporting.figures import numbers
from rmcore.reporting.figures.claims import VERDICTS
from rmcore.reporting.html.markdown import bullets, escape, text_table

CLAIM_HEADINGS = ("claim", "verdict", "saving (95 % interval)", "why")
CHECK_HEADINGS = ("acquisition", "labels", "accuracy (95 % interval)", "minus random's (95 % interval)")
SHORT_HEADINGS = ("claimed saving", "verdict", "saving (95 % interval)")
SAVING_HEADINGS = ("noise", "target", "acquisition", "saving (95 % interval)")


def shown_saving(saving: Mapping[str, Any]) -> str:
    """A saving with its interval, or why there is none."""
    if saving["value"] is None:
        return (
            f"none: not reached in {saving['num_censored_active']} seeds, by random in {saving['num_censored_random']}"
        )
    return numbers.with_interval(saving, "share")


def claim_rows(found: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Each registered claim with its verdict."""
    return [
        (claim["text"], VERDICTS[claim["verdict"]].words, shown_saving(claim["saving"]), claim["reason"])
        for claim in found["claims"]
    ]


def short_rows(found: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The same for a terminal."""
    return [
        (claim["name"], VERDICTS[claim["verdict"]].words, shown_saving(claim["saving"])) for claim in found["claims"]
    ]


def saving_rows(found: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Every saving: noise, target accuracy, acquisition function."""
    return [
        (
            f"{level['noise']:.0%}",
            f"{one['share']:.0%} of the way: {numbers.percent(one['target'])}",
            name,
            shown_saving(one),
        )
        for level in found["noise"]
        for name, savings in level["savings"].items()
        for one in savings
    ]


def check_rows(check: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Accuracy under full fine-tuning by label count, and within seeds its distance from random choice."""
    return [
        (
            name,
            str(count),
            numbers.with_interval(rows[place], "share"),
            numbers.with_interval(check["difference"][name][place], "share") if name != "random" else "–",
        )
        for name, rows in check["accuracy"].items()
        for place, count in enumerate(check["num_labels"])
    ]


def active_findings(found: Mapping[str, Any]) -> list[str]:
    """Sentences around the tables."""
    return [
        found["headline"],
        f"{found['num_seeds']} paired seeds; {found['seed_pairs']} pairs labelled at random and "
        f"{found['validation_pairs']} validation labels before anything is chosen, {found['num_pool']} pairs to choose "
        f"from, {found['num_test_prompts']} test prompts; each seed draws its own",
        "a saving of 40 % means that 60 labels do what 100 random ones do; intervals are over seeds, which share one "
        "data set and one backbone",
    ]


def active_markdown(found: Mapping[str, Any]) -> str:
    """Verdicts, savings and how they were taken."""
    parts = [f"# {escape(found['headline'])}", text_table(CLAIM_HEADINGS, claim_rows(found))]
    parts += [text_table(SAVING_HEADINGS, saving_rows(found))]
    parts += [bullets(map(escape, active_findings(found)[1:]))]
    if "check" in found:
        parts += ["## Full fine-tuning", text_table(CHECK_HEADINGS, check_rows(found["check"]))]
    registration = found.get("registration")
    if registration is not None:
        parts.append(
            f"Registration {registration['number']}, `{registration['hash'][:12]}`, frozen {registration['frozen_at']}."
        )
    return "\n\n".join(parts) + "\n"
