"""A search: reproducible whatever interrupts it, bound to what it was begun with, never ended by a trial that fails."""

import random

import numpy as np
import optuna
import pytest

from experiments.presets import PRESETS
from postgres import Postgres
from rmcore.core.errors import ConfigError, StoreError
from rmcore.reporting.tuning_schema import FEWEST_FOR_IMPORTANCE
from rmcore.study.objectives import Scores
from rmcore.study.search import TrialError, earlier_best, open_search
from rmcore.study.search_space import default_space, parse_space

BASE = PRESETS["minilm"]
SPACE = default_space(BASE)
SMALL = parse_space({name: SPACE.to_dict()[name] for name in ("train.lr", "train.optimizer", "model.lora.rank")}, BASE)
NUM_PROMPTS = 80


def quality(config):
    """How good a config truly is, with one best learning rate."""
    lora = 0.02 if config.model.lora is not None else 0.0
    return 0.72 - 0.03 * np.log10(config.train.lr / 1e-4) ** 2 - lora


def measured(trial, seed=0, level=quality):
    """Scores at the end of a trial's next rung: a function of its settings and the rung alone, as trainings are."""
    share = level(trial.config) - 0.05 * (1 - (trial.done + 1) / len(trial.rungs.ends))
    rng = np.random.default_rng([seed, trial.number, trial.done])
    prompts = tuple(f"{place:04d}" for place in range(NUM_PROMPTS))
    return Scores(prompts, rng.binomial(3, share, NUM_PROMPTS).astype(float), np.full(NUM_PROMPTS, 3.0))


def opened(folder, base=BASE, space=SMALL, frozen=None, **changes):
    return open_search(folder, base, space, "accuracy", frozen or {"pairs": "a"}, num_pairs=500, **changes)


class Killed(Exception):
    pass


def run(folder, num_trials, *, interrupt=lambda: None, level=quality, seed=0, fails=(), **changes):
    """Search as the flow does; `interrupt` may raise between any two writes."""
    with opened(folder, **changes) as search:
        due = [trial for trial in search.take_up() if not trial.done or search.decide(trial) == "promoted"]
        while due or len(search.records()) < num_trials:
            try:
                trial = due.pop() if due else search.ask()
            except TrialError:
                continue
            interrupt()
            if trial.number in fails:
                search.fail(trial, "the loss is not finite")
                continue
            search.report(trial, measured(trial, seed, level), seconds=2.0, train_seconds=1.0 + trial.done)
            interrupt()
            if search.decide(trial) == "promoted":
                due.append(trial)
        return search.records(), search.best() if any(one.state == "complete" for one in search.records()) else None


def test_the_defaults_are_the_first_trial_and_end_it(tmp_path):
    records, _ = run(tmp_path / "a", 3, space=SPACE)
    assert records[0].state == "complete"
    assert records[0].drawn == SPACE.drawn_of(BASE)
    assert [one.number for one in records] == [0, 1, 2]
    assert any(one.state == "pruned" for one in records) or len(records[-1].values) == 3


@pytest.mark.slow
def test_a_search_that_is_stopped_anywhere_draws_the_same_trials_and_chooses_the_same(tmp_path):
    whole = run(tmp_path / "whole", 10)
    chance = random.Random(1)  # noqa: S311

    def interrupt():
        if chance.random() < 0.2:
            raise Killed

    num_stops = 0
    while True:
        try:
            stopped = run(tmp_path / "stopped", 10, interrupt=interrupt)
            break
        except Killed:
            num_stops += 1
    assert num_stops > 2
    assert stopped == whole


def test_another_seed_draws_other_trials_after_the_defaults(tmp_path):
    one, other = (run(tmp_path / str(seed), 3, base=BASE.model_copy(update={"seed": seed}))[0] for seed in (0, 1))
    assert one[0].drawn == other[0].drawn
    assert one[1].drawn != other[1].drawn


@pytest.mark.slow
def test_what_is_found_comes_near_the_best_settings(tmp_path):
    _, best = run(tmp_path / "a", 18)
    assert quality(SMALL.config(BASE, best.drawn)) > 0.71 > quality(BASE) - 0.01


