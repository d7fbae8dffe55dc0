"""The watch over a policy in training: looks at its gain of the true reward with few labels, and what follows.

At a look the newest checkpoint is compared with an earlier one by a judge, on prompts that nobody used before. Three
bets are settled with every judged pair:

- gained: that the newest is better than the earlier one;
- stopped: that it is better than one of half its distance or less by less than a useful gain;
- turned: that it is worse. The hypothesis is that the true reward never falls, so a plateau is no alarm.

Each by itself is wrong at most with the chance `LEVEL` in the whole training, at any number of looks (`bets`): stakes
are made before the responses of a look are drawn, from earlier judgements, by a bound that does not depend on them.
A bet needs the bound, so differences are clipped, and where few prompts gain or lose far more a bet is about another
number than the gain. So nothing follows from a bet that was won by fewer differences than would have shown such
prompts, nor where some of them were clipped and the interval of these as they are does not agree (`Staked.agrees`), as
for what is served (`policy.confirmation`). Waiting costs steps of the training: what is kept is chosen by the curve.
"""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from scipy.stats import norm

from rmcore.core.arrays import FloatArray
from rmcore.evaluation.uncertainty import unseen_share
from rmcore.policy.stopping.bets import FEWEST_TO_SHOW, Bet, unclipped_interval

Action = Literal["go_on", "stop"]
CAUTIOUS = 0.5
"""Standard deviations by which the gain of what is kept is taken lower than expected."""
FIRST_SPREAD, FIRST_WEIGHT = 2.0, 8.0
"""Variance of a difference before any is known, two responses differing by about sqrt(2) standard deviations, and the
judged pairs that this guess counts for."""
FAR_BACK = 0.5
"""Share of the newest checkpoint's KL that an earlier one has at most, to show that the true reward has stopped
gaining: close neighbours are always alike."""
LEVEL = 0.05
"""Chance of a false alarm in the whole training, at most: of each of the decisions by itself."""
USEFUL_GAIN = 0.1
"""Gain since half of the distance below which the true reward has stopped gaining: in standard deviations within
prompts, or where people judge in wins less losses a comparison."""
AFTER_FEWEST = 2
"""Checkpoints before the true reward can be said to have stopped."""
SLOPE, BEND, ROUGHNESS, OWN = 1.0, 0.5, 0.4, 0.05
"""Standard deviations expected before anything is judged: of the gain per root of a nat, of its bend per nat, of what
a curve of the two leaves out (an integrated random walk), and of a checkpoint by itself. In units of the start
samples within prompts. Best-of-n and RL follow slope and bend closely: Gao, Schulman and Hilton 2023,
arXiv:2210.10760, eq. 1."""


