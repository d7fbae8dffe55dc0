"""A time budget for the curvature: what would not end in time is left out, or done on fewer pairs, and that is said.

Curvature decides nothing about a reward model, and on a CPU it may take longer than the training. Nothing is predicted
from sizes: each part is begun, and given up as soon as its own pace says that it would end too late.
"""

import time
from collections.abc import Callable

from rmcore.core.progress import Report


class OutOfTime(Exception):
    """A work was given up because it would have ended too late.

    Attributes:
        needed: seconds that it would have taken.
        had: seconds that there were.
    """

    def __init__(self, needed: float, had: float) -> None:
        super().__init__(f"it would have taken about {needed:.0f} s, and {max(0.0, had):.0f} s were left")
        self.needed = needed
        self.had = had


class TimeBudget:
    """Minutes from now on.

    Args:
        minutes: in all; None is no limit.
        clock: seconds, as `time.monotonic`.
    """

    def __init__(self, minutes: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = None if minutes is None else clock() + 60 * minutes

    def kept(self, report: Report, share: float = 1.0) -> Report:
        """`report` of a work that begins now and may take `share` of what is left.

        Reporting raises OutOfTime as soon as the work, at its pace so far, would end too late. The last report of a
        work never does: then it is done, however long it took. A count that begins again is another work.
        """
        if self._end is None:
            return report
        end, began, last, first = self._end, self._clock(), 0, 0.0

        def reporting(done: int, total: int, text: str) -> None:
            nonlocal began, last, first
            report(done, total, text)
            now = self._clock()
            if done <= last:
                began, last = now, done
                return
            if last == 0:
                first = now - began  # builds graphs that are kept for those that follow: no pace
            last = done
            needed = first if done == 1 else first + (now - began - first) * (total - 1) / (done - 1)
            had = share * (end - began)
            if done < total and needed > had:
                raise OutOfTime(needed, had)

        return reporting
