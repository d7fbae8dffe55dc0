"""A reward server with real vLLM: rewards are PyTorch's, refusals name the field, weights change as a whole."""

import itertools
import json
import math
import os
import shutil
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from rmcore.config import GoldConfig, LoraSettings, ModelConfig, TrainConfig
from rmcore.data.gold import generate_pairs
from rmcore.data.rendering import TokenizedSide
from rmcore.errors import ConfigError, ModelError, NotReadyError, RequestError, ServingError
from rmcore.lora_targets import make_lora_config
from rmcore.model import BradleyTerryRM
from rmcore.serving.front_door import DoorSettings
from rmcore.serving.parity import BF16_TOLERANCE, FLOAT32_TOLERANCE
from rmcore.serving.process import RewardServer
from rmcore.serving.server import ServeSettings
from rmcore.serving.weight_sync import PublishEvery, create_rm_publisher
from rmcore.tracking import MemoryTracker
from rmcore.trainer.loop import Trainer

pytestmark = pytest.mark.services
TOKEN = "a-secret-of-this-test"
MAX_SEQ_LEN = 96
DIALOGUE = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name a colour."}]
PAIRS = [("What is 2 + 2?", "4"), ("What is 2 + 2?", "Five, I think."), ("Grüße! 🙂", ""), ("Count.", "one two " * 8)]


