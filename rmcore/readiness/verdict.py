"""Verdicts on a reward model, each limited by its level of evidence, of which there are four.

| level | evidence | strongest claim |
| --- | --- | --- |
| 1 | labelled pairs | passes the checks; not tested on a policy |
| 2 | logged answers: ten prompts with four or more labelled ones | picks better answers among logged ones up to k |
| 3 | judged samples of the policy | ready for this policy up to a planned KL; unclear if too few were judged |
| 4 | best-of-n served, or a trained policy, judged on prompts that neither has seen | gained |

No model is called ready below the third level. Each verdict names its level, what would raise it and what that costs.
The code calls a level `rung`. Verdicts are plain records that are stored as JSON (`rmcore.reporting.schema.Verdict`).
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rmcore.evaluation.diagnosis import BASELINE_LABEL, ECE, OVER_BASELINE, Diagnosis, GateCheck
from rmcore.evaluation.uncertainty import ends, shown_gain, unseen_prompts
from rmcore.policy.sampling.best_of_n import ENOUGH_PROMPTS
from rmcore.reporting.schema import NextRung, Verdict

ASKED = {OVER_BASELINE: "beats chance and “pick the longer answer”", ECE: "is calibrated"}
"""Claims that a verdict names as undecided if there are too few pairs."""
UNTRIED = "Not tested on a policy."
PASSED = ("ready", "gained")
"""Favourable statuses; the registry's alias `ready` requires one of them at `LOWEST_READY_RUNG` or above."""
LOWEST_READY_RUNG = 3
OnLabels = Literal["passes", "fails", "unclear"]
"""Statuses of the first two levels."""
STATUS_OF_TRAINED: Mapping[str, Literal["gained", "lost", "unclear", "not_ready"]] = {
    "rose": "gained",
    "fell": "lost",
    "unclear": "unclear",
    "refused": "not_ready",
}
"""Statuses at the fourth level by the change of the true reward; refused: the watch restored the start policy."""


REQUIREMENTS: Mapping[str, tuple[int, tuple[str, ...]]] = {
    "passes": (1, ("passes", *PASSED)),
    "ready": (LOWEST_READY_RUNG, PASSED),
    "gained": (4, ("gained",)),
}
"""Requirements of a gate: the lowest level of evidence, and the statuses that it accepts."""


def meets(verdict: Mapping[str, Any], required: str) -> Literal["met", "refuted", "unclear", "lower_evidence"]:
    """Compare a verdict with one of the REQUIREMENTS. Evidence against a model counts at every level."""
    lowest, taken = REQUIREMENTS[required]
    if verdict["status"] == "unclear":
        return "unclear"
    if verdict["status"] not in ("passes", *PASSED):
        return "refuted"
    return "met" if verdict["rung"] >= lowest and verdict["status"] in taken else "lower_evidence"


def verdict_on_labels(
    checks: Sequence[GateCheck], logged: Mapping[str, Any] | None, over_baseline: Mapping[str, Any]
) -> Verdict:
    """Return the verdict of the first level, or of the second if prompts have logged answers.

    Args:
        checks: checks on labelled pairs, at least one.
        logged: record of `logged_answers`; None if no prompt has enough answers. It is ignored if there
            are too few such prompts for any claim. If it decides nothing and no check on labels fails, the verdict is
            unclear.
        over_baseline: the metric of that name; the verdict reports its number of pairs. If its check is undecided, the
            pairs are too few: the verdict is unclear, even if other checks, which compare point values, fail. The same
            holds if all checks that do not pass are undecided. A check that was not measured does not fail.
    """
    not_passed = [check for check in checks if not check.passed]
    status, labels = _on_pairs(checks, not_passed, over_baseline)
    reasons = [check.text for check in not_passed]
    if logged is not None and logged["outcome"] != "too_few":
        status, headline, against = _on_logged(logged, status, labels)
        return {
            "rung": 2,
            "evidence": f"logged answers to {logged['num_prompts']} prompts",
            "status": status,
            "headline": headline,
            "reasons": [*against, *reasons],
        }
    is_inconclusive = status == "unclear" and any(check.unclear for check in not_passed)
    headline = f"{'Inconclusive: ' if is_inconclusive else ''}{labels[:1].upper()}{labels[1:]}. {UNTRIED}"
    return {"rung": 1, "evidence": "labelled pairs", "status": status, "headline": headline, "reasons": reasons}


