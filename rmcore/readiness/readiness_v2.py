"""Readiness v2: whether this policy may be optimised against this reward model, up to a planned KL.

Judged on the policy's own samples instead of on labelled pairs alone. Conditions, each on one end of a 95 %
interval, decide, and none can be bought back by another. The checks on labelled pairs decide nothing at this level: a
model that only its gap between training and held-out accuracy refused gained 0.95 standard deviations of the true
reward (benchmarks/results/verdict.md). Nor do on-policy accuracy, which ranks reward models worse than the win rate in
the synthetic benchmark and as well on real answers (experiments/log/real-answers.md), and calibration, which says
nothing of what a policy will do.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from rmcore.config.evaluate import ReadinessConfig
from rmcore.evaluation.diagnosis import GateCheck
from rmcore.evaluation.uncertainty import ends
from rmcore.policy.sampling.best_of_n import ENOUGH_PROMPTS
from rmcore.readiness.components import DECIDING
from rmcore.readiness.logged_answers import MIN_PROMPTS
from rmcore.readiness.verdict import verdict_on_samples

OPTIMIZERS = {"best_of_n": "best-of-n", "kl_optimum": "RL with a KL penalty"}


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition: an end of the interval of `part` must reach `threshold`."""

    name: str
    part: str
    threshold: float
    meaning: str
    end: Literal["low", "high"]
    """Which one: that which speaks against the model, so that it has to be shown; or, where a model is refused only for
    what is shown of it, that which speaks for it."""


class Unseen(NamedTuple):
    """Prompts of the plan whose choice is unjudged: `num` with too few judged samples next to `num_judged` others, of
    which the worst sample loses `worst` standard deviations; and `num_chosen` of these others on which the reward model
    prefers a sample without a judgement, where the judged ones are a biased part of all.
    """

    num: int
    num_judged: int
    worst: float
    num_chosen: int = 0


def conditions(config: ReadinessConfig, choice: int = DECIDING) -> tuple[Condition, ...]:
    """The conditions: two things have to be shown, and two or three refuse a model where the opposite is shown.

    That the true reward gains at the plan has to be shown, and that a choice among 16 samples (`choice`) beats a blind
    one; where that is neither shown nor refuted the verdict is unclear. A
    model is refused where the gain is shown to be smaller than what was required, where the true reward is shown to
    have fallen by as much since its highest point (a smaller fall is said and refuses nothing), and, for RL, where the
    model is shown to prefer the worse sample because it is the longer one. RL finds that first, and the samples that
    are judged hardly show its effect; of best-of-n they show all.

    Thresholds are the values that mean something: 0, 1/2, and what was required. On the 400 reward models of the
    second study the gain's is also the one that costs least, if calling a model ready that does not gain costs four
    times what refusing one costs that is worth while (docs/readiness.md).
    """
    gain = f"gain of the true reward at the planned {config.planned_kl:g} nats"
    asked, fall = f"{gain}, at best", f"{gain} minus the highest gain at a lower KL"
    choose, beats = f"win_rate_{choice}", f"how often the best of {choice} beats another sample"
    for_rl = Condition("hard_accuracy", "hard_accuracy", 0.5, "accuracy where the shorter sample is better", "high")
    return (
        Condition("planned_gain", "planned_gain", 0.0, gain, "low"),
        Condition(choose, choose, 0.5, beats, "low"),
        Condition("worthwhile_gain", "planned_gain", config.min_gain, asked, "high"),
        Condition("fall", "planned_fall", -config.min_gain, fall, "high"),
        *(() if config.planned_optimizer == "best_of_n" else (for_rl,)),
    )


