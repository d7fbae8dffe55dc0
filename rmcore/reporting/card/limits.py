"""Uses that a reward model is not for: what follows from its verdict, and from what was not measured."""

from collections.abc import Mapping
from typing import Any

from rmcore.reporting.card.evidence import RUNG_OF_A_POLICY, Judgement
from rmcore.reporting.card.text import Markdown, shown
from rmcore.reporting.figures import numbers
from rmcore.reporting.verdict_style import VERDICT_STYLES

_RANKING = "**Ranking answers where it matters.** "
_PROMPTS = Markdown(
    "**Comparing answers to different prompts, or a threshold on the reward.** Only differences between answers to one "
    "prompt were trained: what is added to all rewards of a prompt is arbitrary."
)
_PEOPLE = Markdown("**Texts that people wrote.** It was trained on those of a synthetic world, and knows no other.")
_LANGUAGES = Markdown(
    "**Other languages than those of its training pairs.** Which these are is not stated, and none was measured alone."
)
_TRUTH = Markdown(
    "**Judging whether an answer is true, safe or lawful.** It was trained on preferences, and on nothing else."
)


def limits(
    judgement: Judgement | None,
    *,
    max_seq_len: int,
    truncation: Mapping[str, Any] | None,
    elsewhere: Mapping[str, Any] | None,
    over_baseline: Mapping[str, Any] | None,
    synthetic: bool,
) -> list[Markdown]:
    """Uses that nothing here speaks for, each with its reason.

    Args:
        judgement: the verdict; None where nobody judged.
        max_seq_len: tokens a side that it reads.
        truncation: counts of training sides that were cut, None where that is not known.
        elsewhere: accuracy on out-of-distribution pairs, None where it was not measured.
        over_baseline: accuracy over the best baseline (chance or length), None where it was not measured.
        synthetic: whether it was trained on texts of the synthetic benchmark.
    """
    return [
        _optimising(judgement),
        *_ranking(judgement, over_baseline),
        _PROMPTS,
        *([_PEOPLE] if synthetic else [_LANGUAGES]),
        _unlike(elsewhere),
        _longer(max_seq_len, truncation),
        _TRUTH,
    ]


def _optimising(judgement: Judgement | None) -> Markdown:
    what = "Optimising a policy against it"
    ways = "by reinforcement learning, best-of-n or rejection sampling"
    if judgement is None:
        return Markdown(f"**{what}**, {ways}. Nobody judged whether it can be, so nothing speaks for it.")
    if VERDICT_STYLES[judgement.status].tone == "good" and judgement.rung >= RUNG_OF_A_POLICY:
        far = "what the verdict names" if judgement.kl is None else f"{judgement.kl:.3g} nats of KL"
        how = "" if judgement.method is None else f", by another method than {shown(judgement.method)}"
        judged = (
            "the one that was judged" if judgement.policy is None else f"{shown(judgement.policy)}, which was judged"
        )
        return Markdown(
            f"**{what} further than {far}**{how}, or from another policy than {judged}: the verdict is about that "
            "alone, and further on the true reward may fall while this one still rises."
        )
    if judgement.rung >= RUNG_OF_A_POLICY:
        far = "" if judgement.kl is None else f" at {judgement.kl:.3g} nats of KL"
        return Markdown(f"**{what}**, {ways}: judged on a policy{far}, it was not shown to be worth it.")
    return Markdown(
        f"**{what}**, {ways}. No policy was tried on it: its verdict is of evidence level {judgement.rung} of 4, and "
        "nothing is called ready below the third."
    )


def _ranking(judgement: Judgement | None, over_baseline: Mapping[str, Any] | None) -> list[Markdown]:
    """Tell what labelled pairs say against it: nothing is shown that is not so at the end of its interval."""
    if over_baseline is not None and (over_baseline["ci_low"] is None or over_baseline["ci_low"] <= 0):
        found = shown(numbers.with_interval(over_baseline, "points"))
        return [
            Markdown(
                f"{_RANKING}It was not shown to be right more often than the better of guessing and always taking the "
                f"longer (or the shorter) answer: {found}, on {numbers.count(over_baseline['num'])} pairs."
            )
        ]
    if judgement is not None and judgement.status == "fails":
        return [Markdown(f"{_RANKING}It failed checks on labelled pairs; they are listed below.")]
    return []


def _unlike(elsewhere: Mapping[str, Any] | None) -> Markdown:
    start = "**Prompts unlike those of its training pairs.** "
    if elsewhere is None or elsewhere["value"] is None:
        return Markdown(f"{start}How it does there was not measured.")
    return Markdown(
        f"{start}Pairwise accuracy on such was {shown(numbers.with_interval(elsewhere, 'share'))} of "
        f"{numbers.count(elsewhere['num'])} pairs."
    )


def _longer(max_seq_len: int, truncation: Mapping[str, Any] | None) -> Markdown:
    cut = ""
    if truncation is not None and truncation.get("num_pairs"):
        sides = 2 * truncation["num_pairs"]
        cut = (
            f" Of the {sides:,} texts that it was trained on, {truncation['num_cut_sides']:,} were longer and were cut."
        )
    return Markdown(
        f"**Texts of more than {max_seq_len:,} tokens**, prompt and answer together. `rm-opt` cuts them, the prompt "
        f"from its left first, and the reward is then one of what is left.{cut}"
    )
