"""Is the watch over a policy's training right, and what does it save? Simulated trainings of known gold gain.

    python benchmarks/stopping_rules.py --runs 200

False alarms where gold does not turn, what is lost where it does, labels, beside a fixed schedule: at every look the
same number of pairs, chosen at random, each checkpoint against the one of half its distance, and z tests of both
questions on them, whose bound is simulated so that each has the watch's false alarms (the strongest such schedule).
Its pairs a look are raised until it ends as many of the trainings in which gold turns.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rmcore.config.rlhf import WatchConfig
from rmcore.evaluation.calibration import wilson
from rmcore.policy.stopping.gain_curve import GainCurve
from rmcore.policy.stopping.watch import AFTER_FEWEST, CAUTIOUS, FAR_BACK, Watch

LOOKS = 20
LIMIT = 3.0
Gain = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class World:
    """A training whose truth is known.

    name: as the table says it.
    gain: of the distance in nats: gold over the start, in sd within prompts.
    turns: whether gold falls.
    furthest: nats at the last look.
    follows: correlation of the judge's and the reward's difference of two responses.
    """

    name: str
    gain: Gain
    turns: bool
    furthest: float = 6.0
    follows: float = 0.7


def gao(peak_at: float, peak: float) -> Gain:
    """Gao, Schulman and Hilton 2023, best-of-n: d (a - b d) of the root of the nats."""
    return lambda kl: peak * (2 * np.sqrt(kl / peak_at) - kl / peak_at)


def crash(at: float, peak: float, slope: float) -> Gain:
    """Up by the root, and from a point on straight down: no smooth curve."""
    return lambda kl: np.where(kl <= at, peak * np.sqrt(kl / at), peak - slope * (kl - at))


WORLDS = (
    World("flat: nothing is ever gained", lambda kl: 0 * kl, False),
    World("flat, and the reward follows nothing", lambda kl: 0 * kl, False, follows=0.0),
    World("gains, then a plateau from 1 nat on", lambda kl: 0.4 * np.sqrt(np.minimum(kl, 1.0)), False),
    World("gains to the end", lambda kl: 0.25 * np.sqrt(kl), False),
    World("gains and saturates", lambda kl: 0.5 * (1 - np.exp(-kl / 1.5)), False),
    World("turns at 1 nat, smoothly", gao(1.0, 0.4), True),
    World("turns at 2 nats, smoothly", gao(2.0, 0.5), True),
    World("turns at 1 nat, the reward follows little", gao(1.0, 0.4), True, follows=0.3),
    World("crashes from 1.5 nats on", crash(1.5, 0.4, 0.25), True),
    World("falls from the start", lambda kl: -0.3 * np.sqrt(kl), True),
)


def responses(
    world: World, rise: float, shape: tuple[int, int], rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Judged differences and the reward's: prompts differ in the rise, responses within prompts."""
    uneven = rng.lognormal(0.0, 0.5, shape)
    noise = rng.standard_normal(shape) * np.sqrt(2)
    own = rng.standard_normal(shape) * np.sqrt(2) * uneven / np.sqrt(np.exp(0.5))
    judged = rise * (1 + 0.5 * rng.standard_normal(shape)) + world.follows * noise
    judged = judged + np.sqrt(1 - world.follows**2) * own
    return np.clip(judged, -LIMIT, LIMIT), noise + 0.3 * abs(rise)


@dataclass(frozen=True)
class Outcome:
    """One training: the look that ended it (None: its steps did), labels, gold of the end and of what is kept."""

    stopped_at: int | None
    turned: bool
    labels: int
    kept: int
    truth: np.ndarray

    @property
    def lost(self) -> float:
        """Gold of the best checkpoint until the end less that of the kept one."""
        return float(self.truth.max() - self.truth[self.kept])


def distances(world: World, rng: np.random.Generator) -> np.ndarray:
    """Nats of checkpoints 0 to `LOOKS`, measured with noise."""
    steps = np.linspace(0, 1, LOOKS + 1) ** 1.2
    return world.furthest * steps * np.exp(0.05 * rng.standard_normal(LOOKS + 1))


def watched(world: World, settings: WatchConfig, seed: int) -> Outcome:
    """One training under the watch; gold that has stopped gaining ends it too."""
    rng = np.random.default_rng(seed)
    kls = distances(world, rng)
    truth = np.asarray(world.gain(kls), dtype=float)
    watch = Watch(settings, num_looks=LOOKS, limit=LIMIT)
    for number in range(1, LOOKS + 1):
        shape = (watch.num_pairs(), settings.candidates)
        reference = watch.begin(number, float(kls[number]))
        judged, proxy = responses(world, truth[number] - truth[reference], shape, rng)
        chosen = watch.chooser.choose(proxy, rng)
        for group, place in enumerate(chosen.places):
            if not watch.see(chosen, group, float(judged[group, int(place)])):
                break
        look = watch.end()
        if look.action == "stop":
            return Outcome(number, "turned" in look.reason, watch.labels_used, look.best, truth)
    return Outcome(None, False, watch.labels_used, look.best, truth)


