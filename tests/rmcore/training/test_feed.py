"""The feed: a function of its arguments, whoever builds its micro-batches and wherever it starts."""

import os
import signal
import time
from multiprocessing import active_children, resource_sharer

import pytest
import torch

from rmcore.config.train import TrainConfig
from rmcore.core.errors import ConfigError, TrainingError
from rmcore.data.rendering import TokenizedPair, TokenizedSide
from rmcore.training import feed
from rmcore.training.feed import make_feed, steps_from
from rmcore.training.ranks import ALONE, Ranks, environment_ranks, share_of_host
from rmcore.training.record import planned_steps

CPU = torch.device("cpu")
BUDGET = 160


def make_pairs(lengths):
    """Pairs of such lengths; every token names its pair and side."""
    return [
        TokenizedPair(
            pair_id=str(number),
            chosen=TokenizedSide([2 * number + 1] * chosen, 0),
            rejected=TokenizedSide([2 * number + 2] * rejected, 0),
            target_margin=None,
        )
        for number, (chosen, rejected) in enumerate(lengths)
    ]


PAIRS = make_pairs([(3 + number % 7, 5 + number % 11) for number in range(30)])


def feed_of(pairs, ranks=ALONE, num_steps=12, pairs_per_step=8):
    config = TrainConfig(pairs_per_step=pairs_per_step)
    return make_feed(pairs, config, num_steps=num_steps, seed=4, token_budget=BUDGET, pad_id=0, ranks=ranks)


def walk(pairs, start=0, **changes):
    config = TrainConfig.model_validate({"pairs_per_step": 8} | changes)
    with steps_from(feed_of(pairs), start, config, CPU) as steps:
        return [
            (
                list(indices),
                [(b.indices, b.rows.input_ids.tolist(), b.rows.attention_mask.tolist(), b.idle) for b in batches],
            )
            for indices, batches in steps
        ]


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_build_the_same_micro_batches_and_draw_nothing(workers):
    torch.manual_seed(0)
    random = torch.get_rng_state()
    assert walk(PAIRS, num_workers=workers) == walk(PAIRS, num_workers=0)
    assert torch.equal(random, torch.get_rng_state())


@pytest.mark.parametrize("start", [0, 5, 11, 12])
def test_starting_in_the_middle_gives_the_tail(start):
    assert walk(PAIRS, start=start, num_workers=0) == walk(PAIRS, num_workers=0)[start:]


class Trouble(list):
    """Pairs of which one brings trouble to who builds its micro-batch; harmless in the process that made them."""

    def __init__(self, pairs, kind):
        super().__init__(pairs)
        self.kind, self.home = kind, os.getpid()

    def __getitem__(self, index):
        if os.getpid() != self.home and index == 17:
            if self.kind == "dies":
                os._exit(1)
            if self.kind == "hangs":
                time.sleep(3600)
            # Dying: the tensors were announced, and the socket that hands them over is gone.
            resource_sharer._resource_sharer.register = lambda send, close: ("/nobody/listens", 0)
        return super().__getitem__(index)


@pytest.mark.parametrize("kind", ["dies", "hangs", "unreachable"])
def test_a_worker_in_trouble_ends_training_with_advice(kind, monkeypatch):
    if kind == "hangs":
        monkeypatch.setattr(feed, "FETCH_SECONDS", 0.5)
    with pytest.raises(TrainingError, match=r"1 worker processes.*Lower num_workers"):
        walk(Trouble(PAIRS, kind), num_workers=1)
    assert not active_children()
    assert len(walk(Trouble(PAIRS, kind), num_workers=0)) == 12


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_of_the_whole_process_group_leave_the_workers_at_work(number):
    expected = [indices for indices, _ in feed_of(PAIRS)]
    with steps_from(feed_of(PAIRS), 0, TrainConfig(pairs_per_step=8, num_workers=2), CPU) as steps:
        first = [next(steps)[0] for _ in range(2)]  # one of each worker, which has begun to work by then
        workers = active_children()
        for worker in workers:
            os.kill(worker.pid, number)
        assert first + [indices for indices, _ in steps] == expected
    assert len(workers) == 2
    assert not active_children()


def test_a_worker_that_dies_during_a_step_ends_training_with_the_same_advice():
    config = TrainConfig(pairs_per_step=8, num_workers=1)
    with (  # noqa: PT012 - torch may tell of it at any of these lines
        pytest.raises(TrainingError, match=r"1 worker processes.*Lower num_workers"),
        steps_from(feed_of(PAIRS), 0, config, CPU) as steps,
    ):
        next(steps)
        [worker] = active_children()
        worker.kill()
        worker.join()
        list(steps)
    assert not active_children()


def test_a_number_of_processes_that_does_not_divide_a_step_is_refused(tmp_path, start):
    with pytest.raises(ConfigError, match=r"pairs_per_step=4 does not divide among 3 processes.*multiple of 3"):
        start(tmp_path, ranks=Ranks(0, 3))
    Ranks(0, 2).check_divides(4)


def plain_feed(ranks=ALONE, packing=None):
    config = TrainConfig(pairs_per_step=8, batching="plain", token_budget=BUDGET)
    return make_feed(PAIRS, config, num_steps=12, seed=4, token_budget=BUDGET, pad_id=0, ranks=ranks, packing=packing)


def test_a_plain_feed_is_refused_among_several_processes():
    with pytest.raises(ConfigError, match=r"batching=plain on 2 processes.*batching=pairs"):
        plain_feed(Ranks(0, 2))


@pytest.mark.parametrize(
    ("given_settings", "num_pairs", "steps"),
    [
        ({"steps": 7, "epochs": 3}, 100, 7),
        ({"epochs": 1, "pairs_per_step": 16}, 100, 7),
        ({"epochs": 2, "pairs_per_step": 16}, 100, 14),
        ({"epochs": 0.01, "pairs_per_step": 16}, 100, 1),
        ({"epochs": None, "pairs_per_step": 16}, 10_000, 625),  # one pass
        ({"epochs": None, "pairs_per_step": 16}, 320, 60),
        ({"epochs": None, "pairs_per_step": 16}, 32, 20),  # ten passes
    ],
)
def test_planned_steps(given_settings, num_pairs, steps):
    assert planned_steps(TrainConfig.model_validate(given_settings), num_pairs) == steps


@pytest.mark.parametrize(
    ("rank", "world", "local", "of", "expected"),
    [
        (0, 1, None, None, (0, 1)),
        (5, 8, "1", "4", (1, 4)),
        (1, 2, "1", None, (1, 2)),
        (3, 4, None, None, None),
        (3, 4, "3", "2", None),
        (3, 4, "1", None, None),
    ],
)
def test_who_shares_a_host_is_told_by_the_launcher_or_not_guessed(monkeypatch, rank, world, local, of, expected):
    values = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": of}
    for name, value in values.items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, str(value))
    if expected is not None:
        assert share_of_host() == expected
        return
    with pytest.raises(ConfigError, match="which processes share a host is not known"):
        share_of_host()


@pytest.mark.parametrize(("rank", "world"), [("1", None), ("2", "2"), ("-1", "2"), ("a", "2"), ("0", "b"), ("0", "0")])
def test_a_place_that_is_none_is_refused_with_what_to_unset(monkeypatch, rank, world):
    for name, value in (("RANK", rank), ("WORLD_SIZE", world)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="unset RANK and WORLD_SIZE"):
        environment_ranks()


def test_a_plain_loss_is_not_cut_by_the_memory_of_the_machine():
    with pytest.raises(ValueError, match="set token_budget"):
        TrainConfig(batching="plain")