def _on_pairs(
    checks: Sequence[GateCheck], not_passed: Sequence[GateCheck], over_baseline: Mapping[str, Any]
) -> tuple[OnLabels, str]:
    """Return the status that checks on labelled pairs give, and what became of them, in words."""
    if not not_passed:
        return "passes", f"all {len(checks)} checks on labelled pairs passed"
    undecided = [check.name for check in not_passed if check.unclear]
    missing = sum(check.value is None and not check.unclear for check in not_passed)
    failed = len(not_passed) - len(undecided) - missing
    if OVER_BASELINE in undecided or (undecided and not failed):
        claims = [f"whether it {ASKED[name]}" for name in ASKED if name in undecided]
        claims = claims or [f"{len(undecided)} of {len(checks)} checks"]
        others = f"; of the {len(checks) - len(undecided)} other checks {failed} failed" if failed else ""
        return "unclear", f"{over_baseline['num']} test pairs leave open {', and '.join(claims)}{others}"
    counts = ((len(undecided), "undecided"), (missing, "not measured"))
    others = "".join(f", {count} {what}" for count, what in counts if count)
    return "fails" if failed else "unclear", f"{failed} of {len(checks)} checks on labelled pairs failed{others}"


def _on_logged(logged: Mapping[str, Any], status: OnLabels, labels: str) -> tuple[OnLabels, str, list[str]]:
    """Return status, headline and reasons that logged answers give, next to what labelled pairs say."""
    if logged["outcome"] == "refuted":
        first = logged["choices"][0]
        against = f"win rate of the best of {first['k']} among logged answers: {_interval(first['win_rate'])}"
        return "fails", f"Picks worse answers among logged ones than a blind choice; {labels}", [against]
    if logged["outcome"] == "open":
        status = "fails" if status == "fails" else "unclear"
        return status, f"Not shown to pick better answers among logged ones; {labels}", [logged["stopped"]]
    best = logged["best_k"]
    choice = next(choice for choice in logged["choices"] if choice["k"] == best)
    low, but, against_it = ends(choice["over_longest"])[0], "", []
    if low is None or low <= 0:
        but, over_longest = ", not shown to be better than picking the longest", _interval(choice["over_longest"])
        against_it = [f"win rate of the best of {best} minus that of the longest answer: {over_longest}"]
    wins = f"winning {_interval(choice['win_rate'])} there{but}"
    headline = f"Picks better answers among logged ones up to k = {best}, {wins}; {labels}. {UNTRIED}"
    return status, headline, against_it


def with_outcome(verdict: Verdict, diagnoses: Sequence[Diagnosis]) -> Verdict:
    """Return a verdict that first names the reasons not to trust the outcome.

    Args:
        verdict: of any level. A check that says the same as `diagnoses` of chance and length is left out.
        diagnoses: result of `diagnose_outcome`: under-training, losing to length, too few pairs, truncated texts.
    """
    named = [f"{diagnosis.diagnosis}: {diagnosis.symptom}; {diagnosis.advice}" for diagnosis in diagnoses]
    is_told = any(diagnosis.symptom.startswith(BASELINE_LABEL) for diagnosis in diagnoses)
    reasons = (reason for reason in verdict["reasons"] if not (is_told and reason.startswith(BASELINE_LABEL)))
    return {**verdict, "reasons": [*named, *reasons]}