def test_failed_trials_do_not_stop_a_search_but_all_of_them_do(tmp_path):
    records, best = run(tmp_path / "some", 6, fails={0, 2})
    assert [one.state == "failed" for one in records] == [True, False, True, False, False, False]
    assert records[2].why == "the loss is not finite"
    assert best is not None
    run(tmp_path / "all", 3, fails={0, 1, 2})
    with (
        opened(tmp_path / "all") as search,
        pytest.raises(ConfigError, match=r"none of 3 trials.*3 failed.*not finite"),
    ):
        search.best()


def test_settings_that_do_not_fit_together_are_a_failed_trial(tmp_path):
    space = parse_space({"model.head_only": [True, False], "model.lora.rank": [None, 8]}, BASE)
    records, _ = run(tmp_path / "a", 12, space=space)
    failed = [one for one in records if one.state == "failed"]
    assert failed
    assert all("do not fit together" in one.why for one in failed)
    assert all(one.drawn == {"model.head_only": True, "model.lora.rank": 8} for one in failed)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"frozen": {"pairs": "b"}}, "pairs: \"a\" -> \"b\""),
        ({"frozen": {"pairs": "a", "objective": "loss"}}, "objective added: \"loss\""),
    ],
)  # fmt: skip
def test_a_search_goes_on_with_what_it_was_begun_with_or_not_at_all(tmp_path, changes, said):
    run(tmp_path / "a", 1)
    with pytest.raises(ConfigError, match=r"(?s)" + said + r".*take another --name"):
        run(tmp_path / "a", 2, **changes)


def test_two_processes_do_not_run_one_search(tmp_path):
    with (
        opened(tmp_path / "a"),
        pytest.raises(StoreError, match="another process runs the search a"),
        opened(tmp_path / "a"),
    ):
        pass


def test_a_storage_that_cannot_be_opened_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"postgresql\+nothing://me@nowhere/db of the search cannot be opened"):
        run(tmp_path / "a", 1, storage="postgresql+nothing://me@nowhere/db")


@pytest.mark.parametrize(
    "storage", ["postgresql://me:secret@nowhere/db", "postgresql://nowhere/db?user=me&password=secret", "me:secret@db"]
)
def test_a_password_is_refused_before_anything_shows_or_keeps_it(tmp_path, storage):
    with pytest.raises(ConfigError, match="the --storage of the search") as error:
        run(tmp_path / "a", 1, storage=storage)
    assert "secret" not in str(error.value)
    assert error.value.__cause__ is None
    assert not (tmp_path / "a").exists()


def test_a_database_of_ones_own_keeps_the_search(tmp_path):
    storage = f"sqlite:///{tmp_path / 'own.db'}"
    records, _ = run(tmp_path / "a", 2, storage=storage)
    assert len(optuna.load_study(study_name="a", storage=storage).trials) == len(records) == 2
    assert not (tmp_path / "a" / "study.db").exists()


@pytest.mark.slow
def test_a_new_search_begins_with_the_best_of_earlier_ones_for_the_same_model(tmp_path):
    frozen = {"base": BASE.model_dump(mode="json")}

    def poor_defaults(config):
        return quality(config) - (0.1 if config.train.lr == BASE.train.lr else 0.0)

    records, best = run(tmp_path / "first", 12, frozen=frozen, level=poor_defaults)
    assert best.number > 0
    rate = SMALL.config(BASE, best.drawn).train.lr
    wide = {"low": 1e-7, "high": 1e-1, "log": True}
    small = parse_space({"train.lr": wide, "train.schedule": ["linear", "cosine"]}, BASE)
    found = earlier_best(tmp_path, "second", small, BASE, higher=True)
    assert len(found["first"]) == min(3, sum(one.state == "complete" for one in records))
    assert found["first"][0]["train.lr"] == pytest.approx(rate)  # the rate that it ran under, whatever was drawn for it
    assert all(one.keys() <= {"train.lr", "train.schedule"} for one in found["first"])
    assert earlier_best(tmp_path, "first", small, BASE, higher=True) == {}
    assert earlier_best(tmp_path, "second", small, PRESETS["h100"], higher=True) == {}
    assert earlier_best(tmp_path, "second", small, BASE, higher=False) == {}
    again, _ = run(tmp_path / "second", 3, space=small, warm=found["first"], frozen=frozen)
    assert again[0].drawn == small.drawn_of(BASE)
    assert again[1].drawn["train.lr"] == pytest.approx(rate)


