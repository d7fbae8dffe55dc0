"""The looks of an experiment: which cells the next one needs, what it decided, and when there is none left."""

from collections.abc import Mapping, Sequence

from prefect import runtime

from experiments.schema import Experiment
from flows.console import say
from flows.prefect_client import pause_schedules
from rmcore.reporting.experiment_schema import HypothesisResult, Registration
from rmcore.study.analysis import Cells, LooksTaken, judge_hypotheses, resolve
from rmcore.study.plan import CellPlan
from rmcore.study.registration import record_look


def judged(declared: Experiment, cells: Cells, taken: int) -> LooksTaken:
    """The claims after the first `taken` looks."""
    control = declared.arm_name(declared.control)
    return judge_hypotheses(
        declared.claims(), cells, declared.seeds, control=control, looks=declared.looks, taken=taken
    )


def cells_of_look(
    declared: Experiment, plans: Sequence[CellPlan], number: int, still_open: Sequence[str]
) -> list[CellPlan]:
    """The cells that a look needs: of all arms at the first one, then of those that an open claim is about.

    Args:
        declared: the experiment.
        plans: all of its cells.
        number: of the look, from 1.
        still_open: claims that are open after the look before.
    """
    seeds = set(declared.seeds[: declared.when()[number - 1]])
    if number == 1:
        return [plan for plan in plans if plan.cell.seed in seeds]
    claims = resolve(declared.claims(), declared.arm_name(declared.control))
    arms = {one[side] for one in claims if one["name"] in still_open for side in ("arm", "versus")}
    return [plan for plan in plans if plan.cell.seed in seeds and plan.cell.arm in arms]


def register_look(declared: Experiment, registration: Registration, key: str, number: int, taken: LooksTaken) -> bool:
    """Write a look down and say what it decided; whether it is new."""
    if not declared.looks:
        return False
    num_seeds = declared.looks[number - 1]
    kept = ("name", "verdict", "value", "ci_low", "ci_high", "p", "p_holm", "closed")
    claims = [{name: one[name] for name in kept} for one in taken.results]  # type: ignore[literal-required]
    is_new = record_look(registration, key, {"num_seeds": num_seeds, "open": list(taken.open), "claims": claims})
    say(f"look {number} of {len(declared.looks)}, {num_seeds} seeds: {_told(taken.results, taken.open)}")
    return is_new


def end_of_looks(declared: Experiment) -> None:
    """Say that no look is left, and pause the schedules of the deployment that started this run."""
    if not declared.looks:
        return
    say("no look is left: every claim is decided, closed, or has had all of its seeds")
    deployment = runtime.deployment.id
    paused = pause_schedules(deployment) if deployment else 0
    if paused:
        say(f"paused {paused} schedule{'s' if paused > 1 else ''} of this deployment: there is nothing left to look at")


def seeds_by_arm(declared: Experiment, labels: Mapping[str, tuple[str, int]]) -> dict[str, list[int]]:
    """The seeds under which each arm was to run, in declared order, from the (arm, seed) of what ran."""
    ran = set(labels.values())
    return {arm.name: [seed for seed in declared.seeds if (arm.name, seed) in ran] for arm in declared.arms()}


def _told(results: Sequence[HypothesisResult], still_open: Sequence[str]) -> str:
    verdicts = [f"{one['name']} {one['verdict']}" for one in results if one["verdict"] != "inconclusive"]
    closed = [one["name"] for one in results if one["verdict"] == "inconclusive" and one["closed"]]
    parts = [", ".join(verdicts), f"closed undecided: {', '.join(closed)}" if closed else ""]
    parts += [f"open: {', '.join(still_open)}" if still_open else "none open"]
    return "; ".join(part for part in parts if part)
