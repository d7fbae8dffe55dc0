"""The model card: measurements as sections, results and a verdict, and what the model must not be used for.

A file that a command left is a JSON object, and its kind is the key that only this kind has (`KINDS`); the record of a
run is of several.
"""

import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from rmcore.core.errors import DataError
from rmcore.core.hub import is_hub_name
from rmcore.reporting.figures import numbers
from rmcore.reporting.html.blocks import ROUNDED, Block, CardParts, capabilities_shown, hub_result
from rmcore.reporting.html.cards import checks_table, metrics_table
from rmcore.reporting.html.note import plain
from rmcore.reporting.verdict_style import VERDICT_STYLES

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

Record = Mapping[str, Any]
CARD_METRICS = (
    *("pairwise_accuracy", "accuracy_by_prompt", "longer_wins_accuracy", "accuracy_over_baseline"),
    *("length_matched_accuracy", "expected_accuracy", "tie_rate", "loss", "ece_debiased", "temperature"),
)
"""Metrics of held-out pairs that a card has; those of subsets follow. A report has all."""
OPTIMIZERS = {"best_of_n": "best-of-n", "kl_optimum": "RL with a KL penalty"}
RUNG_OF_A_POLICY = 3
GOLD = "gold"
"""Source of data that is a synthetic world."""
POLICIES = {"world": "the synthetic benchmark's own writer", "sft": "the one that was fine-tuned in the same run"}
"""Policies that are no folder and no name of the hub."""
COMPARING = (
    "**Comparing answers to different prompts, or a threshold on the reward.** Only differences between answers to one "
    "prompt were trained: what is added to all rewards of a prompt is arbitrary."
)
TEXTS_OF_PEOPLE = "**Texts that people wrote.** It was trained on those of a synthetic world, and knows no other."
LANGUAGES = (
    "**Other languages than those of its training pairs.** Which these are is not stated, and none was measured alone."
)
TRUTH = "**Judging whether an answer is true, safe or lawful.** It was trained on preferences, and on nothing else."


class Markdown(str):
    """Markdown that was written here. Every other text is data, and the template escapes it."""

    __slots__ = ()


def shown(text: object) -> Markdown:
    """One line that shows `text` as it is: no markup, HTML, formula, or character that reorders or hides others.

    >>> shown("<b>$x$</b>")
    '&#60;b&#62;&#36;x&#36;&#60;/b&#62;'
    """
    if isinstance(text, Markdown):
        return text
    line = " ".join(str(text).split())
    visible = "".join(
        "\N{REPLACEMENT CHARACTER}" if unicodedata.category(sign) in ("Cc", "Cf") else sign for sign in line
    )
    return Markdown(plain(visible).replace("$", "&#36;"))


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict of the ladder, and how far a policy was to be optimised.

    Attributes:
        raised_by: the evidence that would raise it; None: not stated, or nothing.
        kl: nats that were planned, or reached, by `method`, of `policy`; each None below level 3, or not stated.
        source: name of the file or run that it is read from.
    """

    rung: int
    status: str
    headline: str
    evidence: str
    reasons: tuple[str, ...] = ()
    raised_by: str | None = None
    kl: float | None = None
    method: str | None = None
    policy: str | None = None
    source: str = ""


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that one file has to tell.

    Attributes:
        results: numbers in the hub's own form, for what may be compared with others'.
        out_of_distribution: accuracy on pairs unlike the training's, where it was measured.
        over_baseline: accuracy over the best baseline (chance or length), where it was measured.
    """

    sections: tuple[Block, ...] = ()
    results: tuple["EvalResult", ...] = ()
    judgement: Judgement | None = None
    out_of_distribution: Record | None = None
    over_baseline: Record | None = None


def read_evidence(record: Record, source: str) -> list[Evidence]:
    """Everything that a file called `source` has to tell.

    Raises:
        DataError: it is of no kind that is known, or not as the command wrote it.
    """
    kinds = [read for key, read in KINDS.items() if isinstance(record.get(key), Mapping)]
    if not kinds:
        raise DataError(
            f"{source} holds none of {', '.join(KINDS)}, so it is no result that a card can tell. Name what `rm-opt "
            f"evaluate`, `readiness pairs`, {' or '.join(f'`{stage}`' for stage, _, _ in ON_CARDS)} wrote "
            "with --json, or the summary.json of a run."
        )
    try:
        return [read(record, source) for read in kinds]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(
            f"{source} is not as the command wrote it ({type(error).__name__}: {error}); make it again."
        ) from error


