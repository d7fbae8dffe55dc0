"""A server that adds further rewards to its own: sums, what each adds, who is trusted, and no partial sum."""

import asyncio
import socketserver
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler

import httpx
import pytest
from pydantic import ValidationError

import serving_world as world
from rmcore.core.errors import ConfigError, RmcoreError, ServingError
from rmcore.serving.client import RewardClient
from rmcore.serving.further_rewards import FurtherRewards
from rmcore.serving.reward_functions import openrlhf, verl
from rmcore.serving.reward_functions.trl import reward_function
from rmcore.serving.scorer import RewardModelScorer, Rollout, Step
from rmcore.serving.server import ServeSettings
from rmcore.serving.signatures import SIGNATURE, SignedRequests
from rmcore.serving.token_file import kept_token
from rmcore.serving.types import ScoringRequest
from torch_engine import answering_with

TOKEN = "a-token-of-both-servers"
CLOSE = 1e-5
FUNCTIONS = """
import threading

def length(prompt, response):
    return len(response)

def turns(prompt, response):
    return 0.0 if isinstance(prompt, str) else len(prompt)

def fails(prompt, response):
    return {}[response]

def nothing(prompt, response):
    return float("nan") if response == "4" else 1.0

def huge(prompt, response):
    return 1e300

running, most, entered, leave = [], [], threading.Event(), threading.Event()

def gated(prompt, response):
    running.append(response)
    most.append(len(running))
    entered.set()
    leave.wait(60)
    running.remove(response)
    return 1.0
"""


@pytest.fixture(autouse=True)
def functions(tmp_path, monkeypatch):
    (tmp_path / "further_functions.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RM_OPT_TOKEN", raising=False)


def named(function):
    return f"further_functions:{function}"


def address_of(app):
    return f"http://127.0.0.1:{app.port}"


@contextmanager
def two_servers(rm, folder, protocols=(), **more):
    """One that sums the rewards of `rm`, of another model behind a server of its own, and of functions."""
    other = world.new_model(1)
    with answering_with(other, folder, token=TOKEN) as peer:
        rewards = {address_of(peer): 2.0, **more}
        with answering_with(rm, folder, rewards, token=TOKEN, protocols=protocols) as app:
            app.peer, app.peer_rm = peer, other
            yield app


@contextmanager
def asking(app, **settings):
    with RewardClient(address_of(app), token=TOKEN, **settings) as client:
        yield client


@contextmanager
def impostor(answer):
    """A program at an address that is named as a peer's; all that it is sent."""
    seen = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            seen.append(f"{self.headers}{self.path}{body}")
            status, body, signature = answer(self, body)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header(SIGNATURE, signature)
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *_): ...

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", seen
        finally:
            server.shutdown()
            thread.join()


def scored_by(address):
    """The rewards of a peer at an address."""

    async def run():
        further = FurtherRewards.named({address: 1.0}, TOKEN)
        try:
            return (await further.peers[address].score(ScoringRequest.from_list(world.INPUTS))).rewards
        finally:
            await further.aclose()

    return asyncio.run(run())


def check(weights, token=TOKEN):
    async def run():
        further = FurtherRewards.named(weights, token)
        try:
            await further.check()
        finally:
            await further.aclose()

    asyncio.run(run())


@pytest.mark.slow
def test_rewards_are_the_weighted_sums_and_parts_say_what_each_adds(rm, tmp_path):
    more = {named("length"): 0.25, named("turns"): -1.0}
    dialogue = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name a colour."}]
    inputs = [*world.INPUTS, [*dialogue, {"role": "assistant", "content": "Red."}]]
    with two_servers(rm, tmp_path, **more) as app, asking(app, batch_size=2) as client:
        answer, version = client.score(inputs, policy_version=3), client.version()
        with RewardClient(address_of(app.peer), token=TOKEN) as other, asking(app.peer) as alone:
            peer = other.score(inputs).rewards
            assert alone.version().more_rewards is None
        digest = client.version().checkpoint_digest
    with answering_with(rm, tmp_path, token=TOKEN) as app, asking(app) as client:
        own = client.score(inputs)
    assert own.parts is own.further is None
    address = next(iter(answer.further))
    texts = [*(response for _, response in world.PAIRS), "Red."]
    expected = {
        "own": own.rewards,
        address: [2 * one for one in peer],
        named("length"): [0.25 * len(one) for one in texts],
        named("turns"): [-1.0 * turns for turns in (0, 0, 0, 0, 2)],
    }
    assert list(answer.parts) == list(expected)
    for name, part in expected.items():
        assert list(answer.parts[name]) == pytest.approx(list(part), abs=CLOSE), name
    assert list(answer.rewards) == pytest.approx([sum(one) for one in zip(*expected.values(), strict=True)], abs=CLOSE)
    assert (answer.num_tokens, answer.policy_version) == (own.num_tokens, 3)
    assert (answer.weight_version, answer.checkpoint_digest) == (1, digest)
    assert (answer.further[address].weight_version, answer.further[address].weight) == (1, 2.0)
    assert answer.further[named("length")].model_dump() == {"weight": 0.25}
    assert version.more_rewards == {address: 2.0, **more}


