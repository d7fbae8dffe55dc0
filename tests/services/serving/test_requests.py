"""What a reward server answers: PyTorch's rewards, or a refusal that names the field."""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

import serving_world as world
from machine import PATIENCE_S, family
from rmcore.core.errors import RequestError
from rmcore.data.rendering import TokenizedSide

pytestmark = pytest.mark.services
DIALOGUE = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name a colour."}]


def test_every_form_of_an_input_gives_pytorchs_reward(client):
    rm = world.served_model(client)
    as_pairs = client.score(world.INPUTS)
    assert as_pairs.rewards == world.close(world.expected(rm))
    as_messages = client.score(
        [[{"role": "user", "content": a}, {"role": "assistant", "content": b}] for a, b in world.PAIRS]
    )
    as_text = client.score([rm.renderer.render(prompt, response) for prompt, response in world.PAIRS])
    sides = rm.renderer.tokenize_sides(world.PAIRS)
    as_ids = client.score([side.ids for side in sides])
    for answer in (as_messages, as_text, as_ids):
        assert answer.rewards == world.close(as_pairs.rewards)
        assert list(answer.num_tokens) == [len(side.ids) for side in sides]
        assert not any(answer.num_cut)
    mixed = client.score(["plain text", [5, 6, 7], {"prompt": DIALOGUE, "response": "Red."}, sides[0].ids])
    alone = rm.score_sides([TokenizedSide([5, 6, 7], 0)]).tolist()
    assert [mixed.rewards[1], mixed.rewards[3]] == world.close([*alone, as_pairs.rewards[0]])


def test_what_is_too_long_is_cut_by_choice_only(client):
    rm = world.served_model(client)
    long = [("Tell me. " * 60, "No. " * 200), ("Short.", "Yes.")]
    inputs = [{"prompt": prompt, "response": response} for prompt, response in long]
    with pytest.raises(RequestError, match=rf"inputs.0: .* more than the {world.MAX_SEQ_LEN}"):
        client.score(inputs)
    cut = client.score(inputs, over_length="cut")
    assert cut.rewards == world.close(world.expected(rm, long))
    assert cut.num_tokens[0] == world.MAX_SEQ_LEN
    assert cut.num_cut[0] > 0 == cut.num_cut[1]
    ids = list(range(5, 5 + world.MAX_SEQ_LEN + 9))
    with pytest.raises(RequestError, match=r"inputs\.0"):
        client.score([ids])
    assert client.score([ids], over_length="cut").num_cut == (9,)


def test_nothing_of_it_but_the_http_app_listens_on_the_network(server):
    open_ones = []
    for process in [psutil.Process(server.pid), *family(server.pid)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            open_ones += process.net_connections("inet")
    listening = [connection for connection in open_ones if connection.status == psutil.CONN_LISTEN]
    host, port = server.address.removeprefix("http://").split(":")
    addresses = {(connection.laddr.ip, connection.laddr.port) for connection in listening}
    assert (host, int(port)) in addresses
    assert all(ip in ("127.0.0.1", "::1") for ip, _ in addresses)
    others = [port for _, port in addresses - {(host, int(port))}]

    def speaks_http(other):
        try:
            return httpx.get(f"http://127.0.0.1:{other}/health", timeout=2)
        except httpx.HTTPError:
            return None

    with ThreadPoolExecutor(len(others) + 1) as pool:  # vLLM's processes speak among themselves; none of that is HTTP
        assert not [*filter(None, pool.map(speaks_http, others))]


def test_what_it_says_of_itself(server, client, checkpoint):
    health, version = client.health(), client.version()
    assert (health.kind, health.ready, health.state, health.pooling) == ("reward_model", True, "ready", "last")
    assert health.max_seq_len == world.MAX_SEQ_LEN
    assert version.checkpoint == str(checkpoint)
    assert health.weight_version == version.weight_version
    client.score([[5]] * 3)
    bearer = {"Authorization": f"Bearer {world.TOKEN}"}
    assert "vllm:" in httpx.get(f"{server.address}/metrics", headers=bearer, timeout=PATIENCE_S).text
