"""The evidence that would raise a verdict, and how many judgements it takes: the power of verdicts on samples.

The lower end of that interval (`rmcore.evaluation.uncertainty.bounded_means`) is the 2.5 % quantile of a mean in which
N prompts, and one more that loses as much as the worst judged sample, have random weights. The N prompts add a normal
error of s / sqrt(N), the unseen one an exponential one of (worst + gain) / N. A gain is shown in 80 % of the
evaluations if both together stay below it in 97.5 % of the draws after 0.84 standard errors are taken off it.
"""

import math
import shlex
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from scipy.special import log_ndtr, ndtr, ndtri

from rmcore.config.pipeline import PipelineConfig
from rmcore.config.policy import WORLD, PolicyConfig
from rmcore.policy.confirmation import FURTHEST_KL, MOST_SAMPLES, smallest_n
from rmcore.policy.overoptimization import LET_PASS
from rmcore.policy.sampling.best_of_n import ENOUGH_PROMPTS, best_of_n_weights, nominal_kl, samples_needed
from rmcore.readiness.components import DECIDING
from rmcore.reporting.schema import NextRung, Verdict

GAIN_TO_SHOW = 0.2
"""Gain in sd for which a plan and the next step say how many prompts show it."""
POWER = 0.8
"""Share of the evaluations, "4 of 5", in which the lower end of the interval is above 0."""
FARTHER_OUT = 1.6
"""Times as far as of normal samples the worst one is out: 1.4 to 1.7 on judged samples of a real policy, whose prompts
differ in their spread (experiments/log/one-policy.md). A longer tail takes more prompts than is said before one is
judged."""
CAUTION = 1.2
"""Times as large as the formula has them both errors are taken: prompts differ in how well a reward model sees them,
and in tails the worst sample and the spread differ between evaluations. Set on other worlds than those of
`benchmarks/verdict_power.py`."""
CHOSEN_ALIKE = 0.7
"""Share of the variance over prompts that a perfect choice loses: the best of n normal samples differ less than one."""
MOST_PROMPTS = 1_000_000
LEAST_KL = 0.01
"""The smallest plan (`readiness.planned_kl`)."""
_STEPS = range(1, 100_000)
"""Gains that are tried, in thousandths of a standard deviation."""


@lru_cache(maxsize=64)
def blind_spread(n: int, size: int) -> float:
    """Standard deviation over prompts of the gain of best-of-n among `size` samples, for a choice that knows nothing.

    In that of the true reward within prompts: sqrt(sum v^2 - 1 / size) for weights v of the samples.
    """
    if n == size:  # the best one has all the weight, however many there are
        return math.sqrt(1 - 1 / size)
    return math.sqrt(float((best_of_n_weights(np.arange(size, dtype=np.float64), n) ** 2).sum()) - 1 / size)


def perfect_gain(n: int) -> float:
    """Gain in sd of a choice of the best of n normal samples that knows the true reward.

    Source:
        Blom 1958, Statistical Estimates and Transformed Beta-Variables.
    """
    return float(ndtri((n - 0.375) / (n + 0.25)))


def usual_worst(num_prompts: int, size: int) -> float:
    """Deviations that the worst of all judged samples is below the mean of its prompt, before one is judged."""
    normal = -float(ndtri(1 / (num_prompts * size + 1))) * math.sqrt((size - 1) / size)
    return FARTHER_OUT * normal


def detectable_gain(num_prompts: int, n: int, size: int, worst: float | None = None) -> float:
    """Smallest gain of best-of-n, in sd, that prompts of `size` judged samples each show in 80 % of the evaluations.

    Args:
        num_prompts: independent ones, that are judged.
        n: of best-of-n.
        size: judged samples of each prompt, at least n.
        worst: standard deviations that the worst of all judged samples is below the mean of its prompt; None:
            `usual_worst`.
    """
    place = bisect_left(_STEPS, True, key=lambda step: _is_shown(step / 1000, num_prompts, n, size, worst))
    return (1 + place) / 1000


def prompts_to_detect(gain: float, n: int, size: int, worst: float | None = None) -> int:
    """Fewest prompts of `size` judged samples that show a gain in 80 % of the evaluations; see `detectable_gain`."""
    return 2 + bisect_left(range(2, MOST_PROMPTS), True, key=lambda number: _is_shown(gain, number, n, size, worst))