@pytest.mark.parametrize(
    ("function", "said"),
    [("fails", r"fails failed with KeyError: '4'"), ("nothing", r"nothing gave nan for the response '4'")],
)
def test_a_function_that_fails_fails_the_request(rm, tmp_path, function, said):
    with answering_with(rm, tmp_path, {named(function): 0.5}, token=TOKEN) as app, asking(app) as client:
        with pytest.raises(ServingError, match=rf"--more-rewards=further_functions:{said}"):
            client.score(world.INPUTS[:1])
        if function == "nothing":
            assert client.score(world.INPUTS[1:]).rewards


def test_a_sum_that_is_not_finite_is_no_answer(rm, tmp_path):
    more = {named("huge"): 1e300, named("length"): 1.0}
    with (
        answering_with(rm, tmp_path, more, token=TOKEN) as app,
        asking(app) as client,
        pytest.raises(ServingError, match=r"inputs\.0: the weighted rewards .* no finite sum"),
    ):
        client.score(world.INPUTS)


@pytest.mark.slow
def test_a_peer_that_is_away_or_refuses_fails_the_request(rm, tmp_path):
    lengths = rm.renderer.tokenize_sides([("a", "b " * number) for number in range(200)])
    long = "b " * max(
        number for number, side in enumerate(lengths) if not side.num_cut
    )  # 128 tokens, the peer reads 96
    with answering_with(world.new_model(1), tmp_path, token=TOKEN) as peer:
        address = address_of(peer)
        serving = answering_with(rm, tmp_path, {address: 1.0}, token=TOKEN)
        app = serving.__enter__()
        with asking(app) as client, pytest.raises(RmcoreError, match=rf"{address} answered 422.*inputs\.1: .* the 96"):
            client.score([world.INPUTS[0], {"prompt": "a", "response": long}])
    try:
        with asking(app) as client, pytest.raises(ServingError, match=rf"{address} could not be reached"):
            client.score(world.INPUTS)
    finally:
        serving.__exit__(None, None, None)


def test_what_has_no_prompt_and_response_or_is_to_be_a_probability_is_refused(rm, tmp_path):
    with answering_with(rm, tmp_path, {named("length"): 1.0}, token=TOKEN) as app, asking(app) as client:
        for given in ("a rendered text", [5, 6, 7]):
            with pytest.raises(RmcoreError, match=r"inputs\.1: it is a rendered text or token ids"):
                client.score([world.INPUTS[0], given])
        with pytest.raises(RmcoreError, match=r"normalize: .* no log-odds"):
            client.score(world.INPUTS, normalize=True)
        assert client.score([]).parts == {"own": (), named("length"): ()}


@pytest.mark.parametrize("kept", [False, True], ids=["shared", "kept"])
def test_a_peer_signs_with_the_token_that_it_shares(rm, tmp_path, kept):
    with answering_with(rm, tmp_path, token=TOKEN) as peer:
        weights = {address_of(peer): 1.0}
        if kept:
            with pytest.raises(ServingError, match="not signed with the token"):
                check(weights, "another-token-of-another")
            with kept_token(address_of(peer), TOKEN):
                check(weights, "another-token-of-another")
        else:
            check(weights)


