"""Best-of-n as it would be served, on fresh prompts: whether the gold reward rose for certain, after as few as will do.

Readiness judges a plan from samples of some prompts. This carries the plan out on others: n samples of each prompt are
scored, the best is what a user would get, and a judge compares it with one that was not among the n. That is two labels
a prompt, however large n is; a second opponent would tell less than its label costs.

Pairs are judged one after the other, and the interval may be looked at after each (`bets.ConfidenceSequence`): serving
that does harm ends after few, and what is clear costs little. `ServedGain` does it in any loop that serves the best of
n (docs/readiness.md).
"""

import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from rmcore.config.policy import PolicyConfig
from rmcore.core.errors import ConfigError, DataError
from rmcore.evaluation.uncertainty import MetricValue
from rmcore.policy.judge import require_named_judge, require_people
from rmcore.policy.sampling.best_of_n import nominal_kl
from rmcore.policy.stopping.bets import ConfidenceSequence

NOBODY_JUDGES = (
    "who judges what best-of-n gives is unknown: only the gold world judges itself. Name a function of (prompt, "
    "response) in policy.judge, or with --people a folder for files of pairs that people fill in (policy.people)."
)
Decision = Literal["rose", "fell", "unclear"]
LEVEL = 0.05
"""Chance that the interval of the gain is ever wrong; that of the win rate has the same one by itself."""
MOST_SAMPLES = 4096
FURTHEST_KL = nominal_kl(MOST_SAMPLES)
"""7.3 nats: a plan beyond them is none that best-of-n carries out."""


def require_served_judge(policy: PolicyConfig, *, is_gold: bool) -> None:
    """Check that there is one judge of what is served.

    Raises:
        ConfigError: there is none, a judge and people are both named, or what is named is not there.
    """
    if policy.people is not None and policy.judge is not None:
        raise ConfigError("policy.judge and policy.people are both named, and one of them judges; leave one out.")
    if policy.people is not None:
        require_people(policy.people)
    elif policy.judge is not None:
        require_named_judge(policy.judge)
    elif not is_gold:
        raise ConfigError(NOBODY_JUDGES)


def smallest_n(planned_kl: float) -> int:
    """The smallest power of two whose best-of-n moves by at least `planned_kl` nats, where no samples tie.

    Raises:
        DataError: it is beyond `MOST_SAMPLES`.
    """
    n = 2
    while nominal_kl(n) < planned_kl:
        n *= 2
        if n > MOST_SAMPLES:
            raise DataError(
                f"best-of-n moves a policy by log n - (n - 1) / n nats, which is {FURTHEST_KL:.2f} at n = "
                f"{MOST_SAMPLES}, and {planned_kl:g} are planned; lower readiness.planned_kl, or train a policy."
            )
    return n


def wins_of_gain(gain: float) -> float:
    """Wins less losses a comparison that a gain comes to, where the responses of a prompt are normal.

    The better one of two that differ by `gain` standard deviations on average wins with the chance Phi(gain / sqrt 2).

    Args:
        gain: in standard deviations within prompts.
    """
    return math.erf(gain / 2)


class ServedGain:
    """The gain from serving the best of n instead of one sample, as far as it is known after each judged pair.

    Args:
        limit: size that a judged difference has at most.
        useful_gain: that is asked for, in the judge's unit.
    """

    def __init__(self, limit: float, useful_gain: float) -> None:
        self.useful_gain = useful_gain
        self._gain = ConfidenceSequence(-limit, limit, LEVEL)
        self._wins = ConfidenceSequence(-1.0, 1.0, LEVEL)

    def see(self, difference: float) -> bool:
        """Take up one judged pair; whether more of them can still change what is said.

        Raises:
            ValueError: the difference is larger than the limit.
        """
        self._gain.see(difference)
        self._wins.see(float(np.sign(difference)))
        return not self.is_decided

    @property
    def differences(self) -> list[float]:
        """The chosen response less the other one, as judged, by prompt."""
        return self._gain.values

    @property
    def path(self) -> list[tuple[float, float]]:
        """The interval of the mean difference after each pair: all of them hold with the chance 1 - LEVEL."""
        return self._gain.path

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the gain, valid whenever one stops."""
        return self._gain.interval

    @property
    def decision(self) -> Decision:
        """Whether the gold reward is shown to have risen or fallen."""
        low, high = self.interval
        return "rose" if low > 0 else "fell" if high < 0 else "unclear"

    @property
    def is_decided(self) -> bool:
        """Whether gold fell, rose by as much as was asked for, or rose by less than that."""
        low, high = self.interval
        return high < 0 or low >= self.useful_gain or (low > 0 and high < self.useful_gain)

    def gain(self) -> MetricValue:
        """The mean difference; where the end came early it lies a little too far from zero, and its interval does not.

        Raises:
            DataError: nothing was judged.
        """
        return MetricValue(self._gain.mean, *self.interval, num=len(self.differences))

    def win_rate(self) -> MetricValue:
        """How often the chosen one is better, ties half.

        Raises:
            DataError: nothing was judged.
        """
        rate, low, high = ((1 + one) / 2 for one in (self._wins.mean, *self._wins.interval))
        return MetricValue(rate, low, high, num=len(self.differences))


def verdict_of_confirmation(record: Mapping[str, Any]) -> dict[str, Any]:
    """Judge by the interval of its gain whether the gold reward rose when best-of-n was served.

    Args:
        record: n, num_prompts, num_allowed, num_fresh (that there are; None: endless), useful_gain, unit, and gold with
            the gain of `ServedGain`.

    Returns:
        {"status": rose, fell or unclear, "headline", "reasons"}.
    """
    gain = record["gold"]["gain"]
    shown = shown_gain(gain, record["unit"])
    where = f"best-of-{record['n']} on {record['num_prompts']} fresh prompts"
    asked = f"a gain of {record['useful_gain']:.2g} {record['unit']} was asked for"
    status: Decision = "unclear"
    reasons = []
    if gain["ci_low"] > 0:
        status, headline = "rose", f"Gained {shown} by {where}"
        if gain["ci_high"] < record["useful_gain"]:
            reasons.append(f"{asked}, and it is less")
        elif gain["ci_low"] < record["useful_gain"]:
            reasons.append(f"{asked}, and is not shown")
    elif gain["ci_high"] < 0:
        status, headline = "fell", f"Lost {shown} by {where}"
    else:
        headline = f"Unclear whether it gains, {shown}, by {where}"
        reasons.append(
            "more fresh prompts narrow the interval: a higher policy.fresh_prompts judges all of them anew"
            if record["num_fresh"] is None or record["num_fresh"] > record["num_allowed"]
            else "no more fresh prompts are held out, and more would narrow the interval (data.test_fraction)"
        )
    return {"status": status, "headline": headline, "reasons": reasons}


def shown_gain(value: Mapping[str, Any], unit: str = "sd") -> str:
    """A gain with its interval, as verdicts say it; without one where there is none."""
    if value["ci_low"] is None:
        return f"{value['value']:+.2f} {unit}"
    return f"{value['value']:+.2f} {unit} ({value['ci_low']:+.2f} to {value['ci_high']:+.2f})"
