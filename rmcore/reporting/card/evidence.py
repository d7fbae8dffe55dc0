"""Measurements as a model card tells them: each kind of file that a command left becomes sections, results, a verdict.

A file is a JSON object, and its kind is the key that only this kind has (`KINDS`); the record of a run is of several.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from rmcore.core.errors import DataError
from rmcore.core.hub import is_hub_name
from rmcore.reporting.card.hub_result import ROUNDED, hub_result
from rmcore.reporting.html.blocks import Block, Card, capabilities_shown
from rmcore.reporting.html.cards import checks_table, metrics_table

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

Record = Mapping[str, Any]
SHOWN = (
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
class Found:
    """All that one file has to tell.

    Attributes:
        results: numbers in the hub's own form, for what may be compared with others'.
        elsewhere: accuracy on pairs unlike the training's, where it was measured.
        over_baseline: accuracy over the best baseline (chance or length), where it was measured.
    """

    sections: tuple[Block, ...] = ()
    results: tuple["EvalResult", ...] = ()
    judgement: Judgement | None = None
    elsewhere: Record | None = None
    over_baseline: Record | None = None


def read_evidence(record: Record, source: str) -> list[Found]:
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


def highest(found: Sequence[Found]) -> Judgement | None:
    """The verdict of the highest evidence level, the last of several there; None where nobody judged."""
    judged = [one.judgement for one in found if one.judgement is not None]
    return max(reversed(judged), key=lambda one: one.rung, default=None)


def _evaluation(record: Record, source: str) -> Found:
    """Metrics on pairs: of `rm-opt evaluate`, or of a run."""
    name = record.get("data") or ((record.get("config") or {}).get("data") or {}).get("source")
    splits = {"Held-out pairs": record["metrics"], "Out-of-distribution pairs": record.get("ood_metrics")}
    notes = ["Intervals resample prompts, not pairs.", *([ROUNDED] if record.get("dtype") == "bfloat16" else [])]
    sections = []
    for title, metrics in splits.items():
        told = {
            key: one for key, one in (metrics or {}).items() if key in SHOWN or key.startswith("pairwise_accuracy[")
        }
        if metrics:
            sections.append(Block(f"{title} of {public_name(name)}", tables=(metrics_table([told]),), findings=notes))
    accuracy = record["metrics"]["pairwise_accuracy"]
    dataset = str(name) if is_hub_name(str(name)) else "preference-pairs", public_name(name)
    result = (
        () if accuracy["value"] is None else (hub_result("Preference ranking", dataset, "Pairwise accuracy", accuracy),)
    )
    elsewhere = (record.get("ood_metrics") or {}).get("pairwise_accuracy")
    over = record["metrics"].get("accuracy_over_baseline")
    return Found(tuple(sections), result, elsewhere=elsewhere, over_baseline=over)


def _judged(record: Record, source: str) -> Found:
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
    return Found((Block(title, tables=(checks_table(checks),)),) if checks else (), judgement=judgement)


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


def public_name(source: object) -> str:
    """A source as strangers may read it: names of the hub as they are, paths and addresses by their last part."""
    if not isinstance(source, str) or not source:
        return "pairs that are not named"
    if source == GOLD:
        return "the synthetic benchmark of rm-opt"
    return source if is_hub_name(source) else source.partition("?")[0].rstrip("/").rpartition("/")[2]


def _measured(card: Card, stage: str | None, record: Record, source: str) -> Found:
    """Findings of a capability: of its command, or of the stage of a run."""
    return Found(*card(record if stage is None else record[stage]))


ON_CARDS = [(one.stage, one.key_of_command, one.card) for one in capabilities_shown() if one.card is not None]
KINDS: Mapping[str, Callable[[Record, str], Found]] = {
    "metrics": _evaluation,
    **{key: partial(_measured, card, None) for _, key, card in ON_CARDS},
    **{stage: partial(_measured, card, stage) for stage, _, card in ON_CARDS},
    "verdict": _judged,
}
"""How a file is read, by the key that says of which kind it is; sections of the card have this order."""
