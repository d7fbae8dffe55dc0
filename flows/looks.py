"""The looks of an experiment as they are taken: written down, told, and ended where there is none left."""

from collections.abc import Sequence

from experiments.schema import Experiment
from flows.console import say
from flows.schedules import pause_own_schedule
from rmcore.reporting.experiment_schema import HypothesisResult, Registration
from rmcore.study.analysis import LooksTaken
from rmcore.study.registration import record_look


def register_look(declared: Experiment, registration: Registration, key: str, number: int, taken: LooksTaken) -> bool:
    """Write a look down and say what it decided; whether it is new."""
    if not declared.looks:
        return False
    num_seeds = declared.looks[number - 1]
    kept = ("name", "verdict", "value", "ci_low", "ci_high", "p", "p_holm", "closed")
    claims = [{name: value for name, value in one.items() if name in kept} for one in taken.results]
    is_new = record_look(registration, key, {"num_seeds": num_seeds, "open": list(taken.open), "claims": claims})
    say(f"look {number} of {len(declared.looks)}, {num_seeds} seeds: {_told(taken.results, taken.open)}")
    return is_new


def end_of_looks(declared: Experiment) -> None:
    """Say that no look is left, and pause the schedule that started this run."""
    if not declared.looks:
        return
    say("no look is left: every claim is decided, closed, or has had all of its seeds")
    if pause_own_schedule():
        say("paused the schedule that started this run: there is nothing left to look at")


def _told(results: Sequence[HypothesisResult], still_open: Sequence[str]) -> str:
    verdicts = [f"{one['name']} {one['verdict']}" for one in results if one["verdict"] != "inconclusive"]
    closed = [one["name"] for one in results if one["verdict"] == "inconclusive" and one["closed"]]
    parts = [", ".join(verdicts), f"closed undecided: {', '.join(closed)}" if closed else ""]
    parts += [f"open: {', '.join(still_open)}" if still_open else "none open"]
    return "; ".join(part for part in parts if part)
