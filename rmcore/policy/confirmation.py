"""Best-of-n as it would be served, on fresh prompts: whether the true reward rose for certain, after as few as will do.

Readiness judges a plan from samples of some prompts. This carries the plan out on others: n samples of each prompt are
scored, the best is what a user would get, and a judge compares it with one that was not among the n. That is two labels
a prompt, however large n is; a second opponent would tell less than its label costs.

Pairs are judged one after the other, and the interval may be looked at after each (`bets.ConfidenceSequence`). It is of
differences that are clipped, as a bet needs a bound, so where few prompts lose or gain far more it is about another
number than the gain. So nothing is said to have risen or fallen before `LOOKS`, nor where the interval of the
differences as they are does not agree (`tail_doubt`), and a rise ends nothing before disasters on 1 % of all prompts
would have shown (`ENOUGH_TO_RISE`). Wins and losses are what they are, and need none of it. `ServedGain` does it in any
loop that serves the best of n (docs/readiness.md).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from rmcore.config.judging import MOST_UNREAD
from rmcore.config.policy import PolicyConfig
from rmcore.core.errors import ConfigError, DataError
from rmcore.evaluation.uncertainty import GainValue, MetricValue, shown_gain, unseen_prompts, unseen_share
from rmcore.policy.judge import require_named_judge, require_people
from rmcore.policy.sampling.best_of_n import nominal_kl
from rmcore.policy.stopping.bets import FEWEST_TO_SHOW, ConfidenceSequence, unclipped_interval
from rmcore.policy.stopping.pair_judges import WINS

NOBODY_JUDGES = (
    "who judges what best-of-n gives is unknown: only the synthetic benchmark judges itself. Name a function of "
    "(prompt, response) in policy.judge, or with --people a folder for files of pairs that people fill in "
    "(policy.people)."
)
Decision = Literal["rose", "fell", "unclear"]
LEVEL = 0.05
"""Chance that the interval of the gain is ever wrong; that of the win rate has the same one by itself."""
ENOUGH_TO_RISE = 352
"""Judged pairs before which a rise of clipped differences ends nothing: of prompts of which 1 % are disasters, 349 hold
none in 3 % of the servings (log 0.03 / log 0.99), and 352 are whole turns. Harm is said at once."""
LOOKS = (FEWEST_TO_SHOW, ENOUGH_TO_RISE)
"""Judged pairs after which differences as they are may decide, and at the end: each time at a third of `LEVEL`."""
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
        require_named_judge(policy.judge, policy.judging)
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
        limit: size at which a judged difference is clipped.
        useful_gain: the smallest that counts as one, in the judge's unit.
        is_clipped: whether differences may be larger; not where they are wins and losses.
    """

    def __init__(self, limit: float, useful_gain: float, *, is_clipped: bool = True) -> None:
        self.limit, self.useful_gain, self.is_clipped = limit, useful_gain, is_clipped
        self.differences: list[float] = []
        """The chosen response less the other one, as judged and not clipped, by prompt."""
        self._gain = ConfidenceSequence(-limit, limit, LEVEL)
        self._wins = ConfidenceSequence(-1.0, 1.0, LEVEL)

    def see(self, difference: float) -> bool:
        """Take up one judged pair; whether more of them can still change what is said.

        Raises:
            ValueError: the difference is larger than the limit, and none is clipped.
        """
        self._gain.see(float(np.clip(difference, -self.limit, self.limit)) if self.is_clipped else difference)
        self._wins.see(float(np.sign(difference)))
        self.differences.append(difference)
        return not self.is_decided

    @property
    def path(self) -> list[tuple[float, float]]:
        """The interval of the mean clipped difference after each pair: all of them hold with the chance 1 - LEVEL."""
        return self._gain.path

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the mean clipped difference, valid whenever one stops."""
        return self._gain.interval

    @property
    def doubt(self) -> str | None:
        """Why what clipped differences say is not claimed; None where it is, or where they say nothing."""
        return tail_doubt(self.differences, self.limit, decision_of(self.interval)) if self.is_clipped else None

    @property
    def decision(self) -> Decision:
        """Whether the true reward is shown to have risen or fallen; checked at `LOOKS` and at the end.

        A rise of fewer than `ENOUGH_TO_RISE` clipped differences holds if no prompt is a disaster that none has shown.
        """
        return "unclear" if self.doubt is not None else decision_of(self.interval)

    @property
    def is_decided(self) -> bool:
        """Whether the true reward fell, rose by as much as was required, or rose by less than that."""
        low, high = self.interval
        said = high < 0 or low >= self.useful_gain or (low > 0 and high < self.useful_gain)
        count = len(self.differences)
        is_time = count in LOOKS and (high < 0 or count >= ENOUGH_TO_RISE)
        return said and (not self.is_clipped or (is_time and self.doubt is None))

    @property
    def mean(self) -> float:
        """The mean of the clipped differences, within its interval.

        Raises:
            DataError: nothing was judged.
        """
        return self._gain.mean

    def gain(self) -> MetricValue:
        """The mean clipped difference; after an early end it is a little too far from zero, and its interval is not.

        Raises:
            DataError: nothing was judged.
        """
        return MetricValue(self.mean, *self.interval, num=len(self.differences))

    def unclipped(self) -> MetricValue:
        """The mean of the differences as they are, with the interval that has to agree with the clipped ones'."""
        return unclipped_gain(self.differences, self.limit)

    @property
    def clipped_share(self) -> float:
        """Share of the differences beyond the limit."""
        return float(np.mean(np.abs(self.differences) > self.limit)) if self.differences else 0.0

    def win_rate(self) -> MetricValue:
        """How often the chosen one is better, ties half.

        Raises:
            DataError: nothing was judged.
        """
        rate, low, high = ((1 + difference) / 2 for difference in (self._wins.mean, *self._wins.interval))
        return MetricValue(rate, low, high, num=len(self.differences))


