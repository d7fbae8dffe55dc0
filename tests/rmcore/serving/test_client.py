import asyncio
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from machine import PATIENCE_S
from rmcore.core.errors import ConfigError, RequestError, ServingError
from rmcore.serving.client import RewardClient


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