def new_model(seed: int, *, lora: bool = False) -> BradleyTerryRM:
    """A tiny reward model whose rewards differ by tenths of a logit from those of another seed."""
    settings = ModelConfig(name="tiny", max_seq_len=MAX_SEQ_LEN, lora=LoraSettings(rank=4) if lora else None)
    return BradleyTerryRM.new(settings, seed=seed, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint") / "best"
    new_model(0).save(folder)
    return folder


@pytest.fixture(scope="module")
def server(vllm, checkpoint, tmp_path_factory):
    place = tmp_path_factory.mktemp("server")
    door = DoorSettings(token=TOKEN, max_body_bytes=2**20, max_pending_rows=600)
    settings = ServeSettings(str(checkpoint), port=0, vllm=vllm, weights_folder=place / "weights", door=door)
    with RewardServer(settings, log=place / "server.log") as running:
        yield running


@pytest.fixture
def client(server):
    with server.client() as session:
        yield session


@pytest.fixture
def raw(server):
    """Plain HTTP with the token."""
    with httpx.Client(base_url=server.address, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=60) as session:
        yield session


def close(rewards) -> object:
    return pytest.approx(list(rewards), abs=FLOAT32_TOLERANCE)


def expected(rm: BradleyTerryRM, pairs=PAIRS) -> list[float]:
    return rm.score(*zip(*pairs, strict=True)).tolist()


def publisher_of(server, mode="full"):
    return create_rm_publisher(server.address, token=TOKEN, mode=mode)


def served_model(client) -> BradleyTerryRM:
    """The weights that are served now, as PyTorch reads them."""
    return BradleyTerryRM.from_pretrained(client.version().layout_folder, device="cpu")


def test_every_form_of_an_input_gives_pytorchs_reward(client):
    rm = served_model(client)
    as_pairs = client.score([{"prompt": prompt, "response": response} for prompt, response in PAIRS])
    assert as_pairs.rewards == close(expected(rm))
    as_messages = client.score(
        [[{"role": "user", "content": a}, {"role": "assistant", "content": b}] for a, b in PAIRS]
    )
    as_text = client.score([rm.renderer.render(prompt, response) for prompt, response in PAIRS])
    sides = rm.renderer.tokenize_sides(PAIRS)
    as_ids = client.score([side.ids for side in sides])
    for answer in (as_messages, as_text, as_ids):
        assert answer.rewards == close(as_pairs.rewards)
        assert list(answer.num_tokens) == [len(side.ids) for side in sides]
        assert not any(answer.num_cut)
    mixed = client.score(["plain text", [5, 6, 7], {"prompt": DIALOGUE, "response": "Red."}, sides[0].ids])
    alone = rm.score_sides([TokenizedSide([5, 6, 7], 0)]).tolist()
    assert [mixed.rewards[1], mixed.rewards[3]] == close([*alone, as_pairs.rewards[0]])


def test_normalizing_is_one_sigmoid(client):
    inputs = [{"prompt": prompt, "response": response} for prompt, response in PAIRS]
    plain, normal = client.score(inputs), client.score(inputs, normalize=True, policy_version=7)
    assert normal.rewards == pytest.approx([1 / (1 + math.exp(-reward)) for reward in plain.rewards], abs=1e-5)
    assert (plain.normalized, normal.normalized) == (False, True)
    assert (plain.policy_version, normal.policy_version) == (None, 7)


def test_what_is_too_long_is_cut_by_choice_only(client):
    rm = served_model(client)
    long = [("Tell me. " * 60, "No. " * 200), ("Short.", "Yes.")]
    inputs = [{"prompt": prompt, "response": response} for prompt, response in long]
    with pytest.raises(RequestError, match=rf"inputs.0: .* more than the {MAX_SEQ_LEN}"):
        client.score(inputs)
    cut = client.score(inputs, over_length="cut")
    assert cut.rewards == close(expected(rm, long))
    assert cut.num_tokens[0] == MAX_SEQ_LEN
    assert cut.num_cut[0] > 0 == cut.num_cut[1]
    ids = list(range(5, 5 + MAX_SEQ_LEN + 9))
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


def test_only_json_is_read(raw):
    answer = post(raw, {"inputs": ["a"]}, **{"Content-Type": "text/plain"})
    assert (answer.status_code, answer.json()["field"]) == (422, "content-type")


@pytest.mark.parametrize("path", ["/score", "/health", "/version", "/metrics", "/weights"])
@pytest.mark.parametrize("header", [None, "Bearer wrong", TOKEN, f"Basic {TOKEN}"])
def test_every_route_asks_for_the_token(server, path, header):
    method = "POST" if path in ("/score", "/weights") else "GET"
    headers = {} if header is None else {"Authorization": header}
    answer = httpx.request(method, server.address + path, headers=headers)
    assert (answer.status_code, answer.json()["error"]) == (401, "unauthorized")
    assert TOKEN not in answer.text


@pytest.mark.parametrize(
    "path",
    ["/collective_rpc", "/pause", "/reset_prefix_cache", "/update_weights", "/classify", "/v1/models", "/openapi.json"],
)
def test_vllms_own_routes_cannot_be_reached(raw, path):
    assert raw.post(path, json={"method": "reload_weights"}).status_code == 404


def test_nothing_of_it_but_the_front_door_listens_on_the_network(server):
    family = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
    listening = [c for process in family for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    host, port = server.address.removeprefix("http://").split(":")
    addresses = {(connection.laddr.ip, connection.laddr.port) for connection in listening}
    assert (host, int(port)) in addresses
    assert all(ip in ("127.0.0.1", "::1") for ip, _ in addresses)
    others = [port for _, port in addresses - {(host, int(port))}]
    for other in others:  # vLLM's processes speak among themselves; none of that is HTTP
        with pytest.raises(httpx.HTTPError), httpx.Client(timeout=2) as session:
            session.get(f"http://127.0.0.1:{other}/health")


def test_what_it_says_of_itself(client, raw, checkpoint):
    health, version = client.health(), client.version()
    assert (health.kind, health.ready, health.state, health.pooling) == ("reward_model", True, "ready", "last")
    assert health.max_seq_len == MAX_SEQ_LEN
    assert version.checkpoint == str(checkpoint)
    assert health.weight_version == version.weight_version
    client.score([[5]] * 3)
    text = raw.get("/metrics").text
    assert f"rm_weight_version {version.weight_version}.0" in text
    assert 'rm_requests_total{path="/score",status="200"}' in text
    assert "rm_ready 1.0" in text


@pytest.mark.parametrize("mode", ["full", "head_only", "lora"])
def test_published_weights_answer_as_the_next_version(server, client, mode):
    before = client.version()
    rm = served_model(client)
    if mode == "lora":
        rm.add_lora(make_lora_config(LoraSettings(rank=4)), seed=3)
    torch.manual_seed(len(mode))
    with torch.no_grad():
        for name, parameter in rm.model.named_parameters():
            if (parameter.requires_grad and mode != "head_only") or "score" in name:
                parameter.add_(0.05 * torch.randn_like(parameter))
    published = publisher_of(server, mode).publish(rm)
    assert published.weight_version == before.weight_version + 1
    assert published.mode == mode
    assert published.checkpoint_digest != before.checkpoint_digest
    answer = client.score([{"prompt": prompt, "response": response} for prompt, response in PAIRS])
    assert answer.rewards == close(expected(rm))
    assert (answer.weight_version, answer.checkpoint_digest) == (published.weight_version, published.checkpoint_digest)
    assert expected(served_model(client)) == close(expected(rm))
    folders = [path.name for path in Path(published.weights_folder).iterdir() if path.is_dir()]
    assert folders == [Path(published.layout_folder).name]  # nothing older is kept


def test_a_training_publishes_as_it_goes(server, client, tmp_path):
    begin = client.version().weight_version
    rm = served_model(client)
    pairs = rm.renderer.tokenize_pairs(generate_pairs(GoldConfig(num_prompts=20), seed=0).pairs)
    tracker = MemoryTracker()
    Trainer(
        rm,
        TrainConfig(
            steps=4, pairs_per_step=2, lr=1e-3, eval_every=1, warmup_steps=0, early_stopping_patience=None,
            best_metric="last",
        ),
        train=pairs[:8],
        validation=pairs[8:12],
        folder=tmp_path,
        seed=0,
        tracker=tracker,
        callbacks=[PublishEvery(publisher_of(server), num_steps=2)],
    ).run()  # fmt: skip
    versions = [values.get("cost/published_version") for _, values in tracker.rows]
    assert [version for version in versions if version] == [begin + 1, begin + 2]
    assert client.score([{"prompt": a, "response": b} for a, b in PAIRS]).rewards == close(expected(rm))


def test_a_head_of_other_weights_is_not_taken(server, client):
    """Only the head travels, but the backbone was trained too: the probe shows it, and the old weights serve on."""
    before, rewards = client.version(), client.score([[5, 6, 7]]).rewards
    stranger = new_model(41)
    with pytest.raises(ServingError, match=rf"differ .*(\n.*)*Version {before.weight_version} serves on"):
        publisher_of(server, "head_only").publish(stranger)
    assert client.version().weight_version == before.weight_version
    assert client.health().ready
    assert client.score([[5, 6, 7]]).rewards == close(rewards)


def update_with(server, client, change) -> None:
    """Publish weights whose folder `change` spoils after it was written."""
    publisher = publisher_of(server)
    send = publisher.backend.client.publish

    def spoil(update, **settings):
        change(Path(client.version().weights_folder) / update.folder)
        return send(update, **settings)

    publisher.backend.client.publish = spoil
    publisher.publish(served_model(client))


def truncate(folder):
    path = max(folder.glob("*.safetensors"), key=lambda file: file.stat().st_size)
    os.truncate(path, path.stat().st_size // 2)


def flip(folder):
    path = max(folder.glob("*.safetensors"), key=lambda file: file.stat().st_size)
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def reshape(folder):
    for path in folder.glob("*.safetensors"):
        save_file({name: value[..., :-1].contiguous() for name, value in load_file(path).items()}, path)


@pytest.mark.parametrize("change", [truncate, flip, reshape, shutil.rmtree])
def test_a_spoilt_update_changes_nothing(server, client, change):
    before, rewards = client.version(), client.score([[5, 6, 7]]).rewards
    with pytest.raises(RequestError):
        update_with(server, client, change)
    assert client.version() == before
    assert client.score([[5, 6, 7]]).rewards == close(rewards)


def test_weights_that_are_not_finite_are_not_published(server, client):
    rm = served_model(client)
    with torch.no_grad():
        rm.model.score.weight[0, 0] = math.inf
    with pytest.raises((RequestError, ServingError), match=r"finite|infinity"):
        publisher_of(server).publish(rm)
    assert client.health().ready


def test_updates_go_by_while_requests_are_answered(server, client):
    """At least 1,000 requests, 64 at a time, while 20 updates go by: each reward is that of its version, in order."""
    rms = [new_model(seed) for seed in (100, 101)]
    sides = rms[0].renderer.tokenize_sides([(f"{n} + {n}?", f"{2 * n}, " * (n % 9)) for n in range(200)])
    truth = [rm.score_sides(sides).tolist() for rm in rms]
    publisher, published = publisher_of(server), threading.Event()
    begin = client.version().weight_version
    numbers = itertools.count()

    def ask_on(busy):
        answers = []
        while (number := next(numbers)) < 1000 or not published.is_set():
            rows = [(number * 31 + offset) % len(sides) for offset in range(1 + number % 7)]
            answers.append((rows, busy.score([sides[row].ids for row in rows])))
        return answers

    with server.client(max_concurrency=64, timeout_s=300) as busy, ThreadPoolExecutor(64) as pool:
        publisher.publish(rms[0])
        asking = [pool.submit(ask_on, busy) for _ in range(64)]
        for number in range(1, 21):
            publisher.publish(rms[number % 2])
        published.set()
        answers = [answer for one in asking for answer in one.result()]
    assert len(answers) >= 1000
    versions = {answer.weight_version - begin - 1 for _, answer in answers}
    assert versions <= set(range(21))
    assert len(versions) > 10
    for rows, answer in answers:
        of_version = truth[(answer.weight_version - begin - 1) % 2]
        assert answer.rewards == close(of_version[row] for row in rows)
    assert client.version().weight_version == begin + 21


def num_restarts(raw) -> int:
    [line] = [line for line in raw.get("/metrics").text.splitlines() if line.startswith("rm_engine_restarts ")]
    return round(float(line.split()[1]))


def engine_of(server) -> psutil.Process:
    """vLLM's engine; its API server is another process, which notices later that the engine is gone."""
    [engine] = [p for p in psutil.Process(server.pid).children(recursive=True) if "EngineCore" in p.name()]
    return engine


def until_restarted(raw, client, before: int) -> None:
    deadline = time.monotonic() + 300
    while not (num_restarts(raw) > before and client.health().ready):
        assert time.monotonic() < deadline, "vLLM did not come back"
        time.sleep(0.2)


def test_a_killed_vllm_is_said_and_comes_back_with_the_same_weights(server, client, raw):
    before, rewards, restarts = client.version(), client.score([[5, 6, 7]]).rewards, num_restarts(raw)
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(client.score, [[5, 6, 7]] * 64) for _ in range(40)]
        engine_of(server).kill()
        for answer in asked:
            try:
                assert answer.result().rewards == close(rewards * 64)
            except NotReadyError:
                continue
    until_restarted(raw, client, restarts)
    assert client.version() == before
    assert client.score([[5, 6, 7]]).rewards == close(rewards)


def test_a_vllm_that_is_killed_during_an_update_comes_back_with_one_of_the_two(server, client, raw):
    before, restarts = client.version(), num_restarts(raw)
    old, new, engine = served_model(client), new_model(77), engine_of(server)
    with ThreadPoolExecutor(1) as pool:
        publishing = pool.submit(publisher_of(server).publish, new)
        while client.health().state == "ready" and not publishing.done():
            pass
        engine.kill()
        error = publishing.exception()
    assert error is None or isinstance(error, ServingError)
    until_restarted(raw, client, restarts)
    taken = client.version().weight_version - before.weight_version
    assert taken == (0 if error else 1)
    assert client.score([{"prompt": a, "response": b} for a, b in PAIRS]).rewards == close(expected((old, new)[taken]))


def test_a_client_that_leaves_does_no_harm(server, client):
    host, port = server.address.removeprefix("http://").split(":")
    body = json.dumps({"inputs": [[7] * 50] * 500}).encode()
    head = f"POST /score HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Type: application/json\r\n"
    for cut in (len(body), len(body) // 2):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[:cut])
    assert client.score([[5, 6, 7]]).rewards
    publisher_of(server).publish(served_model(client))  # nobody was left inside, or this would wait for ever


def test_an_adapter_is_served_with_its_base_also_in_bf16(vllm, checkpoint, tmp_path):
    rm = BradleyTerryRM.from_pretrained(checkpoint, device="cpu")
    rm.add_lora(make_lora_config(LoraSettings(rank=4)), seed=3)
    with torch.no_grad():
        for parameter in rm.model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    rm.save(tmp_path / "trained")
    settings = ServeSettings(str(tmp_path / "trained" / "adapter"), port=0, vllm=vllm, dtype="bfloat16")
    with RewardServer(settings, log=tmp_path / "log") as running, running.client() as session:
        answer = session.score([{"prompt": prompt, "response": response} for prompt, response in PAIRS])
        assert session.version().dtype == "bfloat16"
    truth = expected(rm)
    assert answer.rewards == pytest.approx(truth, abs=BF16_TOLERANCE * max(1.0, max(truth) - min(truth)))
    assert answer.rewards != close(truth)  # it did compute in bf16


def test_nothing_is_left_where_the_program_that_serves_is_killed(vllm, checkpoint, tmp_path):
    settings = ServeSettings(str(checkpoint), port=0, vllm=vllm)
    with RewardServer(settings, log=tmp_path / "log") as running:
        family = psutil.Process(running.pid).children(recursive=True)
        assert len(family) >= 3
        os.kill(running.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(family, timeout=60)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def test_a_model_with_two_labels_is_refused_before_vllm_starts(vllm, checkpoint, tmp_path):
    folder = tmp_path / "two"
    shutil.copytree(checkpoint, folder)
    config = json.loads((folder / "config.json").read_text())
    config["id2label"], config["label2id"] = {"0": "bad", "1": "good"}, {"bad": 0, "good": 1}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="label"):
        RewardServer(ServeSettings(str(folder), port=0, vllm=vllm), log=tmp_path / "log").__enter__()


def program(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_rewards_that_are_not_the_checkpoints_are_never_served(vllm, checkpoint, tmp_path):
    """Real vLLM with other weights than it was told: what a wrong loader, pooling or head would look like."""
    other = tmp_path / "other"
    new_model(5).save(other)
    confused = f"""for word; do shift; case "$word" in */served-000001) word={other};; esac; set -- "$@" "$word"; done
exec {vllm} "$@" """
    settings = ServeSettings(str(checkpoint), port=0, vllm=program(tmp_path / "python", confused))
    with pytest.raises(ServingError, match=r"differ from PyTorch's by up to .*\n  row \d+, \d+ tokens: expected"):
        RewardServer(settings, log=tmp_path / "log").__enter__()


def test_a_vllm_that_does_not_start_shows_the_end_of_its_log(checkpoint, tmp_path):
    failing = program(tmp_path / "python", "echo no such device; exit 7")
    with pytest.raises(ServingError, match=r"status 7 while it started(.*\n)+ +no such device"):
        RewardServer(ServeSettings(str(checkpoint), port=0, vllm=failing), log=tmp_path / "log").__enter__()
    silent = program(tmp_path / "sleeper", "exec sleep 600")
    settings = ServeSettings(str(checkpoint), port=0, vllm=silent, start_timeout_s=1)
    with pytest.raises(ServingError, match="did not answer within 1 s"):
        RewardServer(settings, log=tmp_path / "log").__enter__()


@pytest.mark.parametrize("named", ["/no/such/python", "rm-opt-no-such-program"])
def test_a_vllm_that_is_not_there_is_said_before_anything_is_loaded(checkpoint, named):
    with pytest.raises(ConfigError, match="is no program"), RewardServer(ServeSettings(str(checkpoint), vllm=named)):
        pass


def test_beyond_loopback_a_token_is_asked_for(checkpoint, vllm):
    settings = ServeSettings(str(checkpoint), host="0.0.0.0", vllm=vllm)  # noqa: S104
    with pytest.raises(ConfigError, match="RM_OPT_TOKEN"), RewardServer(settings):
        pass
