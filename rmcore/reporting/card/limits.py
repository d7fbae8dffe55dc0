"""Uses that a reward model is not for: what follows from its verdict, and from what was not measured."""

from collections.abc import Mapping, Sequence
from typing import Any

from rmcore.reporting.card.evidence import RUNG_OF_A_POLICY, Found, Judgement
from rmcore.reporting.card.text import Markdown, shown
from rmcore.reporting.figures import numbers
from rmcore.reporting.verdict_style import VERDICT_STYLES

_PROMPTS = (
    "**Comparing answers to different prompts, or a threshold on the reward.** Only differences between answers to one "
    "prompt were trained: what is added to all rewards of a prompt is arbitrary."
)
_PEOPLE = "**Texts that people wrote.** It was trained on those of a synthetic world, and knows no other."
_LANGUAGES = (
    "**Other languages than those of its training pairs.** Which these are is not stated, and none was measured alone."
)
_TRUTH = "**Judging whether an answer is true, safe or lawful.** It was trained on preferences, and on nothing else."


def limits(
    judgement: Judgement | None,
    found: Sequence[Found],
    truncation: Mapping[str, Any],
    max_seq_len: int,
    synthetic: bool,
) -> list[Markdown]:
    """Uses that nothing here speaks for, each with its reason.

    Args:
        judgement: the verdict; None where nobody judged.
        found: what measurements tell; of several the last counts.
        truncation: counts of training sides that were cut; empty where that is not known.
        max_seq_len: tokens a side that the model reads.
        synthetic: whether it was trained on texts of the synthetic benchmark.
    """
    elsewhere = next((one.elsewhere for one in reversed(found) if one.elsewhere is not None), None)
    over_baseline = next((one.over_baseline for one in reversed(found) if one.over_baseline is not None), None)
    measured = "How it does there was not measured."
    if elsewhere is not None and elsewhere["value"] is not None:
        share = shown(numbers.with_interval(elsewhere, "share"))
        measured = f"Pairwise accuracy on such was {share} of {numbers.count(elsewhere['num'])} pairs."
    longer = (
        f"**Texts of more than {max_seq_len:,} tokens**, prompt and answer together. rm-opt cuts them, the prompt from "
        "its left first, and the reward is then one of what is left."
    )
    if truncation.get("num_pairs"):
        of = f"{truncation['num_cut_sides']:,} of the {2 * truncation['num_pairs']:,} texts"
        longer += f" {of} that it was trained on were longer and were cut."
    uses = [_optimising(judgement), *_ranking(judgement, over_baseline), _PROMPTS]
    uses += [
        _PEOPLE if synthetic else _LANGUAGES,
        f"**Prompts unlike those of its training pairs.** {measured}",
        longer,
    ]
    return [Markdown(use) for use in [*uses, _TRUTH]]


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
    """Tell what labelled pairs say against it: nothing is shown that is not so at the end of its interval."""
    use = "**Ranking answers where it matters.** "
    if over_baseline is not None and (over_baseline["ci_low"] is None or over_baseline["ci_low"] <= 0):
        measured = shown(numbers.with_interval(over_baseline, "points"))
        return [
            f"{use}It was not shown to be right more often than the better of guessing and always taking the longer "
            f"(or the shorter) answer: {measured}, on {numbers.count(over_baseline['num'])} pairs."
        ]
    is_failed = judgement is not None and judgement.status == "fails"
    return [f"{use}It failed checks on labelled pairs; they are listed below."] if is_failed else []
