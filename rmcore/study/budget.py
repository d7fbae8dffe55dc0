"""A search's budget: how long one trial and the confirmation take, what is left for trials, and what is refused."""

import re
from dataclasses import dataclass

from rmcore.core.errors import ConfigError
from rmcore.core.progress import duration
from rmcore.study.rungs import expected_share

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h)")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def parse_duration(text: str) -> float:
    """Read a length of time such as 90s, 60m or 1.5h in seconds.

    Raises:
        ConfigError: it is written otherwise, or is 0.

    >>> parse_duration("1.5h")
    5400.0
    """
    found = _DURATION.fullmatch(text.strip())
    seconds = 0.0 if found is None else float(found[1]) * _SECONDS[found[2]]
    if seconds <= 0:
        raise ConfigError(f"a budget of {text!r} is no length of time; write 90s, 60m or 1.5h.")
    return seconds


@dataclass(frozen=True, slots=True)
class Times:
    """Expected wall seconds of the stages of the defaults."""

    prepare: float
    train: float
    evaluate: float


@dataclass(frozen=True, slots=True)
class Budget:
    """Time that a search may take, the confirmation included.

    Args:
        seconds: all of it, over all runs of the search.
        times: of the defaults.
        num_seeds: fresh seeds of the confirmation.
        devices: cells that run at once without slowing one another down.
    """

    seconds: float
    times: Times
    num_seeds: int
    devices: int = 1

    @property
    def first(self) -> float:
        """Seconds of the first trial: the data are prepared, and it runs to its end."""
        return self.times.prepare + self.times.train

    def confirmation(self, winner: float | None = None) -> float:
        """Seconds of the confirmation, where a training of the winner takes so many; None: as long as the defaults."""
        trained = self.times.train + (self.times.train if winner is None else winner)
        of_seed = self.times.prepare + trained + 2 * self.times.evaluate
        return self.num_seeds * of_seed / self.devices

    def check(self) -> None:
        """Refuse a budget in which not even one trial fits.

        Raises:
            ConfigError: one trial and the confirmation take longer.
        """
        least = self.first + self.confirmation()
        if self.seconds < least:
            raise ConfigError(
                f"a budget of {duration(self.seconds)} is below one trial and the confirmation: the first trial takes "
                f"about {duration(self.first)}, and {self.num_seeds} fresh seeds of the winner and the defaults "
                f"{duration(self.confirmation())}. Give at least {duration(least)}, fewer seeds or shorter trainings; "
                "nothing was run."
            )

    def num_trials(self) -> tuple[int, int]:
        """How many trials fit: if all run to their end, and if two thirds are given up at each rung."""
        left = (self.seconds - self.confirmation() - self.times.prepare) * self.devices
        if self.times.train <= 0:
            return 1, 1
        whole = max(0, int(left / self.times.train))
        halved = 1 + max(0, int((left - self.times.train) / (self.times.train * expected_share())))
        return whole, max(whole, halved if whole else 0)

    def fits(self, spent: float, trial: float | None = None, winner: float | None = None) -> bool:
        """Whether another trial fits beside the confirmation.

        Args:
            spent: seconds so far.
            trial: that a trial takes which is not given up, as measured; None: as long as the defaults.
            winner: that the best one took.
        """
        needed = (self.times.train if trial is None else trial) + self.confirmation(winner)
        return spent + needed <= self.seconds