def judge_v2(
    parts: Mapping[str, Mapping[str, Any]],
    config: ReadinessConfig,
    judge: str,
    *,
    num_telling: int,
    reached: float | None = None,
    unseen: Unseen | None = None,
) -> dict[str, Any]:
    """Checks and verdict.

    Args:
        parts: measurements by name, {"value", "ci_low", "ci_high", ...}; those of `conditions`, and what is shown
            with them.
        config: plan and thresholds.
        judge: who judged the samples, as people read it.
        num_telling: independent prompts whose samples the judge tells apart; the others show nothing of a choice.
        reached: nats that the plan was judged at, where ties keep best-of-n from going as far as planned.
        unseen: prompts that were left out; the verdict is unclear where they could undo the gain.

    Returns:
        {"readiness": {"version", "parts", "plan", "judge"}, "gate": checks, "verdict": see
        rmcore.readiness.verdict}; JSON-ready.
    """
    asked = conditions(config, _choice(parts))
    checks = [_enough(num_telling), *(_check(condition, parts.get(condition.part), num_telling) for condition in asked)]
    if unseen is not None and unseen.num + unseen.num_chosen:
        checks.append(_with_unseen(parts["planned_gain"], unseen))
    plan = f"a KL of {config.planned_kl:g} nats by {OPTIMIZERS[config.planned_optimizer]}"
    if reached is not None and reached < 0.98 * config.planned_kl:
        plan += f" as far as it goes, which is {reached:.2g} nats, because rewards tie"
    return {
        "readiness": {
            "version": "v2",
            "parts": {name: dict(value) for name, value in parts.items()},
            "plan": {"optimizer": config.planned_optimizer, "kl": config.planned_kl, "min_gain": config.min_gain},
            "judge": judge,
        },
        "gate": [asdict(check) for check in checks],
        "verdict": verdict_on_samples(checks, plan=plan, judge=judge, parts=parts, num_telling=num_telling),
    }


def _choice(parts: Mapping[str, Mapping[str, Any]]) -> int:
    """The largest n, up to `DECIDING`, whose win rate was measured."""
    sizes = (int(name.removeprefix("win_rate_")) for name in parts if name.startswith("win_rate_"))
    return max((n for n in sizes if n <= DECIDING and parts[f"win_rate_{n}"]["value"] is not None), default=DECIDING)


def _enough(num_telling: int) -> GateCheck:
    """Whether rare disasters would have shown: fewer prompts leave room for more of them."""
    text = f"independent prompts whose samples the judge tells apart: {num_telling}, wanted at least {ENOUGH_PROMPTS}"
    passed = num_telling >= ENOUGH_PROMPTS
    return GateCheck("telling_prompts", float(num_telling), float(ENOUGH_PROMPTS), passed, text, unclear=not passed)


def _with_unseen(gain: Mapping[str, Any], unseen: Unseen) -> GateCheck:
    """Whether the gain is left if each prompt whose choice is unjudged loses as much as the worst judged sample."""
    low, share = ends(gain)[0], (unseen.num + unseen.num_chosen) / (unseen.num + unseen.num_judged)
    bound = None if low is None else (1 - share) * low - share * unseen.worst
    passed = bound is not None and bound > 0
    end = "no interval" if bound is None else f"lower end {bound:.3g}"
    kinds = (
        (unseen.num, "prompts with too few judged samples"),
        (unseen.num_chosen, "prompts on which a sample without a judgement is preferred"),
    )
    text = (
        f"gain if each of the {' and '.join(f'{number} {kind}' for number, kind in kinds if number)}, {share:.0%} of "
        f"all, loses as much as the worst judged sample, {unseen.worst:.1f} sd: {end}, wanted above 0; judge these "
        "too, or leave samples out by chance alone"
    )
    return GateCheck("unseen_prompts", bound, 0.0, passed, text, unclear=not passed)


def _check(condition: Condition, part: Mapping[str, Any] | None, num_telling: int) -> GateCheck:
    """Passed only where the end of the interval is known and high enough: strictly if it has to be shown.

    What does not pass is unclear where the other end leaves it open, or where the interval may not be believed: over
    fewer than `MIN_PROMPTS` prompts it excludes a true 0 too often.
    """
    low, high = (None, None) if part is None else ends(part)
    bound = low if condition.end == "low" else high
    has_to_be_shown = condition.end == "low"
    wanted = f"wanted {'above' if has_to_be_shown else 'at least'} {condition.threshold:g}"
    passed = bound is not None and (bound > condition.threshold if has_to_be_shown else bound >= condition.threshold)
    if bound is None:
        why = "it was not measured" if part is None else part.get("reason") or "it has no interval"
        text = f"{condition.meaning}: {why}; {wanted}"
    else:
        end = {"low": "lower", "high": "upper"}[condition.end]
        end += " end" if part and part["ci_low"] is not None else " end if no prompt is a disaster"
        text = f"{condition.meaning}: {end} {bound:.3g}, {wanted}"
    is_open = high is None or high > condition.threshold if has_to_be_shown else bound is None
    unclear = not passed and (is_open or num_telling < MIN_PROMPTS)
    return GateCheck(condition.name, bound, condition.threshold, passed, text, unclear)