def unclipped_gain(differences: Sequence[float], limit: float) -> GainValue:
    """The mean of differences as they are, with its interval (`unclipped_interval`)."""
    low, high = unclipped_interval(differences, limit, num_resamples=4000)
    return GainValue.of(float(np.mean(differences)), low, high, num=len(differences), num_prompts=len(differences))


def tail_doubt(differences: Sequence[float], limit: float, said: Decision) -> str | None:
    """Why a rise or fall of clipped differences is not claimed; None where it is, or where they say neither.

    Args:
        differences: as judged, not clipped, one a prompt.
        limit: at which they are clipped.
        said: by the interval of the clipped ones.
    """
    count = len(differences)
    if said == "unclear":
        return None
    if count < LOOKS[0]:
        return (
            f"{count} judged prompts leave room for {100 * unseen_share(count):.2g} % of all prompts that lose or gain "
            f"far more than these and would turn the mean; {LOOKS[0]} are wanted (policy.fresh_prompts)"
        )
    whole = unclipped_gain(differences, limit)
    low, high = whole.ends
    if decision_of((low or 0.0, high or 0.0)) == said:
        return None
    share = np.mean(np.abs(differences) > limit)
    return (
        f"{share:.1%} of the differences are clipped at {limit:g}; as they are their mean is "
        f"{shown_gain(whole.to_dict())}, which does not say that the true reward {said}: look at the prompts "
        "with the largest"
    )


def decision_of(interval: tuple[float, float]) -> Decision:
    """Whether an interval of a gain shows a rise or a fall."""
    low, high = interval
    return "rose" if low > 0 else "fell" if high < 0 else "unclear"


def verdict_of_confirmation(record: Mapping[str, Any]) -> dict[str, Any]:
    """Judge by the interval of its gain whether the true reward rose when best-of-n was served.

    Args:
        record: n, num_prompts, num_allowed, num_fresh (that there are; None: endless), useful_gain, unit, doubt, and
            the true reward with the gain of `ServedGain`.

    Returns:
        {"status": rose, fell or unclear, "headline", "reasons"}.
    """
    gain = record["gold"]["gain"]
    ends = gain["ci_low"], gain["ci_high"]
    is_few = record["unit"] != WINS and record["num_prompts"] < ENOUGH_TO_RISE
    named = dict(zip(("low_if_no_disaster", "high_if_no_disaster"), ends, strict=True)) | {"ci_low": None}
    gained = shown_gain(gain | named if is_few and ends[0] > 0 else gain, record["unit"])
    where = f"best-of-{record['n']} on {record['num_prompts']} fresh prompts"
    # Of wins and losses the interval knows the bounds, and allows for what no prompt has shown.
    limit = "" if record["unit"] == WINS else f", but {unseen_prompts(record['num_prompts'], gain['value'])}"
    asked = f"a gain of {record['useful_gain']:.2g} {record['unit']} was required"
    status: Decision = "unclear"
    reasons = []
    if record["doubt"] is not None:
        headline = f"Unclear whether it gains, {gained} where differences are clipped, by {where}"
        reasons.append(record["doubt"])
    elif gain["ci_low"] > 0:
        status, headline = "rose", f"Gained {gained} by {where}{limit}"
        if gain["ci_high"] < record["useful_gain"]:
            reasons.append(f"{asked}, and it is less")
        elif gain["ci_low"] < record["useful_gain"]:
            reasons.append(f"{asked}, and is not shown")
    elif gain["ci_high"] < 0:
        status, headline = "fell", f"Lost {gained} by {where}{limit}"
    else:
        headline = f"Unclear whether it gains, {gained}, by {where}"
        reasons.append(
            "more fresh prompts narrow the interval: a higher policy.fresh_prompts judges all of them again"
            if record["num_fresh"] is None or record["num_fresh"] > record["num_allowed"]
            else "no more fresh prompts are held out, and more would narrow the interval (data.test_fraction)"
        )
    if unread := record.get("num_unread", 0):
        all_pairs = unread + record["num_prompts"]
        reasons.append(f"{unread} of {all_pairs} pairs are left out: the judge's reply was unreadable")
        if unread > MOST_UNREAD * all_pairs and status != "unclear":
            status, headline = "unclear", f"Unclear, as the judge could not be read on too many pairs; {headline}"
            reasons.append(f"more than {MOST_UNREAD:.0%} are left out, and which ones is no chance")
    return {"status": status, "headline": headline, "reasons": reasons}
