"""The plan of a search: the defaults that its trials change, how long they take, and what fits in its budget."""

from dataclasses import dataclass
from pathlib import Path

from rmcore.config.pipeline import PipelineConfig
from rmcore.core.store import Store
from rmcore.study.budget import Budget, Times, parse_duration
from rmcore.study.estimates import Estimates
from tasks.device import visible_gpus
from tasks.probe import Probed, estimates, probe_unknown

UNKNOWN = Times(0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class TuningPlan:
    """How long the parts of a search take."""

    times: Times | None
    """Those of the defaults; None: unknown."""
    budget: Budget | None
    """None where none was given. Where times are unknown it begins without them, and learns them from the trials."""
    problems: tuple[str, ...]
    """Why times are unknown."""


def tuned_base(config: PipelineConfig) -> PipelineConfig:
    """The settings that trials change: those of the config, with one test set for all seeds, which no trial sees.

    What only other flows read is left out, so that a recipe is about the reward model.
    """
    data = config.data
    if data.eval_source is None and data.eval_split is None and data.test_seed is None:
        data = data.model_copy(update={"test_seed": config.seed})
    rest = {"policy": None, "validation": None, "active": None, "rlhf": None, "data": data}
    return PipelineConfig.model_validate(config.model_copy(update=rest).model_dump())


def tuning_plan(base: PipelineConfig, store: Store, home: Path, *, seeds: int, budget: str | None) -> TuningPlan:
    """Tell how long trials and the confirmation take; where nothing is known, two real steps are timed first.

    Args:
        base: the defaults.
        store: what there is.
        home: `$RM_OPT_HOME`; probes of throughput are kept in it.
        seeds: fresh seeds of the confirmation.
        budget: as it was given; None: none.

    Raises:
        ConfigError: the budget is no length of time.
    """
    seconds = None if budget is None else parse_duration(budget)
    folder, probed = home / "throughput", Probed()
    times = _times(base, estimates(store, folder))
    if times is None:
        probed = probe_unknown(store, folder, [base])
        times = _times(base, estimates(store, folder))
    if seconds is None:
        return TuningPlan(times, None, probed.problems)
    return TuningPlan(times, Budget(seconds, times or UNKNOWN, seeds, max(1, len(visible_gpus()))), probed.problems)


def _times(base: PipelineConfig, known: Estimates) -> Times | None:
    found = [known.seconds(base, stage) for stage in ("prepare", "train", "evaluate")]
    prepare, train, evaluate = found
    if prepare is None or train is None or evaluate is None:
        return None
    return Times(prepare, train, evaluate)
