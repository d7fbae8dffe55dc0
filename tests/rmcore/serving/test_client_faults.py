import asyncio
import itertools
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from machine import PATIENCE_S
from rmcore.core.errors import NotReadyError, RequestError, ServingError
from rmcore.serving.client import RewardClient
from rmcore.serving.types import RewardProbe, WeightUpdate

UPDATE = WeightUpdate(
    folder="u1", digest="a" * 64, mode="full", probe=RewardProbe(token_ids=((1, 2),), rewards=(0.5,), tolerance=1e-4)
)
QUICK = {"backoff_s": 0.001}


def rows(count):
    return [[index, 7] for index in range(count)]


def refusal(status, field=None):
    return status, {"error": "invalid", "message": f"refused {field} here.", "field": field}


@pytest.mark.parametrize("fault", ["drop before", "drop after", "drop halfway"])
def test_a_broken_connection_is_tried_again_until_it_holds(server, ask, fault):
    server.behave = lambda seen: fault if seen.number < 3 else None
    answer = ask(server.address, lambda c: c.score(rows(4)), attempts=4, **QUICK)
    assert list(answer.rewards) == list(map(server.reward, rows(4)))
    assert len(server.seen) == 4


@pytest.mark.parametrize("attempts", [1, 3])
def test_tries_are_counted_exactly_and_the_error_says_how_many(server, ask, attempts):
    server.behave = lambda seen: "drop before"
    with pytest.raises(ServingError, match=rf"POST /score failed in {attempts} tries .*no server listens"):
        ask(server.address, lambda c: c.score(rows(1)), attempts=attempts, **QUICK)
    assert len(server.seen) == attempts


def test_pauses_between_tries_grow(server, ask):
    server.behave = lambda seen: "drop before" if seen.number < 3 else None
    ask(server.address, lambda c: c.score(rows(1)), backoff_s=0.04)
    times = [seen.at_s for seen in server.seen]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert all(gap >= least for gap, least in zip(gaps, (0.02, 0.04, 0.08), strict=True))


def test_a_server_that_died_and_is_back_gives_right_answers(server, ask):
    def die(seen):
        if seen.number != 3:
            return None
        threading.Thread(target=lambda: (server.stop(), server.start())).start()
        return "hang"

    server.behave = die
    answer = ask(
        server.address, lambda c: c.score(rows(12)), batch_size=1, max_concurrency=1, attempts=50, backoff_s=0.01
    )
    assert list(answer.rewards) == list(map(server.reward, rows(12)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "error"),
    [(status, RequestError) for status in (400, 401, 403, 404, 409, 413, 422)]
    + [(429, NotReadyError), (503, NotReadyError), (500, ServingError), (502, ServingError), (302, ServingError)],
)
def test_an_answer_is_never_asked_for_again(server, ask, status, error):
    server.behave = lambda seen: refusal(status, "normalize")
    with pytest.raises(error, match=f"{status} invalid: refused normalize here") as caught:
        ask(server.address, lambda c: c.score(rows(1)), **QUICK)
    assert type(caught.value) is error
    assert len(server.seen) == 1


def test_a_refusal_that_is_no_reward_server_s_is_shown(server, ask):
    server.behave = lambda seen: (404, b"<html>nothing here")
    with pytest.raises(RequestError, match=r"404 .*<html>nothing here.*something else is at this address"):
        ask(server.address, lambda c: c.version())


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        {"rewards": [1.0]},
        {"rewards": [1.0, float("nan")]},
        {"rewards": [1.0, None]},
        {"num_cut": []},
        {"normalized": True},
        {"policy_version": 4},
        {"weight_version": 0},
        {"surprise": 1},
        b"not json",
        b"",
    ],
)
def test_an_answer_that_is_not_valid_is_no_reward(server, ask, change):
    good = {"rewards": [1.0, 2.0], "num_tokens": [2, 2], "num_cut": [0, 0], "normalized": False}
    good |= {"weight_version": 1, "checkpoint_digest": "d", "policy_version": None}
    server.behave = lambda seen: (200, change if isinstance(change, bytes) else good | change)
    with pytest.raises(ServingError, match=r"POST /score .* answered .*one release"):
        ask(server.address, lambda c: c.score(rows(2)), **QUICK)
    assert len(server.seen) == 1


@pytest.mark.parametrize(
    "call", [lambda c: c.score(rows(1)), lambda c: c.health(), lambda c: c.publish(UPDATE, timeout_s=0.05)]
)
def test_no_answer_in_time_says_how_long_and_is_not_tried_again(server, ask, call):
    server.behave = lambda seen: "hang"
    with pytest.raises(ServingError, match=r"no answer within 0\.05 s.*Raise timeout_s"):
        ask(server.address, call, timeout_s=0.05)
    assert len(server.seen) <= 1  # on a busy machine it is given up before the server has read it


def test_the_first_failure_ends_the_call_without_waiting_for_the_others(server, ask):
    server.behave = lambda seen: refusal(422) if seen.inputs == [[3, 7]] else "hang"
    with pytest.raises(RequestError):
        ask(server.address, lambda c: c.score(rows(4)), batch_size=1, timeout_s=300)


def test_an_update_is_published_once_and_tells_the_version(server, ask):
    server.weights = lambda seen: (2, "e")
    assert ask(server.address, lambda c: c.publish(UPDATE, timeout_s=60)).weight_version == 2
    assert [(seen.path, WeightUpdate.model_validate(seen.body)) for seen in server.seen] == [("/weights", UPDATE)]