@pytest.mark.slow
def test_no_token_is_sent_and_no_answer_of_another_program_is_taken(rm, tmp_path):
    """Neither of one that answers anything, nor of one that changes what a real server answers, or repeats it."""
    with answering_with(rm, tmp_path, token=TOKEN) as real:
        said = []

        def relayed(request, body):
            headers = {name: request.headers[name] for name in ("Authorization", "Content-Type")}
            found = httpx.post(address_of(real) + request.path, headers=headers, content=body, timeout=60)
            said.append((found.status_code, found.content, found.headers[SIGNATURE]))
            return said[-1]

        def changed(request, body):
            status, content, signature = relayed(request, body)
            return status, content.replace(b"[", b"[1"), signature

        with impostor(relayed) as (address, seen):
            assert scored_by(address) == pytest.approx(scored_by(address_of(real)), abs=CLOSE)
            assert TOKEN not in "".join(seen)
        for answer in (lambda *_: (200, b"yes", "no"), changed, lambda *_: said[0]):
            with impostor(answer) as (address, seen):
                with pytest.raises(ServingError, match=f"{address} of --more-rewards is not signed"):
                    scored_by(address)
                assert seen
                assert TOKEN not in "".join(seen)


@pytest.mark.slow
def test_a_signature_is_of_one_request_and_opens_no_other_route(rm, tmp_path):
    with answering_with(rm, tmp_path, token=TOKEN) as app:
        body = ScoringRequest.from_list(world.INPUTS).model_dump_json().encode()
        for signer, path, sent, status in (
            (TOKEN, "/score", body, 200),
            (TOKEN, "/score", body.replace(b"4", b"5"), 401),
            (TOKEN, "/weights", body, 401),
            ("another-token-of-another", "/score", body, 401),
        ):
            request = httpx.Request("POST", address_of(app) + path, content=body)
            next(SignedRequests(signer, "it").auth_flow(request))
            headers = {"Authorization": request.headers["Authorization"], "Content-Type": "application/json"}
            answer = httpx.post(address_of(app) + path, content=sent, headers=headers, timeout=60)
            assert answer.status_code == status
        for given in ("RM-HMAC", "RM-HMAC a b", "RM-HMAC a b é c"):
            headers = {"Authorization": given.encode()}
            assert httpx.get(f"{address_of(app)}/version", headers=headers).status_code == 401


def test_a_token_that_can_be_guessed_signs_nothing():
    with pytest.raises(ConfigError, match="5 characters"):
        check({"http://127.0.0.1:1": 1.0}, "short")


def test_a_function_is_called_by_one_thread_also_after_its_request_has_failed():
    async def run():
        further = FurtherRewards.named({named("gated"): 1.0}, TOKEN)
        module = sys.modules["further_functions"]
        asked, dialogues = ScoringRequest.from_list(world.INPUTS[:1]), [world.PAIRS[0]]
        first = asyncio.create_task(further.added(asked, dialogues))
        assert await asyncio.to_thread(module.entered.wait, 60)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        second = asyncio.create_task(further.added(asked, dialogues))
        await asyncio.sleep(0.2)  # in which a second thread would have begun
        module.leave.set()
        assert (await second)[0] == {named("gated"): (1.0,)}
        await further.aclose()
        return module.most

    sys.modules.pop("further_functions", None)
    assert asyncio.run(run()) == [1, 1]


def test_servers_ask_one_another_in_no_circle(rm, tmp_path):
    with (
        answering_with(rm, tmp_path, {named("length"): 1.0}, token=TOKEN) as app,
        pytest.raises(ConfigError, match="further rewards itself"),
    ):
        check({address_of(app): 1.0})


def test_a_peer_that_is_restarted_with_further_rewards_is_not_summed(rm, tmp_path):
    with (
        answering_with(rm, tmp_path, {named("length"): 1.0}, token=TOKEN) as app,
        pytest.raises(ServingError, match="further rewards itself"),
    ):
        scored_by(address_of(app))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("harmless/best", "neither module:function nor the address .* `rm-opt serve --checkpoint harmless/best`"),
        ("further_functions:absent", "has no absent"),
        ("http://127.0.0.1:1", "could not be reached"),
        ("http://me:secret@127.0.0.1:1", "holds a user's name or password"),
    ],
)
def test_a_further_reward_that_is_not_there_is_refused_at_the_start(name, said):
    with pytest.raises(RmcoreError, match=said):
        check({name: 1.0})