def test_a_search_is_resumed_by_a_version_with_more_settings_and_not_under_others(tmp_path):
    with opened(tmp_path / "a", frozen={"pairs": "a", "base": {"seed": 1}}):
        pass
    with opened(tmp_path / "a", frozen={"pairs": "a", "base": {"seed": 1, "new": None}}):
        pass
    for other, said in (({"seed": 2}, "base.seed: 1 -> 2"), ({"seed": 1, "new": 3}, "base.new added: 3")):
        with pytest.raises(ConfigError, match=said), opened(tmp_path / "a", frozen={"pairs": "a", "base": other}):
            pass


@pytest.mark.slow
def test_what_mattered_is_told_from_ten_complete_trials_on(tmp_path):
    rates = {"low": 1e-6, "high": 1e-2, "log": True}
    space = parse_space({"train.lr": rates, "train.schedule": ["linear", "cosine"]}, BASE)
    with opened(tmp_path / "a", space=space) as search:
        for number in range(FEWEST_FOR_IMPORTANCE + 3):
            trial = search.ask()
            for _ in trial.rungs.ends:
                scores = measured(trial, level=lambda config: 0.7 - 0.1 * abs(np.log10(config.train.lr / 1e-4)))
                search.report(trial, scores, seconds=1.0, train_seconds=1.0)
            assert search.decide(trial) == "complete"
            assert (search.importance() is None) == (number + 1 < FEWEST_FOR_IMPORTANCE)
        importance = search.importance()
    assert importance["train.lr"] > 0.8
    assert sum(importance.values()) == pytest.approx(1)


@pytest.mark.slow
def test_the_chosen_score_flatters_where_all_trials_are_equal(tmp_path):
    """The null: no setting changes anything, so what is gained by choosing is optimism and nothing else."""
    gains = []
    for seed in range(3):
        _, best = run(tmp_path / str(seed), 8, level=lambda config: 0.7, seed=seed)
        gains.append(best.value - 0.7)
    assert np.mean(gains) > 0.01
    assert min(gains) > -0.02


def test_the_defaults_are_never_given_up_and_a_trial_may_be_left_before_it_begins(tmp_path):
    with opened(tmp_path / "a") as search:
        defaults, other = search.ask(), search.ask()
        for value, trial in ((0.9, other), (0.1, defaults)):  # the other one is first, and far better
            search.report(trial, Scores(("a",), np.array([value]), np.array([1.0])), seconds=1.0, train_seconds=1.0)
        assert search.decide(defaults) == "promoted"
        search.leave(search.ask(), "too long")
        last = search.records()[-1]
        assert (last.state, last.values, last.why) == ("pruned", (), "too long")


def test_confirmations_of_other_trials_are_remembered(tmp_path):
    for number, before in ((3, []), (3, []), (5, [3]), (3, [5])):
        with opened(tmp_path / "a") as search:
            assert search.note_confirmation(number, 3) == before


@pytest.mark.services
def test_a_search_in_postgresql_that_is_stopped_decides_what_one_in_a_file_does(tmp_path, monkeypatch):
    whole = run(tmp_path / "whole", 6)
    server = Postgres()
    try:
        for name, value in server.environment.items():  # of the password, which no address has
            monkeypatch.setenv(name, value)
        address = server.address.replace("postgresql://", "postgresql+psycopg2://")
        stops = iter([False, False, True, False, False, False, False, True])

        def interrupt():
            if next(stops, False):
                raise Killed

        for _ in range(2):
            with pytest.raises(Killed):
                run(tmp_path / "whole again" / "whole", 6, storage=address, interrupt=interrupt)
        found = run(tmp_path / "whole again" / "whole", 6, storage=address)
        assert [(one.drawn, one.values, one.state) for one in found[0]] == [
            (one.drawn, one.values, one.state) for one in whole[0]
        ]
        assert found[1].number == whole[1].number
        assert int(server.sql("select count(*) from trials")) == len(whole[0])
    finally:
        server.close()