class GainCurve:
    """The gain along a training, by checkpoint, from comparisons of checkpoints: a smooth curve with its uncertainty.

    No decision's level rests on it. It says which checkpoint a look should compare with, what a bet may expect, and
    which checkpoint to keep; a wrong curve makes these worse, and no false alarm. Checkpoint 0 is the start.
    """

    def __init__(self) -> None:
        self._along: list[float] = [0.0]
        """Way of each checkpoint, in roots of nats."""
        self._roots: list[float] = [0.0]
        self._seen: list[tuple[int, int, float, float]] = []

    def __len__(self) -> int:
        """Checkpoints, with the start."""
        return len(self._along)

    def add_checkpoint(self, kl: float) -> int:
        """Take up the next checkpoint; its number.

        Args:
            kl: nats from the start policy. Where it comes back the path still continues: another policy at the same
                distance need not be as good.
        """
        root = max(kl, 0.0) ** 0.5
        self._along.append(self._along[-1] + abs(root - self._roots[-1]))
        self._roots.append(root)
        return len(self) - 1

    def compare(self, later: int, earlier: int, difference: float, variance: float) -> None:
        """Take up that checkpoint `later` was judged better than `earlier` by `difference`, give or take."""
        self._seen.append((later, earlier, difference, variance))

    def posterior(self) -> tuple[FloatArray, FloatArray]:
        """Mean (K,) and covariance (K, K) of the gains of all checkpoints over the start, whose gain is 0."""
        prior = self._prior()
        mean, covariance = np.zeros(len(self)), np.zeros((len(self), len(self)))
        if not self._seen:
            covariance[1:, 1:] = prior
            return mean, covariance
        later, earlier, difference, noise = (np.array(column) for column in zip(*self._seen, strict=True))
        contrast = np.zeros((len(self._seen), len(self)))
        contrast[np.arange(len(self._seen)), later] += 1
        contrast[np.arange(len(self._seen)), earlier] -= 1
        contrast = contrast[:, 1:]
        gain = prior @ contrast.T @ np.linalg.inv(contrast @ prior @ contrast.T + np.diag(noise))  # (K - 1, looks)
        mean[1:] = gain @ difference
        covariance[1:, 1:] = prior - gain @ contrast @ prior
        return mean, covariance

    def _prior(self) -> FloatArray:
        """Covariance (K - 1, K - 1) of the gains of all checkpoints but the start before anything was judged."""
        along = np.array(self._along)[1:]  # (K - 1,)
        near, far = np.minimum.outer(along, along), np.maximum.outer(along, along)
        return (
            SLOPE**2 * np.outer(along, along)
            + BEND**2 * np.outer(along**2, along**2)
            + ROUGHNESS**2 * (near**2 * far / 2 - near**3 / 6)
            + OWN**2 * np.eye(len(along))
        )

    def difference(self, later: int, earlier: int) -> tuple[float, float]:
        """Mean and variance of the gain of one checkpoint over another, as far as is known."""
        mean, covariance = self.posterior()
        spread = covariance[later, later] + covariance[earlier, earlier] - 2 * covariance[later, earlier]
        return float(mean[later] - mean[earlier]), float(max(spread, 0.0))

    def informative_reference(self, among: list[int]) -> int:
        """The checkpoint that a comparison with the newest one would tell most of, if the true reward has fallen.

        The one with the largest mean square of a fall since it: near neighbours hardly differ, and those that the
        newest is surely above cannot show a fall. (Comparing with the best one so far instead, which is near while
        the true reward still rises, left 10 times the regret in the choice of what to keep:
        benchmarks/results/watch.md.)

        Args:
            among: checkpoints whose weights are still there.
        """
        mean, covariance = self.posterior()
        newest = len(self) - 1
        places = np.array(among)
        rise = mean[newest] - mean[places]
        variance = covariance[newest, newest] + covariance[places, places] - 2 * covariance[newest, places]
        spread = np.sqrt(np.maximum(variance, 1e-12))
        fall = (rise**2 + spread**2) * norm.cdf(-rise / spread) - rise * spread * norm.pdf(rise / spread)
        return int(places[int(np.argmax(fall))])

    def best(self, among: list[int], cautious: float) -> int:
        """The checkpoint with the largest lower bound of its gain over the start.

        Args:
            among: checkpoints whose weights are still there.
            cautious: standard deviations below the mean that the bound lies.
        """
        mean, covariance = self.posterior()
        bound = mean - cautious * np.sqrt(np.maximum(np.diag(covariance), 0.0))
        return among[int(np.argmax(bound[among]))]


@dataclass(frozen=True)
class Look:
    """Record of a look: how it compared, the evidence after it, and what follows.

    number: of the checkpoint, from 1.
    step: of the policy.
    kl: nats from the start policy.
    reference: number of the checkpoint that it was compared with.
    num_pairs: judged.
    difference: mean of the judged ones, and its standard error; None where no judgement could be read.
    gained, stopped, turned: evidence for each, in nats; `needed` convinces that it has turned, or stopped.
    best: number of the checkpoint that would be kept now.
    gains: mean and standard deviation of each checkpoint's gain over the start, as far as is known.
    action: what to do, and why.
    """

    number: int
    step: int
    kl: float
    reference: int
    num_pairs: int
    difference: float | None
    error: float | None
    gained: float
    stopped: float
    turned: float
    needed: float
    best: int
    gains: list[tuple[float, float]]
    action: Action
    reason: str


