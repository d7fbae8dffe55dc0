"""Measurements as a model card tells them: each kind of file that a command left becomes sections, results, a verdict.

A file is a JSON object, and its kind is the key that only this kind has: `KINDS` names the function that reads it.
One more kind is one more function and its line there. A file may be of several kinds: the record of a run holds
metrics and a verdict.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rmcore.core.errors import DataError
from rmcore.core.hub import is_hub_name
from rmcore.reporting.html.benchmarks import benchmarks_block, num_seen
from rmcore.reporting.html.blocks import Block
from rmcore.reporting.html.cards import metrics_table
from rmcore.reporting.html.probe import probe_block

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
OWN_RULE = "Score by the benchmark's own rule"
GOLD = "gold"
"""Source of data that is a synthetic world."""
ROUNDED = (
    "Measured with weights rounded to bfloat16, the reward head in float32; rewards differ a little from the file's."
)
POLICIES = {"world": "the synthetic benchmark's own writer", "sft": "the one that was fine-tuned in the same run"}
"""Policies that are no folder and no name of the hub."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict of the ladder, its checks, and how far a policy was to be optimised."""

    rung: int
    status: str
    headline: str
    evidence: str
    reasons: tuple[str, ...]
    raised_by: str | None
    """The evidence that would raise it; None: not stated, or nothing."""
    checks: tuple[Record, ...]
    kl: float | None
    """Nats that were planned, or reached; None below level 3, or not stated."""
    method: str | None
    """By what the policy was, or is to be, optimised."""
    policy: str | None
    """The policy that it is about; None below level 3, or not stated."""
    source: str
    """Name of the file or run that it is read from."""


@dataclass(frozen=True, slots=True)
class Found:
    """All that one file has to tell."""

    sections: tuple[Block, ...] = ()
    results: tuple["EvalResult", ...] = ()
    """The same numbers in the hub's own form, for what may be compared with others'."""
    judgement: Judgement | None = None
    elsewhere: Record | None = None
    """Accuracy on pairs unlike the training's, where it was measured."""
    over_baseline: Record | None = None
    """Accuracy over the best baseline (chance or length), where it was measured."""


def read_evidence(record: Record, source: str) -> list[Found]:
    """Everything a file has to tell.

    Args:
        record: what it holds.
        source: what it is called, for messages and the card.

    Raises:
        DataError: it is of no kind that is known, or not as the command wrote it.
    """
    kinds = [read for key, read in KINDS.items() if isinstance(record.get(key), Mapping)]
    if not kinds:
        raise DataError(
            f"{source} holds none of {', '.join(KINDS)}, so it is no result that a card can tell. Name what `rm-opt "
            "evaluate`, `readiness pairs`, `benchmark` or `probe` wrote with --json, or the summary.json of a run."
        )
    try:
        found = [read(record, source) for read in kinds]
        if record.get("dtype") != "bfloat16":
            return found
        return [
            replace(one, sections=tuple(block._replace(findings=(*block.findings, ROUNDED)) for block in one.sections))
            for one in found
        ]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(
            f"{source} is not as the command wrote it ({type(error).__name__}: {error}); make it again."
        ) from error


def _evaluation(record: Record, source: str) -> Found:
    """Metrics on pairs: of `rm-opt evaluate`, of a run, or of a training's own validation pairs."""
    data = data_name(record)
    chosen_on = record.get("chosen_on_these", False)
    splits = [("Validation pairs" if chosen_on else "Held-out pairs", record["metrics"])]
    elsewhere = record.get("ood_metrics")
    if elsewhere:
        splits.append(("Out-of-distribution pairs", elsewhere))
    notes = ["Intervals resample prompts, not pairs."]
    if chosen_on:
        notes.append("The kept step was chosen on these pairs, so these numbers are too good.")
    sections = tuple(
        Block(f"{title} of {data}", tables=(metrics_table([_chosen(metrics)]),), findings=notes)
        for title, metrics in splits
    )
    accuracy = record["metrics"]["pairwise_accuracy"]
    dataset = hub_name(record) or "preference-pairs", data
    is_shared = not chosen_on and accuracy["value"] is not None
    return Found(
        sections,
        (_result("Preference ranking", dataset, "Pairwise accuracy", accuracy),) if is_shared else (),
        elsewhere=elsewhere["pairwise_accuracy"] if elsewhere else None,
        over_baseline=record["metrics"].get("accuracy_over_baseline"),
    )


