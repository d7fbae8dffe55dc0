import itertools
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from machine import PATIENCE_S
from rmcore.core.errors import NotReadyError, RequestError, ServingError
from rmcore.serving import client as client_module
from rmcore.serving.client import RewardClient
from rmcore.serving.types import RewardProbe, WeightUpdate

UPDATE = WeightUpdate(
    folder="u1", digest="a" * 64, mode="full", probe=RewardProbe(token_ids=((1, 2),), rewards=(0.5,), tolerance=1e-4)
)
DROPS = ("drop before", "drop after", "drop halfway")


def rows(count):
    return [[index, 7] for index in range(count)]


def refusal(status, field=None):
    return status, {"error": "invalid", "message": f"refused {field} here.", "field": field}


def score(client):
    return client.score(rows(2))


def publish(client):
    return client.publish(UPDATE, timeout_s=60)


STATUSES = {400: RequestError, 401: RequestError, 403: RequestError, 404: RequestError, 409: RequestError,
            413: RequestError, 422: RequestError, 429: NotReadyError, 503: NotReadyError, 500: ServingError,
            502: ServingError, 302: ServingError}  # fmt: skip
GOOD = {"rewards": [1.0, 2.0], "num_tokens": [2, 2], "num_cut": [0, 0], "normalized": False, "weight_version": 1,
        "checkpoint_digest": "d", "policy_version": None}  # fmt: skip
NO_REWARDS = ({"rewards": [1.0]}, {"rewards": [1.0, float("nan")]}, {"rewards": [1.0, None]},
              {"normalized": True}, {"weight_version": 0}, {"surprise": 1}, b"no json",
              b"")  # fmt: skip