@pytest.mark.parametrize("fault", ["drop before", "drop after", "drop halfway"])
def test_an_update_that_was_sent_is_never_sent_again(server, ask, fault):
    server.behave = lambda seen: fault
    with pytest.raises(ServingError, match=r"broke after POST /weights was sent .*version\(\) tells"):
        ask(server.address, lambda c: c.publish(UPDATE, timeout_s=60), **QUICK)
    assert len(server.seen) == 1


def test_an_update_that_was_never_sent_is_tried_again(server, ask):
    server.stop()
    starter = threading.Timer(0.05, server.start)

    def call(client):
        starter.start()
        return client.publish(UPDATE, timeout_s=60)

    assert ask(server.address, call, attempts=100, backoff_s=0.01).weight_version == 1
    assert len(server.done) == 1


def test_a_server_that_is_not_ready_still_tells_its_health(server, ask):
    server.behave = lambda seen: (503, server.health("starting", "loads weights"))
    health = ask(server.address, lambda c: c.health())
    assert (health.ready, health.state, health.reason) == (False, "starting", "loads weights")
    server.behave = lambda seen: refusal(503)
    with pytest.raises(NotReadyError):
        ask(server.address, lambda c: c.health())


def test_waiting_ends_as_soon_as_the_server_is_ready(server, ask):
    answers = [refusal(503), (503, server.health("starting")), "drop before", refusal(500), (200, b"{}")]
    server.behave = lambda seen: answers[seen.number] if seen.number < len(answers) else None
    assert ask(server.address, lambda c: c.wait_ready(timeout_s=60), **QUICK).ready
    assert len(server.seen) == len(answers) + 1


def test_waiting_bears_a_server_that_does_not_listen_yet(server, ask):
    server.stop()
    starter = threading.Timer(0.05, server.start)

    def call(client):
        starter.start()
        return client.wait_ready(timeout_s=60)

    assert ask(server.address, call, backoff_s=0.01).ready


def test_waiting_in_vain_tells_the_last_reason(server, ask):
    server.behave = lambda seen: (503, server.health("broken", "an update was torn."))
    with pytest.raises(ServingError, match=r"not ready within 1 s; the last reason: broken, an update was torn\. S"):
        ask(server.address, lambda c: c.wait_ready(timeout_s=1), **QUICK)
    server.stop()
    with pytest.raises(ServingError, match=r"not ready within 1 s.*ConnectError"):
        ask(server.address, lambda c: c.wait_ready(timeout_s=1))


def test_waiting_does_not_outlast_a_server_that_hangs(server, ask):
    server.behave = lambda seen: "hang"
    started = time.monotonic()
    with pytest.raises(ServingError, match="the last reason: it did not answer"):
        ask(server.address, lambda c: c.wait_ready(timeout_s=0.1))
    assert time.monotonic() - started < 30


def chain(error):
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


@pytest.mark.parametrize("fault", [None, "drop before", "hang", (500, b"x"), (200, b"x")])
def test_the_token_is_sent_and_stands_in_no_message(server, ask, fault):
    server.token, server.behave = "right-secret", lambda seen: fault
    if fault is None:
        assert ask(server.address, lambda c: c.score(rows(1)), token="right-secret").weight_version == 1
    with pytest.raises((RequestError, ServingError)) as caught:
        ask(server.address, lambda c: c.score(rows(1)), token="wrong-secret", timeout_s=1, **QUICK)
    assert server.seen[-1].headers["authorization"] == "Bearer wrong-secret"
    assert "secret" not in "".join(f"{error!r}{error}{vars(error)}" for error in chain(caught.value))


def test_waiting_with_a_wrong_token_ends_at_once(server, ask):
    server.token = "right"
    with pytest.raises(RequestError, match="401 unauthorized"):
        ask(server.address, lambda c: c.wait_ready(timeout_s=60), token="wrong")
    assert len(server.seen) == 1


def test_closing_ends_a_call_that_another_thread_waits_for(server):
    arrived = threading.Event()

    def hang(seen):
        arrived.set()
        return "hang"

    server.behave = hang
    client = RewardClient(server.address, timeout_s=300)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(client.score, rows(1))
        assert arrived.wait(10)
        client.close()
        with pytest.raises(ServingError, match="closed while a call waited"):
            waiting.result(10)


@pytest.fixture
def audible():
    """Ctrl-C is heard: a shell that starts the tests in the background has them ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("audible")
def test_ctrl_c_ends_the_call_and_its_requests(server):
    main = threading.get_ident()

    def interrupt(seen):
        if seen.number:
            return None
        signal.pthread_kill(main, signal.SIGINT)
        return "hang"

    server.behave = interrupt
    with RewardClient(server.address, timeout_s=300, max_concurrency=1) as client:
        with pytest.raises(KeyboardInterrupt):
            client.score(rows(1))
        assert client.score(rows(1)).rewards == (server.reward([0, 7]),)  # the only slot is free again


def test_ctrl_c_just_after_a_call_was_handed_over_ends_its_requests_too(server, monkeypatch):
    hand_over, asked = asyncio.run_coroutine_threadsafe, threading.Event()

    def interrupt(coroutine, loop):
        hand_over(coroutine, loop)
        assert asked.wait(PATIENCE_S)
        raise KeyboardInterrupt

    def hang_once(seen):
        asked.set()
        return None if seen.number else "hang"

    server.behave = hang_once
    with RewardClient(server.address, timeout_s=300, max_concurrency=1) as client:
        with monkeypatch.context() as patched:
            patched.setattr(asyncio, "run_coroutine_threadsafe", interrupt)
            with pytest.raises(KeyboardInterrupt):
                client.score(rows(1))
        assert client.score(rows(1)).rewards == (server.reward([0, 7]),)