def highest(evidence: Sequence[Evidence]) -> Judgement | None:
    """The verdict of the highest evidence level, the last of several there; None where nobody judged."""
    judgements = [item.judgement for item in evidence if item.judgement is not None]
    return max(reversed(judgements), key=lambda judgement: judgement.rung, default=None)


def public_name(source: object) -> str:
    """A source as strangers may read it: names of the hub as they are, paths and addresses by their last part."""
    if not isinstance(source, str) or not source:
        return "pairs that are not named"
    if source == GOLD:
        return "the synthetic benchmark of rm-opt"
    return source if is_hub_name(source) else source.partition("?")[0].rstrip("/").rpartition("/")[2]


def _evaluation(record: Record, source: str) -> Evidence:
    """Metrics on pairs: of `rm-opt evaluate`, or of a run."""
    name = record.get("data") or ((record.get("config") or {}).get("data") or {}).get("source")
    of_test, of_ood = record["metrics"], record.get("ood_metrics") or {}
    notes = ["Intervals resample prompts, not pairs.", *([ROUNDED] if record.get("dtype") == "bfloat16" else [])]
    sections = []
    for title, metrics in {"Held-out pairs": of_test, "Out-of-distribution pairs": of_ood}.items():
        on_card = {
            metric: value
            for metric, value in metrics.items()
            if metric in CARD_METRICS or metric.startswith("pairwise_accuracy[")
        }
        if metrics:
            sections.append(
                Block(f"{title} of {public_name(name)}", tables=(metrics_table([on_card]),), findings=notes)
            )
    accuracy = of_test["pairwise_accuracy"]
    dataset = str(name) if is_hub_name(str(name)) else "preference-pairs", public_name(name)
    results = [] if accuracy["value"] is None else [("Preference ranking", dataset, "Pairwise accuracy", accuracy)]
    return Evidence(
        tuple(sections),
        tuple(hub_result(*result) for result in results),
        out_of_distribution=of_ood.get("pairwise_accuracy"),
        over_baseline=of_test.get("accuracy_over_baseline"),
    )


def _judged(record: Record, source: str) -> Evidence:
    """A verdict: of a run, of `rm-opt readiness`, or of a policy that was optimised; with its checks."""
    verdict, more = record["verdict"], record.get("next_rung")
    is_of_policy = verdict["rung"] >= RUNG_OF_A_POLICY
    kl, method = _reached(record) if is_of_policy else (None, None)
    policy = ((record.get("config") or {}).get("policy") or {}).get("name") if is_of_policy else None
    judgement = Judgement(
        rung=int(verdict["rung"]),
        **{name: str(verdict[name]) for name in ("status", "headline", "evidence")},
        reasons=tuple(map(str, verdict["reasons"])),
        raised_by=f"{more['evidence']} (evidence level {more['rung']})" if more else None,
        kl=kl,
        method=method,
        policy=None if policy is None else POLICIES.get(policy) or public_name(policy),
        source=source,
    )
    title, checks = f"Checks of evidence level {judgement.rung}", record.get("gate")
    return Evidence((Block(title, tables=(checks_table(checks),)),) if checks else (), judgement=judgement)


def _reached(record: Record) -> tuple[float | None, str | None]:
    """Nats of KL that a verdict on a policy is about, and by what; None for what the record does not say."""
    trained = record.get("rlhf")
    if record["verdict"]["rung"] == 4 and trained:
        return float(trained["curve"][-1]["kl"]["value"]), "RL (GRPO)"
    if "n" in record and "kl" in record:  # best-of-n that was served on fresh prompts
        return float(record["kl"]), f"best-of-{record['n']}"
    judged = record["policy"]["readiness"] if record.get("policy") else record
    plan = (judged.get("readiness") or {}).get("plan")
    return (float(plan["kl"]), OPTIMIZERS[plan["optimizer"]]) if plan else (None, None)


def _measured(parts: CardParts, stage: str | None, record: Record, source: str) -> Evidence:
    """Evidence of a capability: of its command, or of the stage of a run."""
    return Evidence(*parts(record if stage is None else record[stage]))