def verdict_on_samples(
    checks: Sequence[GateCheck], *, plan: str, judge: str, parts: Mapping[str, Mapping[str, Any]], num_telling: int
) -> Verdict:
    """Return the verdict of the third level.

    Its last reason is the share of prompts that may be disasters although no judged prompt is one, and the loss on each
    of them that would undo the gain: no number of judged prompts shows that this share is zero.

    Args:
        checks: checks of readiness v2. An undecided check does not fail: if no other fails, the verdict is unclear.
        plan: how and how far the policy will be optimised: "a KL of 3 nats by best-of-n".
        judge: name of the judge of the samples, for readers.
        parts: measurements, with intervals where known. The verdict reports `planned_gain`, in standard deviations; for
            a ready model it reports a shown fall and a shown preference for longer samples as reasons against it.
        num_telling: number of independent prompts whose samples the judge can discriminate.
    """
    failed = [check for check in checks if not check.passed]
    refused = [check for check in failed if not check.unclear]
    there = ""
    gain, fall = parts.get("planned_gain"), parts.get("planned_fall")
    if gain is not None and ends(gain)[0] is not None:
        few = f"{gain['value']:+.2f} sd, of too few prompts for an interval,"
        there = f"the true reward gains {shown_gain(gain) if num_telling >= ENOUGH_PROMPTS else few} there, and "
    warnings, hard, less = list[str](), parts.get("hard_accuracy"), ""
    highest_fall = None if fall is None else ends(fall)[1]
    if fall is not None and highest_fall is not None and highest_fall < 0:
        less = "; the true reward gains more at a smaller KL"
        warnings.append(
            f"the true reward was higher on the way: {shown_gain(fall)} since then; a plan that stops there gains more"
        )
    if hard is not None and hard["ci_high"] is not None and hard["ci_high"] < 0.5:
        warnings.append(
            f"worse than a coin where the shorter sample is better ({_interval(hard)}): RL finds that first, so this "
            "says nothing of RL"
        )
    value = None if gain is None else gain["value"]
    status: Literal["ready", "not_ready", "unclear"] = "not_ready" if refused else "unclear" if failed else "ready"
    headline = {
        "not_ready": f"Not ready for {plan}: {len(refused)} of {len(checks)} checks on samples of the policy failed",
        "unclear": f"Unclear whether it is ready for {plan}: {there}{len(failed)} of {len(checks)} checks on samples "
        "of the policy are open",
        "ready": f"Ready for {plan}: {there}all {len(checks)} checks on samples of the policy passed{less}",
    }[status]
    return {
        "rung": 3,
        "evidence": f"samples of the policy, judged by {judge}",
        "status": status,
        "headline": headline,
        "reasons": [
            *([check.text for check in (*refused, *(check for check in failed if check.unclear))] or warnings),
            *([unseen_prompts(num_telling, value if value and value > 0 else None)] if num_telling else []),
        ],
    }


def verdict_on_policy(trained: Mapping[str, Any]) -> Verdict | None:
    """Return the verdict of the fourth level; None if the answers of the trained policy were not judged.

    Args:
        trained: record of the stage grpo; its own verdict describes the change of the true reward.
    """
    if trained["verdict"]["status"] == "unknown":
        return None
    return _optimised(f"a policy optimised against it, judged by {trained['judge']}", trained["verdict"])


def verdict_on_served(served: Mapping[str, Any]) -> Verdict:
    """Return the verdict of the fourth level after best-of-n was served as planned.

    Args:
        served: record of the stage confirmation.
    """
    prompts = f"{served['num_prompts']} fresh prompts"
    return _optimised(f"best-of-{served['n']} served on {prompts}, judged by {served['judge']}", served["verdict"])


def _optimised(evidence: str, outcome: Mapping[str, Any]) -> Verdict:
    return {
        "rung": 4,
        "evidence": evidence,
        "status": STATUS_OF_TRAINED[outcome["status"]],
        "headline": outcome["headline"],
        "reasons": list(outcome["reasons"]),
    }


def verdict_tags(verdict: Verdict, more: NextRung | None) -> dict[str, str]:
    """Return a verdict as tags for a tracker's run or model version."""
    return {
        "rm.verdict": verdict["status"],
        "rm.rung": str(verdict["rung"]),
        "rm.evidence": verdict["evidence"],
        "rm.headline": verdict["headline"],
        "rm.reasons": "; ".join(verdict["reasons"]) or "none",
        "rm.to_raise": "nothing" if more is None else f"{more['evidence']}: {more['command']} (costs {more['cost']})",
    }


def _interval(value: Mapping[str, Any]) -> str:
    if value["value"] is None:
        return "an unknown share"
    low, high = ends(value)
    if low is None or high is None:
        return f"{value['value']:.2f} (no interval)"
    condition = " if no prompt is a disaster" if value["ci_low"] is None else ""
    return f"{value['value']:.2f} ({low:.2f} to {high:.2f}{condition})"