def _is_shown(gain: float, num_prompts: int, n: int, size: int, worst: float | None) -> bool:
    seen = min(1.0, gain / perfect_gain(n))
    error = CAUTION * blind_spread(n, size) * math.sqrt((1 - CHOSEN_ALIKE * seen**2) / num_prompts)
    worst = usual_worst(num_prompts, size) if worst is None else worst
    unseen = CAUTION * (worst + gain) / num_prompts
    left = gain - float(ndtri(POWER)) * error
    normal, ratio = left / error, error / unseen
    # P(normal + exponential error <= left), of an exponentially modified normal distribution.
    beyond = math.exp(min(0.0, -left / unseen + ratio**2 / 2 + float(log_ndtr(normal - ratio))))
    return bool(ndtr(normal) - beyond >= 0.975)


def plan_power(config: PipelineConfig) -> str | None:
    """Return what gain the judged samples of a plan would show, or that they do not reach the plan.

    None where no sample is drawn.
    """
    policy, planned_kl = config.policy, config.readiness.planned_kl
    if policy is None or policy.samples is not None:
        return None
    each, needed = policy.samples_per_prompt, samples_needed(planned_kl)
    if math.sqrt(planned_kl) >= LET_PASS * math.sqrt(nominal_kl(each)):
        more = f"; best of {MOST_SAMPLES:,}, the most that is planned with, reaches {FURTHEST_KL:.2f}"
        if planned_kl <= FURTHEST_KL:
            more = f", or draw {needed:,} of each (policy.samples_per_prompt)"
        return (
            f"{each:,} samples of each prompt reach {nominal_kl(each):.2f} nats, and {planned_kl:g} are planned: the "
            f"gain there would not be measured. Plan at most as many nats (readiness.planned_kl){more}"
        )
    n = min(each, needed)
    drawn = f"{policy.num_prompts} held-out prompts × {each} samples {_shown_gain(policy.num_prompts, n, each)}"
    return f"{drawn}; {GAIN_TO_SHOW:g} sd takes {prompts_to_detect(GAIN_TO_SHOW, n, each)} prompts of {each} samples"


def _shown_gain(num_prompts: int, n: int, size: int) -> str:
    gain = detectable_gain(num_prompts, n, size)
    if gain > perfect_gain(n):
        return "are too few to show any gain"
    return f"show a gain of {gain:.2f} sd or more in 4 of 5 evaluations"


class _Judgeable(NamedTuple):
    """The plan as far as samples can judge it.

    kl: nats: the planned ones, or where they are beyond `FURTHEST_KL` those that the samples of a prompt reach.
    needed: samples of each prompt that it takes.
    each: samples to draw of each prompt; more of a prompt say little of the plan.
    option: words of `rm-opt readiness policy` that lower the plan to `kl`.
    why: the reason, for readers; empty where the plan stays.
    """

    kl: float
    needed: int
    each: int
    option: list[str]
    why: str


def _shown(nats: float) -> float:
    """Nats, rounded down to what a command shows."""
    return math.floor(100 * nats) / 100


def _judgeable(config: PipelineConfig, policy: PolicyConfig) -> _Judgeable:
    planned_kl = config.readiness.planned_kl
    reached = FURTHEST_KL if policy.samples else max(FURTHEST_KL, nominal_kl(policy.samples_per_prompt))
    if planned_kl <= reached:
        needed = samples_needed(planned_kl)
        return _Judgeable(planned_kl, needed, max(needed, DECIDING + 1), [], "")
    each = min(max(policy.samples_per_prompt, DECIDING + 1), MOST_SAMPLES)
    kl = _shown(nominal_kl(each))
    why = f", up to {kl:g} nats: the planned {planned_kl:g} are beyond best of {MOST_SAMPLES:,}"
    return _Judgeable(kl, samples_needed(kl), each, ["--kl", f"{kl:g}"], why)


def reach_of(optimized: Mapping[str, Any], optimizer: str) -> float | None:
    """Nats that judged samples reach, by the record of the stage overoptimization; None where they were not judged."""
    ends = (curve["points"][-1]["kl"] for curve in optimized.get("curves", ()) if curve["method"] == optimizer)
    return next(ends, None)


