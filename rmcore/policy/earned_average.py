"""Whether an average of weights has earned its place: it must be shown to be no worse than the best of its members.

Three things are asked, each by the 95 % interval over prompts of what is measured, against a tolerance that is said
before: no barrier on the ways to the members, pairwise accuracy, and the win rate of best-of-n where prompts have
several labelled answers. Not to be shown worse is not enough, because too few pairs show nothing. All must pass, so
each may be tested at its own level: an average that is worse by more than the tolerance in any of them passes with a
chance of at most 2.5 % (intersection-union test, Berger 1982, Technometrics 24(4)).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd

from rmcore.core.arrays import FloatArray
from rmcore.core.errors import DataError
from rmcore.evaluation.uncertainty import cluster_bootstrap, metric_value
from rmcore.landscape.paths import MemberPath
from rmcore.policy.logged_answers import MIN_PROMPTS, connected_answers
from rmcore.policy.sampling.best_of_n import best_of_n_win_rate
from rmcore.reporting.figures.numbers import interval, text


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How much worse than the best member an average may be, at the far end of the interval."""

    share: float
    """Share of pairwise accuracy and of the win rate of best-of-n."""
    height: float
    """Nats a pair of the loss on the ways to the members, above their own losses."""


@dataclass(frozen=True, slots=True)
class Check:
    """One of the questions. `passed` is None where the data cannot answer it: that neither earns nor refuses."""

    name: str
    passed: bool | None
    text: str

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready record."""
        return asdict(self)


def compare_best_of(
    tables: Mapping[str, pd.DataFrame], first: str, second: str, n: int, *, num_resamples: int = 1000, seed: int = 0
) -> dict[str, Any]:
    """Win rates of the best of n by several models among the same logged answers, and a paired difference of two.

    The labels judge the choice against one more answer of the prompt, as in `rmcore.policy.logged_answers`.

    Args:
        tables: of each model by name, as `logged_table` makes them, of the same pairs.
        first: model whose win rate the difference begins with.
        second: model whose win rate is taken from it.
        n: answers that are chosen from; a prompt takes part with more than n connected answers.
        num_resamples: of the bootstrap over prompts.
        seed: of the bootstrap.

    Returns:
        JSON-ready: n, num_prompts, and either win_rate (by model) and difference, each with its interval, or `reason`:
        fewer than `MIN_PROMPTS` prompts have so many answers.

    Raises:
        DataError: the tables are not of the same answers, or one is unusable.
    """
    pools = {name: [pool for pool, _ in connected_answers(table)] for name, table in tables.items()}
    answers = {name: [(pool.prompt_id, *pool.lengths) for pool in own] for name, own in pools.items()}
    if any(one != answers[first] for one in answers.values()):
        raise DataError(
            "the models were not scored on the same answers, so their choices cannot be compared. Score all of them on "
            "the same pairs."
        )
    entering = {
        name: [pool for pool in own if len(pool.strength) > n and np.ptp(pool.strength) > 0]
        for name, own in pools.items()
    }
    units, unit = np.unique([pool.prompt_id for pool in entering[first]], return_inverse=True)
    record: dict[str, Any] = {"n": n, "num_prompts": len(unit)}
    if len(units) < MIN_PROMPTS:
        reason = f"prompts with more than {n} connected labelled answers: {len(units)}, and a claim needs {MIN_PROMPTS}"
        return record | {"reason": reason}
    counts = np.bincount(unit).astype(np.float64)
    sums = {
        name: np.bincount(unit, [best_of_n_win_rate(pool.rewards, pool.strength, n) for pool in own])
        for name, own in entering.items()
    }

    def compute(weights: FloatArray) -> dict[str, FloatArray]:
        rates = {f"of {name}": weights @ summed / (weights @ counts) for name, summed in sums.items()}
        return rates | {"difference": rates[f"of {first}"] - rates[f"of {second}"]}

    drawn = cluster_bootstrap(compute, len(units), num_resamples=num_resamples, seed=seed)

    def value(name: str) -> dict[str, Any]:
        return metric_value(
            drawn.point[name],
            drawn.replicates.get(name),
            num_prompts=len(units),
            num_pairs=len(unit),
            is_share=name != "difference",
            is_difference=name == "difference",
        ).to_dict()

    return record | {"win_rate": {name: value(f"of {name}") for name in sums}, "difference": value("difference")}


def checks_of(
    paths: Sequence[MemberPath],
    accuracy_difference: Mapping[str, Any],
    best_of: Mapping[str, Any],
    best: str,
    tolerance: Tolerance,
) -> list[Check]:
    """Answer the three questions.

    Args:
        paths: ways from the average to its members.
        accuracy_difference: pairwise accuracy of the average minus that of the best member, with its interval.
        best_of: as `compare_best_of` returns it, of the average and the best member.
        best: name of that member.
        tolerance: how much worse is still no worse.
    """
    rates = (
        Check("best of n", None, f"best-of-{best_of['n']} win rate cannot be measured: {best_of['reason']}")
        if "reason" in best_of
        else _no_worse(f"best-of-{best_of['n']} win rate", best_of["difference"], best, tolerance.share)
    )
    return [
        _no_barrier(paths, tolerance.height),
        _no_worse("pairwise accuracy", accuracy_difference, best, tolerance.share),
        rates,
    ]


def _no_barrier(paths: Sequence[MemberPath], tolerance: float) -> Check:
    """The highest place by the upper end of its interval; one without an interval is higher than any."""
    places = [(path.name, value) for path in paths for value in path.height]
    name, highest = max(places, key=lambda place: np.inf if place[1].ci_high is None else place[1].ci_high)
    where = f"on the way to {name}"
    if highest.ci_high is None or highest.ci_low is None:
        return Check("barrier", False, f"barrier: the loss {where} has no interval ({highest.reason})")
    bounds = f"{highest.value:+.4f} nats a pair (95 %: {highest.ci_low:+.4f} to {highest.ci_high:+.4f})"
    said = f"the loss {where} lies {bounds} above the members' own, at its highest place; allowed: {tolerance:g}"
    if highest.ci_high <= tolerance:
        return Check("barrier", True, f"no barrier: {said}")
    shown = "a barrier" if highest.ci_low > tolerance else "a barrier is not excluded"
    return Check("barrier", False, f"{shown}: {said}")


def _no_worse(what: str, difference: Mapping[str, Any], best: str, tolerance: float) -> Check:
    low, high = difference["ci_low"], difference["ci_high"]
    if low is None or high is None:
        return Check(what, False, f"{what}: the difference to {best} has no interval ({difference['reason']})")
    bounds = f"{text(difference['value'], 'points')} (95 %: {interval(difference, 'points')})"
    said = f"{what} minus that of {best}, the best member: {bounds}; allowed: {text(-tolerance, 'points')}"
    if low >= -tolerance:
        return Check(what, True, f"no worse: {said}")
    return Check(what, False, f"{'worse' if high < 0 else 'not shown to be no worse'}: {said}")
