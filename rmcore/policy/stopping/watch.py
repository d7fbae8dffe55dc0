"""The watch over a policy in training: looks at its gold gain with few labels, and what follows from each.

At a look the newest checkpoint is compared with an earlier one by a judge, on prompts that nobody used before. Three
bets are settled with every judged pair:

- gained: that the newest is better than the earlier one;
- stopped: that it is better than one of half its distance or less by less than a useful gain;
- turned: that it is worse. The hypothesis is that gold never falls, so a plateau is no alarm.

Each by itself is wrong at most with the chance `level` in the whole training, at any number of looks (`bets`): stakes
are made before the responses of a look are drawn, from earlier judgements, by a bound that does not depend on them.

Where the reward model may be refreshed, gold that has turned or stopped does that instead of ending the training, which
continues from the best checkpoint, against a reward model that was trained further on all that was judged. The bets
that gold has stopped or turned begin anew then, each at its share of the level, about the policy's way from that
checkpoint alone: what an earlier reward model has spoilt is no evidence against this one.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from rmcore.config.rlhf import WatchConfig
from rmcore.policy.stopping.bets import Bet
from rmcore.policy.stopping.chosen_pairs import Chosen, PairChooser
from rmcore.policy.stopping.gain_curve import GainCurve

Action = Literal["go_on", "lower_kl", "refresh", "stop"]
CAUTIOUS = 0.5
"""Standard deviations by which the gain of what is kept is taken lower than expected."""
FIRST_SPREAD, FIRST_WEIGHT = 1.5, 8.0
"""Variance of a group's value before any is known, two responses differing by about sqrt(2) standard deviations less
what the reward model explains, and the judged pairs that this guess counts for."""
FAR_BACK = 0.5
"""Share of the newest checkpoint's KL that an earlier one has at most, to show that gold has stopped gaining: close
neighbours are always alike."""
AFTER_FEWEST = 2
"""Checkpoints against a reward model before gold can be said to have stopped."""
FEWEST_TO_LEARN = 32
"""Judged pairs that a reward model is refreshed with at least: three quarters of them are trained on, the others say
whether it has helped."""


@dataclass(frozen=True)
class Look:
    """Record of a look: how it compared, the evidence after it, and what follows.

    number: of the checkpoint, from 1.
    step: of the policy.
    kl: nats from the start policy.
    reference: number of the checkpoint that it was compared with.
    num_pairs: judged.
    difference: mean of the groups' values, and its standard error.
    gained, stopped, turned: evidence for each, in nats; `needed` convinces that it has turned, `needed_to_stop` that it
        has stopped.
    best: number of the checkpoint that would be kept now.
    gains: mean and standard deviation of each checkpoint's gain over the start, as far as is known.
    action: what to do, and why.
    """

    number: int
    step: int
    kl: float
    reference: int
    num_pairs: int
    difference: float
    error: float
    gained: float
    stopped: float
    turned: float
    needed: float
    needed_to_stop: float
    best: int
    gains: list[tuple[float, float]]
    action: Action
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


class Watch:
    """Keeps the evidence of one training.

    Args:
        settings: labels, level, useful gain.
        num_looks: that are planned, among which the labels are shared.
        limit: size that a judged difference has at most.
        labels_per_pair: that the judge takes.
        unit: of a difference, in words.
        can_lower_kl: whether a KL penalty can be raised.
        can_refresh: whether the reward model can be refreshed, `settings.refreshes` times.
    """

    def __init__(
        self,
        settings: WatchConfig,
        *,
        num_looks: int,
        limit: float,
        labels_per_pair: int = 2,
        unit: str = "sd",
        can_lower_kl: bool = False,
        can_refresh: bool = False,
    ) -> None:
        self.settings, self.num_looks, self.unit, self.can_lower_kl = settings, num_looks, unit, can_lower_kl
        self.labels_per_pair = labels_per_pair
        self.curve = GainCurve()
        self.chooser = PairChooser(limit, settings.candidates)
        self.refreshes_left = settings.refreshes if can_refresh else 0
        self.labels_used = 0
        self.prompts_used = 0
        self.kept = [0]
        """Numbers of the checkpoints whose weights are still there."""
        self.steps = [0]
        self.kls = [0.0]
        self._gained = Bet(0.0, "above", settings.level / 2)
        # One share of the level for each reward model that there may be; and two bets that gold has stopped where the
        # first only lowers the distance. All of a question's together are wrong with the chance `level` at most.
        self._share = settings.level / (self.refreshes_left + 1)
        self._stopped, self._turned = self._begun()
        self._spread, self._weight = FIRST_SPREAD, FIRST_WEIGHT
        self._lowered = False
        self._unlearned = 0
        """Pairs since the last refresh from which a reward model can learn."""
        self._reference, self._known = 0, (0.0, 0.0)
        self._values: list[float] = []

    def begin(self, step: int, kl: float, reference: int | None = None) -> int:
        """Begin a look at a new checkpoint; the number of the earlier one to compare it with.

        Args:
            step: of the policy.
            kl: nats from the start.
            reference: that an earlier call gave for this look; None: it is chosen.
        """
        self.curve.add_checkpoint(kl)
        self._values = []
        self.steps.append(step)
        self.kls.append(kl)
        origin, last_before = self.curve.present_branch
        on_the_way = [one for one in self.kept if one == origin or one > last_before]
        self._reference = self.curve.telling_reference(on_the_way) if reference is None else reference
        self._known = self.curve.difference(len(self.curve) - 1, self._reference)
        return self._reference

    def num_pairs(self) -> int:
        """Pairs that the next look may have judged: an equal share of the labels that are left."""
        looks_left = max(1, self.num_looks - (len(self.curve) - 1))
        return (self.settings.labels - self.labels_used) // (self.labels_per_pair * looks_left)

    def see(self, chosen: Chosen, number: int, difference: float, *, teaches: bool = True) -> bool:
        """Take up the judgement of group `number`: the newest checkpoint's response less the earlier one's.

        Args:
            chosen: the groups of this look.
            number: of the group.
            difference: as judged.
            teaches: whether a reward model can be trained on this pair.

        Returns:
            Whether more judgements can still change what follows: not where gold has turned, unless the reward model is
            to learn from them.
        """
        newest = len(self.curve) - 1
        value = chosen.value(number, difference)
        expected, unsure = self._known
        if self._values:  # what this look has seen so far counts as well
            share = unsure / (unsure + self._spread / len(self._values))
            expected += share * (float(np.mean(self._values)) - expected)
            unsure *= 1 - share
        origin, last_before = self.curve.present_branch
        near, far = (self.kls[one] - self.kls[origin] for one in (self._reference, newest))
        may_stop = near <= FAR_BACK * far and newest - last_before > AFTER_FEWEST
        for bet in (self._gained, self._turned, *([self._stopped] if may_stop else [])):
            bet.settle(
                value,
                expected=expected,
                spread=self._spread + unsure,
                low=-self.chooser.bound,
                high=self.chooser.bound,
            )
        self._values.append(value)
        self._unlearned += teaches
        self.labels_used += self.labels_per_pair
        self.chooser.learn(float(chosen.proxy[number]), difference)
        return not self._turned.won or (self._can_refresh and self._unlearned < FEWEST_TO_LEARN)

    @property
    def _can_refresh(self) -> bool:
        return self.refreshes_left > 0 and self.num_looks > len(self.curve) - 1

    def end(self) -> Look:
        """Close the look; what follows."""
        newest, found = len(self.curve) - 1, np.array(self._values)
        self.kept.append(newest)
        if len(found):
            if len(found) > 1:
                apart = float(((found - found.mean()) ** 2).sum())
                self._spread = (self._spread * self._weight + apart) / (self._weight + len(found) - 1)
                self._weight += len(found) - 1
            self.curve.compare(newest, self._reference, float(found.mean()), self._spread / len(found))
        best = self.curve.best(self.kept, CAUTIOUS)
        before = self._gained, self._stopped, self._turned  # what follows may begin them anew
        action, reason = self._decide(best)
        mean, covariance = self.curve.posterior()
        return Look(
            number=newest,
            step=self.steps[-1],
            kl=self.kls[-1],
            reference=self._reference,
            num_pairs=len(found),
            difference=float(found.mean()) if len(found) else float("nan"),
            error=(self._spread / len(found)) ** 0.5 if len(found) else float("nan"),
            gained=before[0].log_wealth,
            stopped=before[1].log_wealth,
            turned=before[2].log_wealth,
            needed=before[2].needed,
            needed_to_stop=before[1].needed,
            best=best,
            gains=[
                (float(one), float(max(var, 0.0) ** 0.5)) for one, var in zip(mean, np.diag(covariance), strict=True)
            ],
            action=action,
            reason=reason,
        )

    def forget(self, most: int) -> None:
        """Drop checkpoints from `kept` that are least likely to be the best until `most` are left.

        The start, the newest and the best stay, and where the way against the present reward model begins.
        """
        mean, covariance = self.curve.posterior()
        hope = mean + np.sqrt(np.maximum(np.diag(covariance), 0.0))
        safe = {0, self.curve.present_branch[0], self.kept[-1], self.curve.best(self.kept, CAUTIOUS)}
        gone = sorted((one for one in self.kept if one not in safe), key=lambda one: float(hope[one]))
        gone = gone[: max(0, len(self.kept) - most)]
        self.kept = [one for one in self.kept if one not in gone]

    def _begun(self) -> tuple[Bet, Bet]:
        """Bets that gold has stopped, and that it has turned, against the reward model in use."""
        first = self._share / 2 if self.can_lower_kl else self._share
        return Bet(self.settings.useful_gain, "below", first), Bet(0.0, "below", self._share)

    def _decide(self, best: int) -> tuple[Action, str]:
        at_best = f"step {self.steps[best]}" if best else "the start"
        if self._turned.won:
            return self._end_or_learn("gold has turned: the policy is worse than at an earlier step", best, at_best)
        if self._stopped.won:
            shown = f"it gains less than {self.settings.useful_gain:g} {self.unit} since half of its distance"
            if self.can_lower_kl and not self._lowered:
                self._lowered = True
                self._stopped = self._begun()[0]
                return "lower_kl", f"gold has stopped gaining: {shown}; held at the distance of {at_best}"
            return self._end_or_learn(f"gold has stopped gaining: {shown}", best, at_best)
        if self._gained.won:
            self._gained = Bet(0.0, "above", self._gained.level / 2)  # all of them together: the chance `level`
            return "go_on", "still gaining: shown to be better than an earlier step"
        return "go_on", "nothing is shown yet"

    def _end_or_learn(self, found: str, best: int, at_best: str) -> tuple[Action, str]:
        if not self._can_refresh:
            return "stop", f"{found}; back to {at_best}"
        if self._unlearned < FEWEST_TO_LEARN:
            few = f"{self._unlearned} judged pairs are too few to refresh the reward model with ({FEWEST_TO_LEARN})"
            return "stop", f"{found}; {few}; back to {at_best}"
        reason = f"{found}; back to {at_best}, and on from there: the reward model learns from {self._unlearned} pairs"
        self.refreshes_left -= 1
        self._unlearned = 0
        self._lowered = False
        self._stopped, self._turned = self._begun()
        # What the old reward model was worth says nothing of the new one, and what lies behind the best checkpoint is
        # on the way of no policy any more.
        self.chooser = PairChooser(self.chooser.limit, self.chooser.size)
        self.kept = [number for number in self.kept if number <= best]
        self.curve.branch(best)
        return "refresh", reason

    def to_dict(self) -> dict[str, Any]:
        """Its whole state, JSON-ready, for `restore`."""
        return {
            "curve": self.curve.to_dict(),
            "chooser": self.chooser.to_dict(),
            "labels_used": self.labels_used,
            "prompts_used": self.prompts_used,
            "kept": self.kept,
            "steps": self.steps,
            "kls": self.kls,
            "bets": [(bet.level, bet.log_wealth, bet.won) for bet in (self._gained, self._stopped, self._turned)],
            "spread": [self._spread, self._weight],
            "lowered": self._lowered,
            "refreshes_left": self.refreshes_left,
            "unlearned": self._unlearned,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up the state that `to_dict` gave between two looks."""
        self.curve.restore(state["curve"])
        self.chooser.restore(state["chooser"])
        self.labels_used, self.kept = state["labels_used"], list(state["kept"])
        self.prompts_used = state["prompts_used"]
        self.steps, self.kls = list(state["steps"]), list(state["kls"])
        for bet, kept in zip((self._gained, self._stopped, self._turned), state["bets"], strict=True):
            bet.level, bet.log_wealth, bet.won = kept
        self._spread, self._weight = state["spread"]
        self._lowered = state["lowered"]
        self.refreshes_left, self._unlearned = state["refreshes_left"], state["unlearned"]