def next_rung(
    verdict: Verdict, config: PipelineConfig, model: Sequence[str], *, reach: float | None = None
) -> NextRung | None:
    """Return what would raise a verdict: the evidence, the command that gathers it, and its cost; None at the top.

    Args:
        verdict: the present verdict.
        config: settings of the run that it came from.
        model: arguments by which a command finds the reward model: the name of the run, which determines settings,
            split and policy; below the third level also `--checkpoint DIR` and `--data FILE`.
        reach: `reach_of` the samples that were judged; None: what as many as are drawn reach where none tie.
    """
    policy = config.policy or PolicyConfig()
    if verdict["rung"] < 3:
        return _samples_to_judge(config, policy, model)
    if verdict["rung"] > 3:
        return None
    if verdict["status"] == "unclear":
        return _more_samples(config, policy, model)
    if verdict["status"] == "not_ready":  # it must not be optimised against
        reach = nominal_kl(policy.samples_per_prompt) if reach is None else reach
        kl = max(LEAST_KL, min(config.readiness.planned_kl / 2, _shown(reach)))
        return {
            "rung": 3,
            "evidence": "a plan that stops earlier, or a reward model trained on more labels, judged again",
            "command": shlex.join(["rm-opt", "readiness", "policy", *model, "--kl", f"{kl:g}"]),
            "cost": "no new sample and no new label for the plan: the stored samples are scored again",
        }
    if config.readiness.planned_optimizer == "best_of_n" and config.readiness.planned_kl <= FURTHEST_KL:
        return _serving(config, policy, model)
    needs_policy = policy.samples is not None or policy.name == WORLD
    return {
        "rung": 4,
        "evidence": "a policy optimised against it, judged on held-out prompts",
        "command": shlex.join(["rm-opt", "rlhf", "--from", *model, "--seeds", "3"])
        + (" --policy-model YOUR_POLICY" if needs_policy else ""),
        "cost": "three trainings of the policy by GRPO, judged on held-out prompts on the way",
    }


def _samples_to_judge(config: PipelineConfig, policy: PolicyConfig, model: Sequence[str]) -> NextRung:
    plan = _judgeable(config, policy)
    judged = shlex.join(["rm-opt", "readiness", "policy", *model, *plan.option])
    evidence = f"samples of the policy that will be optimised, judged{plan.why}"
    if config.is_gold:
        each = max(policy.samples_per_prompt, plan.needed)
        more = "" if each == policy.samples_per_prompt else f" --set policy.samples_per_prompt={each}"
        return {
            "rung": 3,
            "evidence": evidence,
            "command": f"{judged}{more}",
            "cost": f"{policy.num_prompts} prompts × {each} samples of the policy, which the synthetic benchmark "
            "judges without a cost",
        }
    of_each = [] if policy.samples_per_prompt == plan.each else ["--n", str(plan.each)]
    drawn = shlex.join(["rm-opt", "readiness", "best-of-n", *model, *of_each])
    return {
        "rung": 3,
        "evidence": evidence,
        "command": f"{drawn} --policy YOUR_POLICY",
        "cost": f"{policy.num_prompts} prompts × {plan.each} samples of the policy and a judgement of each; then "
        f"{judged} --samples JUDGED_FILE",
    }


def _more_samples(config: PipelineConfig, policy: PolicyConfig, model: Sequence[str]) -> NextRung:
    plan = _judgeable(config, policy)
    wanted = max(2 * ENOUGH_PROMPTS, prompts_to_detect(GAIN_TO_SHOW, plan.needed, plan.each))
    wanted = wanted if wanted > policy.num_prompts else 2 * policy.num_prompts
    size = f"{wanted} prompts × {plan.each} samples"
    judged = shlex.join(["rm-opt", "readiness", "policy", *model, *plan.option])
    larger = f"--set policy.num_prompts={wanted} --set policy.samples_per_prompt={plan.each}"
    return {
        "rung": 3,
        "evidence": f"{size} of the policy, judged, which {_shown_gain(wanted, plan.needed, plan.each)}{plan.why}",
        "command": f"{judged} {larger if policy.samples is None else '--samples JUDGED_FILE'}",
        "cost": f"{size} and a judgement of each",
    }


def _serving(config: PipelineConfig, policy: PolicyConfig, model: Sequence[str]) -> NextRung:
    people = policy.people
    if people is None and not config.is_gold and policy.judge is None:
        people = "to_judge"
    judged_by = "2 judgements each, plus 48 to estimate the sd" if people is None else "one pair each for people"
    words = [] if people in (None, policy.people) else ["--people", people]
    return {
        "rung": 4,
        "evidence": "best-of-n served on fresh prompts, judged",
        "command": shlex.join(["rm-opt", "readiness", "confirm", *model, *words])
        + ("" if policy.samples is None else " --policy YOUR_POLICY"),
        "cost": f"at most {policy.fresh_prompts} fresh prompts, {smallest_n(config.readiness.planned_kl) + 1} "
        f"samples and {judged_by}; fewer prompts if the result is clear sooner",
    }