def _chosen(metrics: Record) -> dict[str, Record]:
    return {name: value for name, value in metrics.items() if name in SHOWN or name.startswith("pairwise_accuracy[")}


def _result(task: str, dataset: tuple[str, str], metric_name: str, metric: Record) -> "EvalResult":
    """A number in the hub's own form; `dataset` is the type, by which the hub groups, and the name."""
    from huggingface_hub import EvalResult

    return EvalResult(
        task_type="text-classification",
        task_name=task,
        dataset_type=dataset[0],
        dataset_name=dataset[1],
        metric_type="accuracy",
        metric_name=metric_name,
        **_measured(metric),
    )


def _measured(metric: Record) -> dict[str, Any]:
    """Value and interval of a metric, in the hub's form."""
    bounds = {"ci_low": metric["ci_low"], "ci_high": metric["ci_high"]}
    known = {name: round(float(value), 4) for name, value in bounds.items() if value is not None}
    args = {**known, "level": 0.95} if known else {}
    return {"metric_value": round(float(metric["value"]), 4), "metric_args": {**args, "n": int(metric["num"])}}


def _benchmarks(record: Record, source: str) -> Found:
    """Public benchmarks: of `rm-opt benchmark`.

    A set of which questions are missing, or were seen in training, is shown, and not sent to the hub.
    """
    results = [
        _result("Reward model benchmark", (told.get("hub") or name, told["title"]), OWN_RULE, told["scores"]["overall"])
        for name, told in record["suites"].items()
        if not sum(told["missing"].values()) and not num_seen(told) and told["scores"]["overall"]["value"] is not None
    ]
    return Found((benchmarks_block(record),), tuple(results))


def _probes(record: Record, source: str) -> Found:
    """Edits of answers that must not pay: of `rm-opt probe`, or of a run's stage; no text of the data is shown."""
    return Found((probe_block(record)._replace(tables=()),))


def _judged(record: Record, source: str) -> Found:
    """A verdict: of a run, of `rm-opt readiness`, or of a policy that was optimised."""
    verdict = record["verdict"]
    more = record.get("next_rung")
    kl, method = _reached(record) if verdict["rung"] >= RUNG_OF_A_POLICY else (None, None)
    judgement = Judgement(
        rung=int(verdict["rung"]),
        status=str(verdict["status"]),
        headline=str(verdict["headline"]),
        evidence=str(verdict["evidence"]),
        reasons=tuple(map(str, verdict["reasons"])),
        raised_by=f"{more['evidence']} (evidence level {more['rung']})" if more else None,
        checks=tuple(record.get("gate", ())),
        kl=kl,
        method=method,
        policy=_policy(record) if verdict["rung"] >= RUNG_OF_A_POLICY else None,
        source=source,
    )
    return Found(judgement=judgement)


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


def _policy(record: Record) -> str | None:
    name = ((record.get("config") or {}).get("policy") or {}).get("name")
    return None if name is None else POLICIES.get(name) or public_name(name)


def data_name(record: Record) -> str:
    """Name of the pairs of a record; a local file by its name alone, never with its folder."""
    config = record.get("config") or {}
    return public_name(record.get("data") or (config.get("data") or {}).get("source"))


def hub_name(record: Record) -> str | None:
    """Name of the hub's data set that a record is about, None for other data."""
    source = record.get("data") or ((record.get("config") or {}).get("data") or {}).get("source")
    return source if isinstance(source, str) and is_hub_name(source) else None


def public_name(source: object) -> str:
    """A source as strangers may read it: names of the hub as they are, paths and addresses by their last part."""
    if not isinstance(source, str) or not source:
        return "pairs that are not named"
    if source == GOLD:
        return "the synthetic benchmark of rm-opt"
    return source if is_hub_name(source) else source.partition("?")[0].rstrip("/").rpartition("/")[2]


KINDS: Mapping[str, Callable[[Record, str], Found]] = {
    "metrics": _evaluation,
    "suites": _benchmarks,
    "benchmarks": lambda record, source: _benchmarks(record["benchmarks"], source),  # of a run's stage
    "tolerated": _probes,
    "probe": lambda record, source: _probes(record["probe"], source),
    "verdict": _judged,
}
"""How a file is read, by the key that says of which kind it is; sections of the card stand in this order."""