FAILS = {
    **{f"{n} tries": (DROPS[0], score, ServingError, rf"POST /score failed in {n} tries .*no server listens", n)
       for n in (1, 3)},
    **{f"status {status}": (refusal(status, "normalize"), score, error, f"{status} invalid: refused normalize here", 1)
       for status, error in STATUSES.items()},
    **{f"no reward {at}": ((200, change if isinstance(change, bytes) else GOOD | change), score, ServingError,
                           r"POST /score .* answered .*one release", 1) for at, change in enumerate(NO_REWARDS)},
    **{f"an update, {drop}": (drop, publish, ServingError, r"broke after POST /weights was sent .*version\(\) tells", 1)
       for drop in DROPS},
    "another server": ((404, b"<html>nothing here"), lambda c: c.version(), RequestError,
                       r"404 .*<html>nothing here.*something else is at this address", 1),
    "no health": (refusal(503), lambda c: c.health(), NotReadyError, "503", 1),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", FAILS)
def test_what_goes_wrong_is_said_and_only_a_connection_that_broke_before_an_answer_is_tried_again(server, ask, name):
    """Never an answer, whatever it is, and never an update that was sent."""
    behaviour, call, error, match, num_seen = FAILS[name]
    server.behave = lambda seen: behaviour
    with pytest.raises(error, match=match) as caught:
        ask(server.address, call, attempts=1 if name == "1 tries" else 3)
    assert type(caught.value) is error
    assert len(server.seen) == num_seen


@pytest.mark.parametrize("fault", DROPS)
def test_a_broken_connection_is_tried_again_after_pauses_that_grow_until_it_holds(server, ask, monkeypatch, fault):
    monkeypatch.setattr(client_module, "FIRST_PAUSE_S", 0.02)
    server.behave = lambda seen: fault if seen.number < 3 else None
    answer = ask(server.address, lambda c: c.score(rows(4)), attempts=4)
    assert list(answer.rewards) == list(map(server.reward, rows(4)))
    gaps = [after.at_s - before.at_s for before, after in itertools.pairwise(server.seen)]
    assert all(gap >= least for gap, least in zip(gaps, (0.02, 0.04, 0.08), strict=True))


def test_a_server_that_died_and_is_back_gives_right_answers(server, ask):
    def die(seen):
        if seen.number != 3:
            return None
        threading.Thread(target=lambda: (server.stop(), server.start())).start()
        return "hang"

    server.behave = die
    few = {"batch_size": 1, "max_concurrency": 1, "attempts": 50}
    assert list(ask(server.address, lambda c: c.score(rows(12)), **few).rewards) == list(map(server.reward, rows(12)))


@pytest.mark.parametrize("call", [score, lambda c: c.health(), lambda c: c.publish(UPDATE, timeout_s=0.05)])
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
    assert ask(server.address, publish).weight_version == 2
    assert [(seen.path, WeightUpdate.model_validate(seen.body)) for seen in server.seen] == [("/weights", UPDATE)]


@pytest.mark.parametrize("call", [publish, lambda c: c.wait_ready(timeout_s=60)], ids=["update", "waiting"])
def test_a_server_that_does_not_listen_yet_is_tried_again(server, ask, call):
    server.stop()
    starter = threading.Timer(0.05, server.start)

    def start_and_call(client):
        starter.start()
        return call(client)

    ask(server.address, start_and_call, attempts=100)
    assert len(server.done) == 1


def test_waiting_ends_as_soon_as_the_server_is_ready(server, ask):
    answers = [refusal(503), (503, server.health("starting", "loads")), "drop before", refusal(500), (200, b"{}")]
    server.behave = lambda seen: answers[seen.number] if seen.number < len(answers) else None
    assert ask(server.address, lambda c: c.wait_ready(timeout_s=60)).ready
    assert len(server.seen) == len(answers) + 1
    server.behave = lambda seen: answers[1]
    health = ask(server.address, lambda c: c.health())
    assert (health.ready, health.state, health.reason) == (False, "starting", "loads")


def test_waiting_in_vain_tells_the_last_reason_and_does_not_outlast_a_server_that_hangs(server, ask):
    server.behave = lambda seen: (503, server.health("broken", "an update was torn."))
    with pytest.raises(ServingError, match=r"not ready within 1 s; the last reason: broken, an update was torn\. S"):
        ask(server.address, lambda c: c.wait_ready(timeout_s=1))
    server.behave = lambda seen: "hang"
    started = time.monotonic()
    with pytest.raises(ServingError, match=r"the last reason: GET /health .* had no answer within"):
        ask(server.address, lambda c: c.wait_ready(timeout_s=0.1))
    assert time.monotonic() - started < 30
    server.stop()
    # On a busy machine the time is over before the port has refused.
    with pytest.raises(ServingError, match=r"not ready within 0\.1 s.*Connect(Error|Timeout)"):
        ask(server.address, lambda c: c.wait_ready(timeout_s=0.1))


def chain(error):
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


@pytest.mark.parametrize("fault", [None, "drop before", "hang", (500, b"x"), (200, b"x")])
def test_the_token_is_sent_and_is_in_no_message(server, ask, fault):
    server.token, server.behave = "right-secret", lambda seen: fault
    if fault is None:
        assert ask(server.address, lambda c: c.score(rows(1)), token="right-secret").weight_version == 1
        with pytest.raises(RequestError, match="401 unauthorized"):
            ask(server.address, lambda c: c.wait_ready(timeout_s=60), token="wrong")
    with pytest.raises((RequestError, ServingError)) as caught:
        ask(server.address, lambda c: c.score(rows(1)), token="wrong-secret", timeout_s=1)
    assert server.seen[-1].headers["authorization"] == "Bearer wrong-secret"
    assert "secret" not in "".join(f"{error!r}{error}{vars(error)}" for error in chain(caught.value))


def test_closing_ends_a_call_that_another_thread_waits_for(server):
    arrived = threading.Event()
    server.behave = lambda seen: arrived.set() or "hang"
    client = RewardClient(server.address, timeout_s=300)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(client.score, rows(1))
        assert arrived.wait(PATIENCE_S)
        client.close()
        with pytest.raises(ServingError, match="closed while a call waited"):
            waiting.result(PATIENCE_S)


def test_ctrl_c_ends_the_call_and_its_requests_and_sends_nothing_more(server):
    main = threading.get_ident()
    # Ctrl-C is heard: a shell that starts the tests in the background has them ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def hang_once(seen):
        if seen.number:
            return None
        signal.pthread_kill(main, signal.SIGINT)
        return "hang"

    server.behave = hang_once
    with RewardClient(server.address, timeout_s=300, max_concurrency=1, batch_size=1) as client:
        with pytest.raises(KeyboardInterrupt):
            client.score(rows(9))
        assert client.score(rows(1)).rewards == (server.reward([0, 7]),)  # the only slot is free again
    assert len(server.seen) == 2
    signal.signal(signal.SIGINT, before)