ON_CARDS = [(item.stage, item.key_of_command, item.card) for item in capabilities_shown() if item.card is not None]
KINDS: Mapping[str, Callable[[Record, str], Evidence]] = {
    "metrics": _evaluation,
    **{key: partial(_measured, parts, None) for _, key, parts in ON_CARDS},
    **{stage: partial(_measured, parts, stage) for stage, _, parts in ON_CARDS},
    "verdict": _judged,
}
"""How a file is read, by the key that says of which kind it is; sections of the card have this order."""


def limits(
    judgement: Judgement | None,
    evidence: Sequence[Evidence],
    truncation: Mapping[str, Any],
    max_seq_len: int,
    synthetic: bool,
) -> list[Markdown]:
    """Uses that nothing here speaks for, each with its reason.

    Args:
        judgement: the verdict; None where nobody judged.
        evidence: what measurements tell; of several the last counts.
        truncation: counts of training sides that were cut; empty where that is not known.
        max_seq_len: tokens a side that the model reads.
        synthetic: whether it was trained on texts of the synthetic benchmark.
    """
    unlike = next((item.out_of_distribution for item in reversed(evidence) if item.out_of_distribution), None)
    over_baseline = next((item.over_baseline for item in reversed(evidence) if item.over_baseline), None)
    measured = "How it does there was not measured."
    if unlike is not None and unlike["value"] is not None:
        share = shown(numbers.with_interval(unlike, "share"))
        measured = f"Pairwise accuracy on such was {share} of {numbers.count(unlike['num'])} pairs."
    longer = (
        f"**Texts of more than {max_seq_len:,} tokens**, prompt and answer together. rm-opt cuts them, the prompt from "
        "its left first, and the reward is then one of what is left."
    )
    if truncation.get("num_pairs"):
        of = f"{truncation['num_cut_sides']:,} of the {2 * truncation['num_pairs']:,} texts"
        longer += f" {of} that it was trained on were longer and were cut."
    uses = [
        _optimising(judgement),
        *_ranking(judgement, over_baseline),
        COMPARING,
        TEXTS_OF_PEOPLE if synthetic else LANGUAGES,
        f"**Prompts unlike those of its training pairs.** {measured}",
        longer,
        TRUTH,
    ]
    return [Markdown(use) for use in uses]


def _optimising(judgement: Judgement | None) -> str:
    what, ways = "Optimising a policy against it", "by reinforcement learning, best-of-n or rejection sampling"
    if judgement is None:
        return f"**{what}**, {ways}. Nobody judged whether it can be, so nothing speaks for it."
    if judgement.rung < RUNG_OF_A_POLICY:
        return (
            f"**{what}**, {ways}. No policy was tried on it: its verdict is of evidence level {judgement.rung} of 4, "
            "and nothing is called ready below the third."
        )
    far = "" if judgement.kl is None else f"{judgement.kl:.3g} nats of KL"
    if VERDICT_STYLES[judgement.status].tone != "good":
        return f"**{what}**, {ways}: judged on a policy{far and f' at {far}'}, it was not shown to be worth it."
    how = "" if judgement.method is None else f", by another method than {shown(judgement.method)}"
    judged = "the one that was judged" if judgement.policy is None else f"{shown(judgement.policy)}, which was judged"
    return (
        f"**{what} further than {far or 'what the verdict names'}**{how}, or from another policy than {judged}: the "
        "verdict is about that alone, and further on the true reward may fall while this one still rises."
    )


def _ranking(judgement: Judgement | None, over_baseline: Mapping[str, Any] | None) -> list[str]:
    """Say what labelled pairs show against it: nothing that is not so at the end of its interval."""
    use = "**Ranking answers where it matters.** "
    if over_baseline is not None and (over_baseline["ci_low"] is None or over_baseline["ci_low"] <= 0):
        measured = shown(numbers.with_interval(over_baseline, "points"))
        return [
            f"{use}It was not shown to be right more often than the better of guessing and always taking the longer "
            f"(or the shorter) answer: {measured}, on {numbers.count(over_baseline['num'])} pairs."
        ]
    is_failed = judgement is not None and judgement.status == "fails"
    return [f"{use}It failed checks on labelled pairs; they are listed below."] if is_failed else []
