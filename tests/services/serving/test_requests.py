"""What a reward server answers: PyTorch's rewards, or a refusal that names the field."""

import contextlib
import json
import math
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


def test_normalizing_is_one_sigmoid(client):
    plain, normal = client.score(world.INPUTS), client.score(world.INPUTS, normalize=True, policy_version=7)
    assert normal.rewards == pytest.approx([1 / (1 + math.exp(-reward)) for reward in plain.rewards], abs=1e-5)
    assert (plain.normalized, normal.normalized) == (False, True)
    assert (plain.policy_version, normal.policy_version) == (None, 7)


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


def test_nothing_to_score_is_no_error(client):
    answer = client.score([])
    assert answer.rewards == ()
    assert answer.weight_version >= 1


def post(raw, content, **headers):
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    return raw.post("/score", content=body, headers={"Content-Type": "application/json"} | headers)


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        ({"inputs": [""]}, 422, "inputs.0"),
        ({"inputs": ["a", [1, -1]]}, 422, "inputs.1.1"),
        ({"inputs": ["a", [1, 10**6]]}, 422, "inputs.1"),
        ({"inputs": [{"prompt": "a"}]}, 422, "inputs.0.response"),
        ({"inputs": ["a"], "normalise": True}, 422, "normalise"),
        ({"inputs": ["a"], "over_length": "drop"}, 422, "over_length"),
        ({}, 422, "inputs"),
        ([], 422, "body"),
        (b'{"inputs": ["\xff"]}', 422, "body"),
        (b'{"inputs": ["a"', 422, "body"),
        (b'{"inputs": [NaN]}', 422, "inputs.0"),
        ({"inputs": ["x" * 2**20]}, 413, None),
        ({"inputs": [[7]] * 601}, 429, None),
    ],
)
def test_bad_input_is_refused_with_its_field_and_the_server_lives(raw, body, status, field):
    answer = post(raw, body)
    assert answer.status_code == status, answer.text
    assert answer.json()["field"] == field
    assert answer.json()["message"]
    assert post(raw, {"inputs": ["a"]}).status_code == 200


@pytest.mark.parametrize(("path", "form"), [("/classify", "probs"), ("/pooling", "data")])
@pytest.mark.parametrize("as_ids", [False, True])
def test_vllms_protocol_is_answered_as_vllm_itself_does(server, raw, client, path, form, as_ids):
    """The same request, here and at the vLLM behind it, which its own user reaches by a Unix socket."""
    rm = world.served_model(client)
    rows = [side.ids for side in rm.renderer.tokenize_sides(world.PAIRS)]
    given = rows if as_ids else [rm.renderer.render(*pair) for pair in world.PAIRS]
    words = next(line for line in family(server.pid).values() if "--uds" in line)
    inner = httpx.HTTPTransport(uds=words[words.index("--uds") + 1])
    body = {"model": "reward", "input": given, "use_activation": False}
    with httpx.Client(transport=inner, base_url="http://vllm", timeout=PATIENCE_S) as vllm:
        theirs = vllm.post(path, json=body).json()
        [their_model] = vllm.get("/v1/models").json()["data"]
    ours = raw.post(path, json=body | {"model": None}).json()
    assert ours.keys() - {"warnings"} == theirs.keys()
    assert ours["warnings"] == []
    assert [row.keys() for row in ours["data"]] == [row.keys() for row in theirs["data"]]
    for one, other in zip(ours["data"], theirs["data"], strict=True):
        assert one[form] == world.close(other[form])
    assert ours["usage"]["prompt_tokens"] == theirs["usage"]["prompt_tokens"]
    [model] = raw.get("/v1/models").json()["data"]
    assert model.keys() >= their_model.keys() - {"permission"}
    assert model["max_model_len"] == their_model["max_model_len"]


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


def test_what_it_says_of_itself(client, raw, checkpoint):
    health, version = client.health(), client.version()
    assert (health.kind, health.ready, health.state, health.pooling) == ("reward_model", True, "ready", "last")
    assert health.max_seq_len == world.MAX_SEQ_LEN
    assert version.checkpoint == str(checkpoint)
    assert health.weight_version == version.weight_version
    client.score([[5]] * 3)
    text = raw.get("/metrics").text
    assert f"rm_weight_version {version.weight_version}.0" in text
    assert 'rm_requests_total{path="/score",status="200"}' in text
    assert "rm_ready 1.0" in text