@pytest.mark.parametrize("weight", [0.0, float("inf")])
def test_weights_are_those_of_the_trainers_setting(weight):
    with pytest.raises(ValidationError, match=r"give one other than 0|a finite number"):
        ServeSettings("out/best", more_rewards={named("length"): weight})


@pytest.mark.slow
def test_other_trainers_get_the_sum_and_the_parts_where_their_form_has_a_place(rm, tmp_path, monkeypatch):
    more = {named("length"): 0.5}
    prompt, response = world.PAIRS[1]
    spoken = ("vllm", "openrlhf", "slime")
    with two_servers(rm, tmp_path, spoken, **more) as app, asking(app) as client:
        [total] = (answer := client.score([{"prompt": prompt, "response": response}])).rewards
        parts = {name: part[0] for name, part in answer.parts.items()}
        total = pytest.approx(total, abs=CLOSE)
        bearer = {"Authorization": f"Bearer {TOKEN}"}

        def post(path, body):
            return httpx.post(f"{address_of(app)}/{path}", json=body, headers=bearer, timeout=60)

        found = post("get_reward", {"query": [prompt + response], "prompts": [prompt], "labels": ["4"]}).json()
        assert found["rewards"] == found["scores"] == [total]
        assert found["extra_logs"] == {name: [pytest.approx(part, abs=CLOSE)] for name, part in parts.items()}
        assert post("slime", {"prompt": prompt, "response": response, "label": None}).json() == total
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
        assert post("classify", {"messages": messages}).json()["data"][0]["probs"] == [total]
        refused = post("classify", {"input": prompt + response})
        assert (refused.status_code, refused.json()["field"]) == (422, "inputs.0")

        logged = {}
        assert reward_function(client)([prompt], [response], answer=["4"], log_metric=logged.__setitem__) == [total]
        assert logged == {f"parts/{name}": pytest.approx(part, abs=CLOSE) for name, part in parts.items()}
        rollout = Rollout([Step(prompt=prompt, completion=response)])
        assert RewardModelScorer(client).score([rollout]) == [total]
        assert rollout.meta["rm_score_parts"] == pytest.approx(parts, abs=CLOSE)
        monkeypatch.setenv("RM_OPT_TOKEN", TOKEN)
        monkeypatch.setattr(openrlhf, "SERVER", address_of(app))
        logs = openrlhf.reward_func([prompt + response], [prompt], ["4"])["extra_logs"]
        assert {name: part.item() for name, part in logs.items()} == pytest.approx(parts, abs=CLOSE)
        try:
            found = verl.compute_score("a/b", response, "4", {"prompt": prompt}, server=address_of(app))
        finally:
            verl._client(address_of(app)).close()
            verl._client.cache_clear()
        assert found == pytest.approx({"score": total.expected, **parts}, abs=CLOSE)


def test_a_list_is_answered_by_one_version_of_every_server(server, ask):
    """A peer's weights change between batches: those of its old version are scored again."""

    def behave(seen):
        version = 1 if seen.number < 2 else 2
        status, body = server._right(seen)
        further = {"http://peer": {"weight": 1.0, "weight_version": version, "checkpoint_digest": "e"}}
        peer = [float(version)] * len(body["rewards"])
        parts = {"own": body["rewards"], "http://peer": peer}
        sums = [own + one for own, one in zip(body["rewards"], peer, strict=True)]
        return status, body | {"rewards": sums, "parts": parts, "further": further}

    server.behave = behave
    rows = [[row] for row in range(4)]
    answer = ask(server.address, lambda client: client.score(rows), batch_size=1, max_concurrency=1)
    assert answer.parts == {"own": tuple(server.reward(row) for row in rows), "http://peer": (2.0,) * 4}
    assert list(answer.rewards) == [server.reward(row) + 2 for row in rows]
    assert answer.further["http://peer"].weight_version == 2
    assert len(server.seen) == 6


@pytest.mark.parametrize("parts", [{"own": [1.0, 2.0]}, {"own": [1.0], "f:g": [1.0]}, None])
def test_an_answer_without_all_parts_is_not_trusted(server, ask, parts):
    def behave(seen):
        status, body = server._right(seen)
        return status, body | {"further": {"f:g": {"weight": 1.0}}} | ({} if parts is None else {"parts": parts})

    server.behave = behave
    with pytest.raises(ServingError, match="the server is at fault"):
        ask(server.address, lambda client: client.score([[1], [2]]))