def scheduled(world: World, pairs: int, bound: float, seed: int) -> Outcome:
    """One training under the fixed schedule."""
    rng = np.random.default_rng(seed)
    kls = distances(world, rng)
    truth = np.asarray(world.gain(kls), dtype=float)
    curve, useful = GainCurve(), WatchConfig().useful_gain
    for number in range(1, LOOKS + 1):
        curve.add_checkpoint(float(kls[number]))
        reference = max(one for one in range(number) if one == 0 or kls[one] <= FAR_BACK * kls[number])
        judged, _ = responses(world, truth[number] - truth[reference], (pairs, 1), rng)
        mean, error = float(judged.mean()), float(judged.std(ddof=1)) / pairs**0.5
        curve.compare(number, reference, mean, error**2)
        turned, stopped = mean / error < bound, (mean - useful) / error < bound and number > AFTER_FEWEST
        if turned or stopped:
            return Outcome(number, turned, 2 * pairs * number, curve.best(list(range(number + 1)), CAUTIOUS), truth)
    return Outcome(None, False, 2 * pairs * LOOKS, curve.best(list(range(LOOKS + 1)), CAUTIOUS), truth)


def bound_of(pairs: int, runs: int, level: float) -> float:
    """The z below which the schedule stops falsely in `level` of the trainings on a plateau."""
    rng = np.random.default_rng(0)
    lowest = []
    for _ in range(max(runs, 400)):
        drawn, _ = responses(WORLDS[0], 0.0, (LOOKS, pairs), rng)
        lowest.append((drawn.mean(axis=1) / (drawn.std(axis=1, ddof=1) / pairs**0.5)).min())
    return float(np.quantile(lowest, level))


def share(hits: int, runs: int) -> str:
    """A share with its 95 % interval (Wilson)."""
    low, high = wilson(hits / runs, runs)
    return f"{hits / runs:.1%} ({low:.1%} to {high:.1%})"


def mean_of(values: list[float]) -> str:
    """A mean with its 95 % interval."""
    array = np.array(values)
    half = 1.96 * array.std(ddof=1) / len(array) ** 0.5
    return f"{array.mean():.3f} ({array.mean() - half:.3f} to {array.mean() + half:.3f})"


def main() -> None:
    """Print one row a world."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--labels", type=int, default=600)
    parser.add_argument("--candidates", type=int, default=WatchConfig().candidates)
    parser.add_argument("--out", type=Path, help="JSON of all outcomes")
    parser.add_argument("--schedule", action="store_true", help="also the fixed schedule of equal power")
    given = parser.parse_args()
    rows = []
    print(
        "| training | ended as turned | ended as stopped | at look | labels | lost by what is kept, sd | within 0.05 |"
    )
    print("| --- | --- | --- | ---: | ---: | --- | --- |")
    for number, world in enumerate(WORLDS):
        settings = WatchConfig(labels=given.labels, candidates=given.candidates)
        found = [watched(world, settings, 1000 * number + run) for run in range(given.runs)]
        turned = sum(one.turned for one in found)
        ended = sum(one.stopped_at is not None and not one.turned for one in found)
        labels = float(np.mean([one.labels for one in found]))
        at = float(np.median([one.stopped_at or LOOKS for one in found]))
        lost = [one.lost for one in found]
        print(
            f"| {world.name} | {share(turned, given.runs)} | {share(ended, given.runs)} | {at:.0f} | {labels:.0f} | "
            f"{mean_of(lost)} | {share(sum(one <= 0.05 for one in lost), given.runs)} |",
            flush=True,
        )
        row = {"world": world.name, "turned": turned, "ended": ended, "labels": labels, "lost": lost}
        if given.schedule and world.turns:
            row["schedule"] = equal_power(world, turned + ended, given.runs, 1000 * number)
        rows.append(row)
    if given.out:
        given.out.write_text(json.dumps(rows))


def equal_power(world: World, ended: int, runs: int, first: int) -> dict[str, float]:
    """The cheapest fixed schedule that ends as many trainings; printed."""
    for pairs in (8, 12, 16, 24, 32, 48, 64, 96, 128, 192):
        bound = bound_of(pairs, runs, WatchConfig().level)
        found = [scheduled(world, pairs, bound, first + run) for run in range(runs)]
        hits = sum(one.stopped_at is not None for one in found)
        if hits >= ended:
            labels = float(np.mean([one.labels for one in found]))
            lost = [one.lost for one in found]
            at = float(np.median([one.stopped_at or LOOKS for one in found]))
            inside = share(sum(one <= 0.05 for one in lost), runs)
            print(
                f"| · fixed schedule, {pairs} pairs a look | ended in all: {share(hits, runs)} | | {at:.0f} | "
                f"{labels:.0f} | {mean_of(lost)} | {inside} |",
                flush=True,
            )
            return {"pairs": pairs, "labels": labels, "ended": hits}
    print("| · no fixed schedule of up to 192 pairs a look ends as many | | | | | | |", flush=True)
    return {}


if __name__ == "__main__":
    main()