@dataclass
class Staked:
    """Differences as they were judged on which a bet staked, not clipped, and how many the bet saw clipped.

    limit: size at which they are clipped.
    fewest: values without which nothing is claimed; 0 where differences cannot exceed the limit.
    """

    limit: float
    fewest: int
    values: list[float] = field(default_factory=list)
    num_clipped: int = 0
    _agreed: dict[int, bool] = field(default_factory=dict)
    """By the number of values that it was asked of."""

    def agrees(self, bet: Bet) -> bool:
        """Whether rare prompts far out would have shown, and nothing was clipped, or the mean as it is, is beyond the
        bet's null by its own interval, too.

        The interval is one after each quarter of `fewest` values, so that it is asked a few times and not after each
        value, when chance would make it agree at some time.
        """
        count = len(self.values)
        if count < self.fewest:
            return False
        if not self.num_clipped:
            return True
        count -= count % max(1, self.fewest // 4)
        if count not in self._agreed:
            low, high = unclipped_interval(self.values[:count], self.limit, num_resamples=2000)
            self._agreed[count] = low > bet.null if bet.side == "above" else high < bet.null
        return self._agreed[count]

    def doubt(self, what: str) -> str:
        """Say why it is unclear whether the true reward did `what`."""
        if (count := len(self.values)) < self.fewest:
            return (
                f"unclear whether the true reward has {what}: {count} judged pairs say so, and leave room for "
                f"{100 * unseen_share(count):.2g} % of all prompts that gain or lose far more and would turn the mean; "
                f"{self.fewest} are wanted"
            )
        return (
            f"unclear whether the true reward has {what}: {self.num_clipped} of the {len(self.values)} differences "
            f"that say so are clipped, and as they are their mean is {np.mean(self.values):+.2g}"
        )


class Watch:
    """Keeps the evidence of one training; the same pairs and judgements give the same evidence again.

    Args:
        pairs: that may be judged, at most, each on a prompt of its own: further labels of a prompt tell of that prompt
            again, and bets on them are won by what its first ones showed.
        num_looks: that are planned, among which the pairs are shared.
        limit: size at which a judged difference is clipped.
        unit: of a difference, in words.
        useful_gain: over a checkpoint of half the distance; less of it is none, in the same unit.
        is_clipped: whether differences may be larger than the limit; not where they are wins and losses.
    """

    def __init__(
        self,
        pairs: int,
        *,
        num_looks: int,
        limit: float,
        unit: str = "sd",
        useful_gain: float = USEFUL_GAIN,
        is_clipped: bool = True,
    ) -> None:
        self.pairs, self.num_looks, self.limit, self.unit = pairs, num_looks, limit, unit
        self.useful_gain = useful_gain
        self.curve = GainCurve()
        self.pairs_asked = 0
        """In all looks that were begun."""
        self.pairs_judged = 0
        self.kept = [0]
        """Numbers of the checkpoints whose weights are still there."""
        self.steps = [0]
        self.kls = [0.0]
        self._gained = Bet(0.0, "above", LEVEL / 2)
        self._fewest = FEWEST_TO_SHOW if is_clipped else 0
        self._staked = {name: self._none_staked() for name in ("gained", "stopped", "turned")}
        self._stopped, self._turned = Bet(useful_gain, "below", LEVEL), Bet(0.0, "below", LEVEL)
        self._spread, self._weight = FIRST_SPREAD, FIRST_WEIGHT
        self._reference, self._known = 0, (0.0, 0.0)
        self._values: list[float] = []

    def begin(self, step: int, kl: float, reference: int | None = None) -> tuple[int, int]:
        """Begin a look at a new checkpoint: the number of the earlier one to compare it with, and of pairs to judge.

        The pairs are an equal share of those that are left.

        Args:
            step: of the policy.
            kl: nats from the start.
            reference: that an earlier call gave for this look; None: it is chosen.
        """
        num_pairs = (self.pairs - self.pairs_asked) // max(1, self.num_looks - (len(self.curve) - 1))
        self.pairs_asked += num_pairs
        self.curve.add_checkpoint(kl)
        self._values = []
        self.steps.append(step)
        self.kls.append(kl)
        self._reference = self.curve.informative_reference(self.kept) if reference is None else reference
        self._known = self.curve.difference(len(self.curve) - 1, self._reference)
        return self._reference, num_pairs

    def see(self, judged: float) -> bool:
        """Take up a judged difference: the newest checkpoint's response less the earlier one's, not clipped.

        Returns:
            Whether more judgements can still change what follows: not where the true reward has turned.
        """
        newest = len(self.curve) - 1
        value = min(max(judged, -self.limit), self.limit)
        expected, unsure = self._known
        if self._values:  # what this look has seen so far counts as well
            share = unsure / (unsure + self._spread / len(self._values))
            expected += share * (float(np.mean(self._values)) - expected)
            unsure *= 1 - share
        may_stop = self.kls[self._reference] <= FAR_BACK * self.kls[newest] and newest > AFTER_FEWEST
        bets = {"gained": self._gained, "turned": self._turned} | ({"stopped": self._stopped} if may_stop else {})
        for name, bet in bets.items():
            before = bet.log_wealth
            bet.settle(value, expected=expected, spread=self._spread + unsure, low=-self.limit, high=self.limit)
            if bet.log_wealth != before:
                self._staked[name].values.append(judged)
                self._staked[name].num_clipped += judged != value
        self._values.append(value)
        self.pairs_judged += 1
        return not self._won("turned", self._turned)

    def _won(self, name: str, bet: Bet) -> bool:
        return bet.won and self._staked[name].agrees(bet)

    def end(self) -> Look:
        """Close the look; what follows."""
        newest, values = len(self.curve) - 1, np.array(self._values)
        self.kept.append(newest)
        if len(values):
            if len(values) > 1:
                apart = float(((values - values.mean()) ** 2).sum())
                self._spread = (self._spread * self._weight + apart) / (self._weight + len(values) - 1)
                self._weight += len(values) - 1
            self.curve.compare(newest, self._reference, float(values.mean()), self._spread / len(values))
        best = self.curve.best(self.kept, CAUTIOUS)
        gained = self._gained.log_wealth  # what follows may begin it again
        action, reason = self._decide(best)
        mean, covariance = self.curve.posterior()
        return Look(
            number=newest,
            step=self.steps[-1],
            kl=self.kls[-1],
            reference=self._reference,
            num_pairs=len(values),
            difference=float(values.mean()) if len(values) else None,
            error=(self._spread / len(values)) ** 0.5 if len(values) else None,
            gained=gained,
            stopped=self._stopped.log_wealth,
            turned=self._turned.log_wealth,
            needed=self._turned.needed,
            best=best,
            gains=[
                (float(gain), float(max(var, 0.0) ** 0.5)) for gain, var in zip(mean, np.diag(covariance), strict=True)
            ],
            action=action,
            reason=reason,
        )

    def forget(self, most: int) -> None:
        """Drop checkpoints from `kept` that are least likely to be the best until `most` are left.

        The start, the newest and the best stay.
        """
        mean, covariance = self.curve.posterior()
        hope = mean + np.sqrt(np.maximum(np.diag(covariance), 0.0))
        safe = {0, self.kept[-1], self.curve.best(self.kept, CAUTIOUS)}
        gone = sorted((number for number in self.kept if number not in safe), key=lambda number: float(hope[number]))
        gone = gone[: max(0, len(self.kept) - most)]
        self.kept = [number for number in self.kept if number not in gone]

    def _none_staked(self) -> Staked:
        return Staked(self.limit, self._fewest)

    def _decide(self, best: int) -> tuple[Action, str]:
        at_best = f"step {self.steps[best]}" if best else "the start"
        if self._won("turned", self._turned):
            return "stop", f"the true reward has turned: the policy is worse than at an earlier step; back to {at_best}"
        if self._won("stopped", self._stopped):
            less = f"it gains less than {self.useful_gain:g} {self.unit} since half of its distance"
            return "stop", f"the true reward has stopped gaining: {less}; back to {at_best}"
        for name, what, bet in (("turned", "turned", self._turned), ("stopped", "stopped gaining", self._stopped)):
            if bet.won:
                return "go_on", self._staked[name].doubt(what)
        if self._won("gained", self._gained):
            self._staked["gained"] = self._none_staked()
            self._gained = Bet(0.0, "above", self._gained.level / 2)  # all of them together: the chance `LEVEL`
            return "go_on", "still gaining: shown to be better than an earlier step"
        return "go_on", "nothing is shown yet"
