import asyncio
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from machine import PATIENCE_S
from rmcore.core.errors import ConfigError, NotReadyError, RequestError, ServingError
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


def test_the_batch_that_is_answered_last_stands_where_it_was_given(server, ask):
    others_came = asyncio.Event()

    def behave(seen):
        if seen.inputs == [[0, 7]]:
            return others_came
        if len(server.done) == 6:
            others_came.set()  # this one, the seventh, is answered before those who wait hear of it
        return None

    server.behave = behave
    answer = ask(server.address, lambda c: c.score(rows(8)), batch_size=1, max_concurrency=2)
    assert [seen.inputs for seen in server.done][-1] == [[0, 7]]
    assert list(answer.rewards) == list(map(server.reward, rows(8)))


def test_all_forms_of_input_and_all_settings_reach_the_server(server, ask):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    inputs = ["text", turns, [1, 2], {"prompt": turns, "response": "c"}, {"prompt": "p", "response": ""}]
    server.reward = lambda given, version: 0.25
    answer = ask(
        server.address, lambda c: c.score(inputs, normalize=True, over_length="cut", policy_version=3), batch_size=9
    )
    assert server.seen[0].body == {"inputs": inputs, "normalize": True, "over_length": "cut", "policy_version": 3}
    assert (answer.normalized, answer.num_cut, answer.policy_version) == (True, (2,) * 5, 3)


def test_no_inputs_still_tell_the_served_version(server, ask):
    server.weights = lambda seen: (8, "e" * 64)
    answer = ask(server.address, lambda c: c.score([]))
    assert (answer.rewards, answer.weight_version, answer.checkpoint_digest) == ((), 8, "e" * 64)
    assert [seen.inputs for seen in server.seen] == [[]]


def test_concurrency_is_reached_and_never_exceeded_over_all_threads(server):
    three = asyncio.Event()
    server.behave = lambda seen: three.set() if server.num_open == 3 else three  # none is answered before
    with RewardClient(server.address, batch_size=1, max_concurrency=3) as client, ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda _: client.score(rows(6)), range(4)))
    assert {answer.rewards for answer in answers} == {tuple(map(server.reward, rows(6)))}
    assert server.peak == 3
    assert server.num_connections <= 3


def test_a_field_is_named_by_its_place_in_the_callers_list_by_the_server_and_before_anything_is_sent(server, ask):
    inputs = [*rows(7), {"prompt": "p"}, *rows(3)]
    with pytest.raises(RequestError, match=r"^inputs\.7\.response: Field required; nothing was sent"):
        ask(server.address, lambda c: c.score(inputs), batch_size=3)
    assert server.seen == []
    server.behave = lambda seen: refusal(422, "inputs.1.response") if [7, 7] in seen.inputs else None
    with pytest.raises(RequestError, match=r"refused inputs\.7\.response here"):
        ask(server.address, lambda c: c.score(rows(11)), batch_size=3)


@pytest.mark.slow
@settings(max_examples=15)
@given(num_old=st.integers(0, 9), batch_size=st.integers(1, 4), max_concurrency=st.integers(1, 4))
def test_an_update_that_goes_by_leaves_an_answer_of_one_version(
    running_server, ask, num_old, batch_size, max_concurrency
):
    with running_server() as server:
        server.weights = lambda seen: (1, "d") if seen.number < num_old else (2, "e")
        inputs = [[index, *range(index)] for index in range(9)]
        answer = ask(server.address, lambda c: c.score(inputs), batch_size=batch_size, max_concurrency=max_concurrency)
        num_batches = -(-9 // batch_size)
        version = 1 if num_old >= num_batches else 2
        assert (answer.weight_version, answer.checkpoint_digest) == ((1, "d") if version == 1 else (2, "e"))
        assert list(answer.rewards) == [server.reward(row, version) for row in inputs]
        assert list(answer.num_tokens) == list(map(len, inputs))
        assert server.peak <= max_concurrency
        assert len(server.seen) == num_batches + (num_old if version == 2 else 0)


@pytest.mark.parametrize(
    ("after", "num_again"),
    [((1, "d"), 4), ((7, "e"), 2)],  # a lower version may be of a slow answer: only the second round shows a new life
    ids=["version counts anew", "other checkpoint, same version"],
)
def test_a_server_that_was_restarted_between_batches_gives_an_answer_of_its_new_life(server, ask, after, num_again):
    server.weights = lambda seen: (7, "d") if seen.number < 2 else after
    answer = ask(server.address, lambda c: c.score(rows(4)), batch_size=1, max_concurrency=1)
    assert (answer.weight_version, answer.checkpoint_digest) == after
    assert list(answer.rewards) == [server.reward(row, after[0]) for row in rows(4)]
    assert len(server.seen) == 4 + num_again


def test_updates_without_end_are_an_error_and_no_mixture(server, ask):
    server.weights = lambda seen: (seen.number + 1, "d")
    with pytest.raises(ServingError, match=r"weight versions \[.*\], after 3 rounds.*Score fewer inputs"):
        ask(server.address, lambda c: c.score(rows(3)), batch_size=1, attempts=3)
    assert len(server.seen) == 3 + 2 + 2


BAD_ARGUMENTS = [
    *({"address": one} for one in ("", "localhost:80", "ftp://h", "http://", "http://h?x=1", "http://h:x")),
    *({"address": "http://u:secret@h"}, {"batch_size": 0}, {"batch_size": 5000}, {"timeout_s": float("nan")}),
    *({"max_concurrency": 0}, {"attempts": 0}),
    *({"token": one} for one in ("", "secret\n", "a secret", "secrét")),
]


@pytest.mark.parametrize("arguments", BAD_ARGUMENTS, ids=str)
def test_arguments_that_cannot_work_are_refused_and_no_secret_is_shown(arguments):
    with pytest.raises(ConfigError, match="the token is empty or holds" if "token" in arguments else None) as caught:
        RewardClient(**{"address": "http://localhost:1"} | arguments)
    assert "secr" not in str(caught.value)


def test_a_path_before_the_routes_is_kept_and_loopback_is_not_asked_through_a_proxy(server, ask, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    assert ask(f"{server.address}/models/a/", lambda c: c.version()).weight_version == 1
    assert server.seen[0].path == "/models/a/version"


def test_a_closed_client_says_so_without_its_token(server):
    client = RewardClient(server.address, token="secret")
    assert repr(client) == f"RewardClient('{server.address}')"
    client.close()
    client.close()
    with pytest.raises(ServingError, match=r"RewardClient.* was closed"):
        client.version()


@pytest.mark.slow
def test_a_program_that_forgets_to_close_its_client_ends_and_torch_was_not_imported(server):
    program = (
        "import sys; from rmcore.serving.client import RewardClient; import rmcore.serving.scorer\n"
        f"client = RewardClient({server.address!r}); print(client.version().weight_version, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, timeout=PATIENCE_S, env=os.environ, text=True
    )
    assert (done.stdout, done.stderr, done.returncode) == ("1 False\n", "", 0)


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
    with pytest.raises(ServingError, match=r"not ready within 5 s; the last reason: broken, an update was torn\. S"):
        ask(server.address, lambda c: c.wait_ready(timeout_s=5))
    server.behave = lambda seen: "hang"
    started = time.monotonic()
    with pytest.raises(ServingError, match=r"the last reason: GET /health .* (had no answer within|Connect)"):
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
    # A shell that starts the tests in the background lets them ignore Ctrl-C.
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
