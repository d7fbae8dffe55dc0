"""A search for the best settings: an Optuna study that is asked for trials and told of their rungs.

All that decides is in the study's storage: what was drawn, the scores of every rung, how a trial ended. So a search
that was killed resumes where it was: a trial in the midst of its rungs is taken up with its own settings, and the next
ones are those that an uninterrupted search would have drawn. Importing this module imports Optuna.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import optuna
from optuna.exceptions import OptunaError
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from rmcore.config.pipeline import PipelineConfig
from rmcore.core.errors import ConfigError, StoreError
from rmcore.core.files import try_exclusive, write_json
from rmcore.reporting.tuning_schema import FEWEST_FOR_IMPORTANCE
from rmcore.study.objectives import Objective, Scores, higher_is_better
from rmcore.study.registration import describe_changes
from rmcore.study.rungs import REDUCTION, WORSE_LEVEL, Rungs, is_promoted, worse_p
from rmcore.study.sampler import ReproducibleSampler
from rmcore.study.search_space import Space, value_of, with_settings
from rmcore.training.length import planned_steps

optuna.logging.set_verbosity(optuna.logging.WARNING)
RECORD = "study.json"
DATABASE = "study.db"
FROZEN, SCORES, SECONDS, TRAIN_SECONDS = "frozen", "scores", "seconds", "train_seconds"
ERROR, PRUNED, SETTINGS, CONFIRMED = "error", "pruned", "settings", "confirmed"
WARM_TRIALS = 3
"""Best trials of an earlier search that a new one begins with."""
Decision = Literal["promoted", "complete", "pruned"]


@dataclass
class Trial:
    """One trial in hand: its settings, and the rungs that are behind it."""

    number: int
    config: PipelineConfig
    """Settings of the whole training, without rungs."""
    rungs: Rungs
    handle: optuna.Trial = field(repr=False)
    done: int = 0
    """Rungs that are reported."""

    def rung_config(self, back: int = 0) -> PipelineConfig:
        """Settings of the rung that is to run next, or of one so many before it."""
        return self.rungs.config(self.config, self.done - back)

    @property
    def label(self) -> str:
        """The rung that is to run next, as its run is called."""
        return f"trial {self.number} to {self.rungs.share(self.done)}"


@dataclass(frozen=True, slots=True)
class TrialRecord:
    """A trial as reports have it."""

    number: int
    state: Literal["complete", "pruned", "failed", "running"]
    drawn: Mapping[str, Any]
    values: tuple[float, ...]
    """The objective at the end of each rung that it came to."""
    seconds: float
    """Wall seconds of all its rungs."""
    train_seconds: float
    """Seconds in optimizer steps, of all its rungs."""
    why: str
    """Why it was given up, or failed; empty otherwise."""

    @property
    def value(self) -> float | None:
        """The objective at the end of its last rung; None before the first."""
        return self.values[-1] if self.values else None


class Search:
    """A search by name, open in this process.

    Args:
        study: the Optuna study.
        base: what trials change.
        space: which values they draw.
        objective: what is compared.
        num_pairs: pairs to train on, by which epochs become steps: rungs are numbers of steps, and pairs that a
            training leaves out must not move them.
    """

    def __init__(
        self, study: optuna.Study, base: PipelineConfig, space: Space, objective: Objective, num_pairs: int
    ) -> None:
        self.study, self.base, self.space, self.num_pairs = study, base, space, num_pairs
        self.higher = higher_is_better(objective)

    def take_up(self) -> list[Trial]:
        """Take up the trials that an earlier run of this search left in the midst of their rungs, oldest first."""
        found = []
        for one in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            with suppress(TrialError):  # which is over, and told
                found.append(self._in_hand(optuna.trial.Trial(self.study, one._trial_id)))
        return found

    def ask(self) -> Trial:
        """Draw the next trial.

        Raises:
            TrialError: its settings do not fit together; it is told as failed.
        """
        return self._in_hand(self.study.ask())

    def _in_hand(self, handle: optuna.Trial) -> Trial:
        if handle.number == 0:  # the defaults, of which only what lies in the space was drawn
            drawn = self.space.drawn_of(self.base)
            Space({name: self.space.settings[name] for name in drawn}).suggest(handle)
        else:
            drawn = self.space.suggest(handle)
        try:
            config, rungs = self._config(handle.number, drawn)
        except ConfigError as error:
            self._fail(handle, str(error))
            raise TrialError(handle.number, str(error)) from None
        handle.set_user_attr(SETTINGS, json.dumps(self.settings_of(handle.number)))
        return Trial(handle.number, config, rungs, handle, len(self._frozen(handle).intermediate_values))

    def report(self, trial: Trial, scores: Scores, *, seconds: float, train_seconds: float) -> None:
        """Tell how a rung of a trial ended; what is written last makes it so.

        Args:
            trial: with the rung that ran as its next.
            scores: of the objective on the validation pairs.
            seconds: wall seconds of the rung.
            train_seconds: seconds in optimizer steps of all rungs so far.
        """
        place = trial.done
        trial.handle.set_user_attr(f"{SCORES} {place}", json.dumps(scores.to_dict()))
        trial.handle.set_user_attr(f"{SECONDS} {place}", seconds)
        trial.handle.set_user_attr(f"{TRAIN_SECONDS} {place}", train_seconds)
        trial.handle.report(scores.value, step=_resource(place))
        trial.done += 1

    def decide(self, trial: Trial) -> Decision:
        """Decide after a rung whether a trial is promoted to the next, and tell the study if it is not.

        A pure function of what the study holds, so a search that was killed before it could tell decides the same.
        """
        place = trial.done - 1
        own = self._frozen(trial.handle)
        value = own.intermediate_values[_resource(place)]
        if trial.done == len(trial.rungs.ends):
            self.study.tell(trial.handle, value)
            return "complete"
        # Everything is compared with the defaults, so they are trained to their end.
        if own.number and (why := self._given_up(own, place, value)):
            trial.handle.set_user_attr(PRUNED, f"{why} at {trial.rungs.share(place)}")
            self.study.tell(trial.handle, state=TrialState.PRUNED)
            return "pruned"
        return "promoted"

    def _given_up(self, own: FrozenTrial, place: int, value: float) -> str:
        """Why a trial is not promoted from a rung; empty where it is."""
        earlier = [one for one in self.study.get_trials(deepcopy=False) if one.number != own.number]
        there = [one for one in earlier if _resource(place) in one.intermediate_values]
        others = [one.intermediate_values[_resource(place)] for one in there]
        if not is_promoted(value, others, higher=self.higher):
            num = 1 + len(others)
            return f"not among the best {max(1, num // REDUCTION)} of {num}"
        complete = [one for one in there if one.state == TrialState.COMPLETE and one.value is not None]
        if not complete:
            return ""
        best = (max if self.higher else min)(complete, key=lambda one: one.value or 0.0)
        p = worse_p(scores_of(own, place), scores_of(best, place), higher=self.higher)
        return f"worse than trial {best.number} on the same prompts (p = {p:.2g})" if p < WORSE_LEVEL else ""

    def fail(self, trial: Trial, message: str) -> None:
        """Tell that a trial failed; the search continues."""
        self._fail(trial.handle, message)

    def leave(self, trial: Trial, why: str) -> None:
        """Give up a trial before its first rung; the search continues."""
        trial.handle.set_user_attr(PRUNED, why)
        self.study.tell(trial.handle, state=TrialState.PRUNED)

    def note_confirmation(self, number: int, seeds: int) -> list[int]:
        """Write down that a trial is confirmed now; gives the other trials that were confirmed before."""
        known: list[list[int]] = json.loads(self.study.user_attrs.get(CONFIRMED, "[]"))
        if [number, seeds] not in known:
            self.study.set_user_attr(CONFIRMED, json.dumps([*known, [number, seeds]]))
        return sorted({one for one, _ in known} - {number})

    def _fail(self, handle: optuna.Trial, message: str) -> None:
        handle.set_user_attr(ERROR, message)
        self.study.tell(handle, state=TrialState.FAIL)

    def _frozen(self, handle: optuna.Trial) -> FrozenTrial:
        return self.study.get_trials(deepcopy=False)[handle.number]

    def records(self) -> list[TrialRecord]:
        """All trials that were begun, in order."""
        return [_record(one) for one in self.study.get_trials(deepcopy=False) if one.state != TrialState.WAITING]

    def settings_of(self, number: int) -> dict[str, Any]:
        """The searched settings that a trial ran under; of the defaults, those that the space has."""
        one = self.study.get_trials(deepcopy=False)[number]
        if number == 0:
            return {name: value_of(self.base, name) for name in self.space.settings}
        return self.space.values({name: one.params[name] for name in self.space.settings if name in one.params})

    def whole_config(self, number: int) -> PipelineConfig:
        """Settings of a trial's training in one piece: what its last rung ended as.

        Raises:
            ConfigError: they do not fit together.
        """
        one = self.study.get_trials(deepcopy=False)[number]
        config, rungs = self._config(number, dict(one.params))
        return rungs.config(config, len(rungs.ends) - 1)

    def ends_of(self, number: int) -> tuple[int, ...]:
        """Steps at which the rungs of a trial end."""
        return self._config(number, dict(self.study.get_trials(deepcopy=False)[number].params))[1].ends

    def _config(self, number: int, drawn: Mapping[str, Any]) -> tuple[PipelineConfig, Rungs]:
        config = self.base if number == 0 else self.space.config(self.base, drawn)
        steps = planned_steps(config.train, self.num_pairs)
        config = config.model_copy(update={"train": config.train.model_copy(update={"steps": steps})})
        return config, Rungs.of(steps)

    @property
    def num_finished(self) -> int:
        """Trials that are over, however they ended."""
        return sum(one.state.is_finished() for one in self.study.get_trials(deepcopy=False))

    @property
    def seconds(self) -> float:
        """Wall seconds of all rungs so far."""
        return sum(one.seconds for one in self.records())

    def best(self) -> TrialRecord:
        """The trial with the best value at the end of its training, the earlier one of equals.

        Raises:
            ConfigError: no trial came to its end.
        """
        complete = [one for one in self.records() if one.state == "complete"]
        if not complete:
            failed = [one for one in self.records() if one.state == "failed"]
            raise ConfigError(
                f"none of {len(self.records())} trials came to its end, so there is nothing to choose: {len(failed)} "
                f"failed{f', the last one because: {failed[-1].why}' if failed else ''}. Correct what they failed of "
                "(often a learning rate range that is too high), and take another --name."
            )
        sign = 1 if self.higher else -1
        return max(complete, key=lambda one: (sign * (one.value or 0.0), -one.number))

    def importance(self) -> dict[str, float] | None:
        """Share of the spread of final values that each setting explains (fANOVA), largest first; None: too few trials.

        Source:
            Hutter et al. 2014, An efficient approach for assessing hyperparameter importance, ICML.
        """
        complete = [one for one in self.study.get_trials(deepcopy=False) if one.state == TrialState.COMPLETE]
        if len(complete) < FEWEST_FOR_IMPORTANCE or len({one.value for one in complete}) < 2:
            return None
        evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
        try:
            found = optuna.importance.get_param_importances(self.study, evaluator=evaluator)
        except (RuntimeError, ValueError):  # the values do not differ by any setting
            return None
        return {name: float(share) for name, share in found.items()}


class TrialError(ConfigError):
    """The settings of a trial do not fit together; the trial is over and the search continues."""

    def __init__(self, number: int, message: str) -> None:
        self.number = number
        super().__init__(f"trial {number}: {message}")


def _resource(place: int) -> int:
    """The step by which Optuna compares rungs: ninths of a training, whatever its own steps."""
    return int(REDUCTION**place)


def scores_of(trial: FrozenTrial, place: int) -> Scores:
    """Scores of a trial at the end of a rung."""
    return Scores.from_dict(json.loads(trial.user_attrs[f"{SCORES} {place}"]))


def _record(one: FrozenTrial) -> TrialRecord:
    words: dict[TrialState, Literal["complete", "pruned", "failed", "running"]] = {
        TrialState.COMPLETE: "complete",
        TrialState.PRUNED: "pruned",
        TrialState.FAIL: "failed",
        TrialState.RUNNING: "running",
    }
    rungs = range(len(one.intermediate_values))
    return TrialRecord(
        one.number,
        words[one.state],
        dict(one.params),
        tuple(one.intermediate_values[step] for step in sorted(one.intermediate_values)),
        sum(float(one.user_attrs[f"{SECONDS} {place}"]) for place in rungs),
        max((float(one.user_attrs[f"{TRAIN_SECONDS} {place}"]) for place in rungs), default=0.0),
        str(one.user_attrs.get(ERROR) or one.user_attrs.get(PRUNED) or ""),
    )


def require_no_password(storage: str | None) -> None:
    """See that the address of a database holds no password.

    It is a parameter of a flow run, which Prefect's pages show, and stands in the search's record.

    Raises:
        ConfigError: it does, or it is no address.
    """
    try:
        address = None if storage is None else make_url(storage)
    except ArgumentError:
        raise ConfigError(
            "the --storage of the search is no address of a database: write it as SQLAlchemy does, "
            "postgresql+psycopg2://USER@HOST/DATABASE for example."
        ) from None
    if address is not None and (address.password is not None or "password" in address.query):
        raise ConfigError(
            "the --storage of the search holds a password, which Prefect's pages and the search's record would show; "
            "leave it out: PostgreSQL's client takes it from ~/.pgpass or from PGPASSWORD."
        )


def open_storage(folder: Path, storage: str | None) -> RDBStorage:
    """Open the database of a search, making it if it is new.

    Before threads are at work that use SQLAlchemy or Alembic, too: neither sets itself up in two threads at once.

    Args:
        folder: of the search; made here.
        storage: SQLAlchemy URL without a password; None: SQLite in the folder.

    Raises:
        ConfigError: it cannot be opened, or holds a password.
    """
    require_no_password(storage)
    folder.mkdir(parents=True, exist_ok=True)
    address = storage or f"sqlite:///{folder / DATABASE}"
    try:
        return RDBStorage(address)
    except Exception as error:
        raise ConfigError(
            f"the storage {address} of the search cannot be opened ({type(error).__name__}: {error}); correct the "
            "address, install its driver, or leave --storage out for a file of this home."
        ) from error


@contextmanager
def open_search(
    folder: Path,
    base: PipelineConfig,
    space: Space,
    objective: Objective,
    frozen: Mapping[str, Any],
    *,
    num_pairs: int,
    warm: Sequence[Mapping[str, Any]] = (),
    parallel: bool = False,
    storage: RDBStorage | str | None = None,
    random: bool = False,
) -> Iterator[Search]:
    """Begin a search, or take up the one of that name, and keep it for this process inside the block.

    Args:
        folder: of the search, whose name is the study's.
        base: what trials change, and the first one does not.
        space: which values they draw.
        objective: what is compared.
        frozen: everything that trials must have in common, JSON-ready.
        num_pairs: pairs to train on.
        warm: drawn values that a new search begins with, after the defaults.
        parallel: whether several trials run at once.
        storage: database of Optuna, open already or as `open_storage` takes it.
        random: draw at random in place of TPE, to compare with.

    Raises:
        ConfigError: there is a search of that name with other data, model, space or objective; each difference is
            named. Or the database cannot be opened.
        StoreError: another process runs it.
    """
    opened = open_storage(folder, storage) if storage is None or isinstance(storage, str) else storage
    with try_exclusive(folder / ".lock") as is_ours:
        if not is_ours:
            raise StoreError(
                f"another process runs the search {folder.name} right now, and two would draw the same trials: wait "
                "for it, stop it, or take another --name."
            )
        study = optuna.create_study(
            storage=opened,
            study_name=folder.name,
            sampler=ReproducibleSampler(base.seed, parallel=parallel, random=random),
            direction="maximize" if higher_is_better(objective) else "minimize",
            load_if_exists=True,
        )
        _settle(study, frozen)
        search = Search(study, base, space, objective, num_pairs)
        if not study.get_trials(deepcopy=False):
            study.enqueue_trial(space.drawn_of(base))
            for drawn in warm:
                study.enqueue_trial(dict(drawn), skip_if_exists=True)
        write_json(folder / RECORD, {"name": folder.name, "storage": opened.url, "frozen": frozen})
        yield search


def _said(record: Any) -> Any:
    """A record without what is null in it: a newer version has more settings, which were nothing then and are now."""
    if isinstance(record, Mapping):
        return {name: _said(value) for name, value in record.items() if value is not None}
    return record


def _settle(study: optuna.Study, frozen: Mapping[str, Any]) -> None:
    """Write down what a new study is about, or see that an old one is about the same."""
    text = json.dumps(frozen, sort_keys=True)
    known = study.user_attrs.get(FROZEN)
    if known is None:
        study.set_user_attr(FROZEN, text)
        return
    if _said(json.loads(known)) != _said(json.loads(text)):
        listed = "\n  ".join(describe_changes(json.loads(known), json.loads(text)))
        raise ConfigError(
            f"the search {study.study_name} was begun with other settings, and trials of both cannot be compared:\n  "
            f"{listed}\nRepeat what it was begun with to resume it, or take another --name."
        )


def earlier_best(
    tuning: Path, name: str, space: Space, base: PipelineConfig, *, higher: bool
) -> dict[str, list[dict[str, Any]]]:
    """The best trials of the earlier searches of a home for the same model, as far as they lie in a space.

    Args:
        tuning: folder of all searches.
        name: of the new one.
        space: the new one's.
        base: what its trials change.
        higher: whether more of the objective is better.

    Returns:
        By name of the search, newest first, what would be drawn for its best trials, without settings that the space
        does not hold; searches without any are left out.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for record in sorted(tuning.glob(f"*/{RECORD}"), key=lambda path: path.stat().st_mtime, reverse=True):
        known = json.loads(record.read_text(encoding="utf-8"))
        if known["name"] == name or known["frozen"]["base"]["model"]["name"] != base.model.name:
            continue
        try:
            study = optuna.load_study(study_name=known["name"], storage=known["storage"])
        # Its database is away or was removed, its driver is not here, or another version of Optuna wrote it.
        except (SQLAlchemyError, OptunaError, ImportError, KeyError, RuntimeError):
            continue
        if (study.direction == optuna.study.StudyDirection.MAXIMIZE) != higher:
            continue
        complete = [one for one in study.get_trials(deepcopy=False) if one.state == TrialState.COMPLETE]
        complete.sort(key=lambda one: one.value or 0.0, reverse=higher)
        kept: list[dict[str, Any]] = []
        for one in complete:
            drawn = _drawn_here(json.loads(one.user_attrs[SETTINGS]), space, base)
            if drawn and drawn not in kept:
                kept.append(drawn)
        if kept:
            found[known["name"]] = kept[:WARM_TRIALS]
    return found


def _drawn_here(settings: Mapping[str, Any], space: Space, base: PipelineConfig) -> dict[str, Any]:
    """Find what would have to be drawn for settings of another search, of those that both have."""
    shared = {name: value for name, value in settings.items() if name in space.settings}
    try:
        drawn = space.drawn_of(with_settings(base, shared))
    except ValueError:  # they do not fit to this base
        return {}
    return {name: value for name, value in drawn.items() if name in shared}
