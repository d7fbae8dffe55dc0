"""Nothing that a client sends to the reward server breaks it: no traceback, no hang, no answer to a foreign request.

A real server on a real port, before vLLM is started: a request that passes every check is told that the model is not
ready, and nothing else is told that.
"""

import asyncio
import json
import logging
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial

import pytest

from rmcore.serving import door as door_module
from rmcore.serving.engine import VllmEngine
from rmcore.serving.http_app import HttpSettings, RewardApp
from rmcore.serving.parity import make_probe
from rmcore.serving.served import ServedModel, Weights
from rmcore.serving.server import _answer, _listen
from rmcore.serving.types import PoolingType, RewardModelTrainingMode
from rmcore.serving.vllm_process import EngineSettings

TOKEN = "the-token-of-this-test"
LIMITS = HttpSettings(
    token=TOKEN, names=("reward.example",), max_body_bytes=2**18, max_pending_bytes=2**19, body_seconds=0.4
)
NUM_FORGED = 400
HANG, HANG_SECONDS = b"a hang after ", 20.0
GOOD_BODY = b'{"inputs": [{"prompt": "2 + 2?", "response": "4"}]}'
UPDATE = {
    "folder": "update-1",
    "digest": "a" * 64,
    "mode": "full",
    "probe": {"token_ids": [[1]], "rewards": [0.5], "tolerance": 0.1},
}
BODIES = {"/score": GOOD_BODY, "/weights": json.dumps(UPDATE).encode()}


@pytest.fixture(scope="module")
def server(tiny_folder, tmp_path_factory):
    from rmcore.models.reward_model import BradleyTerryRM

    rm = BradleyTerryRM.from_pretrained(tiny_folder, device="cpu", max_seq_len=128)
    place = tmp_path_factory.mktemp("hostile")
    engine = VllmEngine(EngineSettings(place / "vllm", "float32", 128), place / "vllm.log")
    weights = Weights(1, place, "0", RewardModelTrainingMode.FULL, make_probe(rm, bf16=False))
    app = RewardApp(
        ServedModel(engine, weights, "checkpoint"),
        rm.renderer,
        pooling=PoolingType.LAST,
        vocab_size=1024,
        settings=LIMITS,
    )
    short = pytest.MonkeyPatch()
    short.setattr(door_module, "HEADER_SECONDS", 1.0)
    short.setattr(door_module, "LINGER_SECONDS", 0.4)
    said: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = said.append
    for name in ("uvicorn.error", "asyncio"):
        logging.getLogger(name).addHandler(handler)
    loop, listening, ready = asyncio.new_event_loop(), _listen("127.0.0.1", 0), threading.Event()
    answering = loop.create_task(_answer(app, listening, lambda address: ready.set()))

    def run():
        asyncio.set_event_loop(loop)
        with pytest.raises(asyncio.CancelledError):
            loop.run_until_complete(answering)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(HANG_SECONDS)
    app.port, app.said = listening.getsockname()[1], said
    yield app
    loop.call_soon_threadsafe(answering.cancel)
    thread.join(HANG_SECONDS)
    assert not thread.is_alive()
    short.undo()
    for name in ("uvicorn.error", "asyncio"):
        logging.getLogger(name).removeHandler(handler)
    assert not [record.getMessage() for record in said if record.exc_info]


def exchange(server, *parts: bytes, end: bool = False) -> bytes:
    """All that the server answers until it closes the connection; what it no longer takes in is not sent."""
    with closing(socket.create_connection(("127.0.0.1", server.port), HANG_SECONDS)) as connection:
        answer = b""
        try:
            for part in parts:
                connection.sendall(part)
            if end:
                connection.shutdown(socket.SHUT_WR)
        except (BrokenPipeError, ConnectionResetError):
            pass
        try:
            while received := connection.recv(2**16):
                answer += received
        except ConnectionResetError:
            pass
        except TimeoutError:
            answer = HANG + answer
        return answer


def request(path="/score", body=None, method="POST", drop=(), **headers) -> bytes:
    body = BODIES.get(path, b"") if body is None else body
    given = {
        "Host": "127.0.0.1:8100",
        "Authorization": f"Bearer {TOKEN}",
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        "Connection": "close",
    }
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"{name}: {value}" for name, value in given.items() if name not in drop]
    return "\r\n".join([f"{method} {path} HTTP/1.1", *lines, "", ""]).encode("latin-1") + body


def status(answer: bytes) -> int | None:
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.1 ") else None


FORGERIES = []


def forgery(forge):
    """Register what gives the parts of a request, and the statuses that are right (None: closed without a word)."""
    FORGERIES.append(forge)
    return forge


@forgery
def forged_host(draw):
    hosts = ("evil.example", "127.0.0.1.evil.example", "evil.example:8100", "localhost.evil.example", "[::1", "8.8.8.8")
    host = draw.choice([*hosts, "localhost@evil.example", "", "127.0.0.1, evil.example", "[fe80::1]:8100", "0"])
    return [request(Host=host)], {400, 421}


@forgery
def two_hosts(draw):
    line = draw.choice(["Host: evil.example", "Host: 127.0.0.1"])
    return [request(Content_Type=f"application/json\r\n{line}")], {400, 421}


@forgery
def no_host(draw):
    return [request(drop=("Host",))], {400, 421}


@forgery
def forged_origin(draw):
    origin = draw.choice(["null", "http://evil.example", "http://127.0.0.1:1", "https://127.0.0.1:8100", "file://", ""])
    return [request(Origin=origin)], {403}


@forgery
def two_origins(draw):
    return [request(Origin="http://127.0.0.1:8100\r\nOrigin: http://evil.example")], {403}


@forgery
def forged_token(draw):
    other = draw.choice(["Bearer", "Bearer ", f"Bearer {TOKEN[:-1]}", f"Bearer {TOKEN}x", f"Basic {TOKEN}", TOKEN, "é"])
    method, path = draw.choice([("POST", "/score"), ("POST", "/weights"), ("GET", "/metrics"), ("GET", "/health")])
    return [request(path, method=method, Authorization=other)], {401}


@forgery
def no_token(draw):
    path = draw.choice(["/score", "/weights"])
    return [request(path, drop=("Authorization",), body=draw.randbytes(2**17))], {401}


@forgery
def forged_type(draw):
    kind = draw.choice(
        ["text/plain", "application/x-www-form-urlencoded", "application/jsonp", "", "é", "multipart/form-data"]
    )
    return [request(Content_Type=kind)], {422}


@forgery
def lying_length(draw):
    length = draw.choice(["-1", "+5", "1e3", "0x10", "5, 6", "1" * 5000, " "])
    return [request(Content_Length=length)], {400}


@forgery
def huge_length(draw):
    return [request(Content_Length=str(draw.choice([10**9, 2**63, 10**19])))], {408, 413}


@forgery
def short_body(draw):
    return [request(Content_Length=str(len(GOOD_BODY) + draw.randint(1, 99)))], {408}


@forgery
def both_lengths(draw):
    body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(GOOD_BODY), GOOD_BODY)
    return [request(body=body, Transfer_Encoding=draw.choice(["chunked", "Chunked"]))], {422}


@forgery
def forged_encoding(draw):
    coding = draw.choice(["gzip, chunked", "identity", "xchunked", "chunked, chunked", "\x0bchunked"])
    return [request(drop=("Content-Length",), Transfer_Encoding=coding)], {400, 501}


@forgery
def broken_chunks(draw):
    bad = draw.choice([b"zz\r\n", b"-1\r\n", b"5\r\nab", b"ffffffffffffffffffff\r\n", b"1\r\nab\r\n", b"\x00\r\n"])
    path = draw.choice(["/score", "/weights", "/nothing"])
    drop = ("Content-Length", *draw.choice([(), ("Authorization",)]))
    return [request(path, b"", drop=drop, Transfer_Encoding="chunked") + bad], {400, 401, 404, 408, None}


@forgery
def endless_chunks(draw):
    head = request(body=b"", drop=("Content-Length",), Transfer_Encoding="chunked")
    return [head, *[b"10000\r\n" + b" " * 2**16 + b"\r\n"] * 64], {413}


@forgery
def body_of_a_get(draw):
    path = draw.choice(["/health", "/version", "/metrics"])
    head = request(path, b"", "GET", drop=("Content-Length",), Transfer_Encoding="chunked")
    return [head, *[b"1000\r\n" + b" " * 2**12 + b"\r\n"] * 20], {200, 503}


@forgery
def slow_headers(draw):
    whole = request()
    return [whole[: draw.randint(0, whole.index(b"\r\n\r\n") + 3)]], {None}


@forgery
def slow_body(draw):
    path = draw.choice(["/score", "/weights"])
    whole = request(path)
    return [whole[: -draw.randint(1, len(BODIES[path]))]], {408}


@forgery
def left_early(draw):
    whole = request()
    return [whole[: draw.randint(0, len(whole) - 1)], "end"], {400, 408, None}


@forgery
def long_headers(draw):
    return [request(X_Long="a" * draw.choice([2**17, 2**20]))], {400, None}


@forgery
def forged_line(draw):
    lines = [
        b"POST /score\r\n\r\n",
        b"POST /score HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ]
    return [draw.choice([*lines, draw.randbytes(200) + b"\r\n\r\n", b"GET  /score HTTP/1.1\r\nHost: a\r\n\r\n"])], {
        400,
        421,
        None,
    }


@forgery
def forged_header(draw):
    name = draw.choice(["X Y: z", "X\x00: z", "X: a\x00b", " folded: a", "X : y", ": empty", "no colon", "X: \x7f\x01"])
    return [request(Content_Type=f"application/json\r\n{name}")], {400, 422, 503}


@forgery
def smuggled_path(draw):
    path = draw.choice(
        ["//score", "/score/", "/../score", "/%2e%2e/weights", "http://evil.example/score", "/collective_rpc", "*"]
    )
    return [request(path, GOOD_BODY)], {404, 307, 400}


@forgery
def other_method(draw):
    method = draw.choice(["PUT", "DELETE", "TRACE", "OPTIONS", "CONNECT", "PATCH", "GET", "HEAD", "BREW"])
    return [request("/score", method=method)], {405, 400}


@forgery
def upgraded(draw):
    protocol = draw.choice(["websocket", "h2c"])
    return [
        request(
            "/health",
            b"",
            "GET",
            Connection="Upgrade, close",
            Upgrade=protocol,
            Sec_WebSocket_Key="AAAAAAAAAAAAAAAAAAAAAA==",
            Sec_WebSocket_Version="13",
        )
    ], {503, 400}


@forgery
def deep_json(draw):
    depth = draw.choice([200, 5_000, 100_000])
    opening, closing_ = draw.choice([("[", "]"), ('{"a":', "}")])
    body = opening * depth + "1" + closing_ * depth
    return [
        request(draw.choice(["/score", "/weights"]), draw.choice([body, f'{{"inputs": {body}}}']).encode()[: 2**18])
    ], {422, 413}


@forgery
def forged_number(draw):
    number = draw.choice(
        ["NaN", "Infinity", "-Infinity", "1e999", "-0", "-1", "1" * 4000, "1" * 5000, "9" * 100_000, "1.5", "true"]
    )
    bodies = [
        f'{{"inputs": [[{number}, {number}]]}}',
        f'{{"inputs": [{number}]}}',
        f'{{"inputs": [[1, 2, {number}]], "policy_version": -{number}}}',
    ]
    # -0 is 0, and so a token
    return [request(body=draw.choice(bodies).encode())], {503, 422} if number == "-0" else {422}


@forgery
def forged_update(draw):
    update = json.loads(BODIES["/weights"])
    update["probe"] |= draw.choice([{"token_ids": []}, {"rewards": [1, 2]}, {"tolerance": 0}, {"rewards": [10**400]}])
    return [request("/weights", json.dumps(update).encode())], {422}


@forgery
def forged_folder(draw):
    update = UPDATE | {"folder": draw.choice(["../..", "/etc", "a\x00b", "é" * 9999, "\ud800"])}
    return [request("/weights", json.dumps(update).encode())], {503, 422}


@forgery
def forged_text(draw):
    bodies = [
        b'{"inputs": ["\xff"]}',
        b'{"inputs": ["\\ud800"]}',
        b"\xef\xbb\xbf" + GOOD_BODY,
        GOOD_BODY.decode().encode("utf-16"),
    ]
    bodies += [
        b"",
        b"null",
        b"{}",
        b'{"inputs": ["a"]} x',
        b'{"inputs": ["a\x00"]}',
        b'{"inputs": ["\xed\xa0\x80"]}',
        draw.randbytes(99),
    ]
    return [request(body=draw.choice(bodies))], {422}


@forgery
def repeated_key(draw):
    bodies = {
        "/score": [
            b'{"inputs": ["a"], "inputs": ["b"]}',
            b'{"inputs": [{"prompt": "a", "response": "b", "response": "c"}]}',
            b'{"inputs": [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "a", "content": "a"}]]}',
            b'{"inputs": ["a"], "inp\\u0075ts": ["b"]}',
        ],
        "/weights": [
            BODIES["/weights"][:-1] + b', "mode": "head_only"}',
            BODIES["/weights"].replace(b'"rewards"', b'"tolerance": 9, "rewards"'),
        ],
    }
    path = draw.choice(list(bodies))
    return [request(path, draw.choice(bodies[path]))], {422}


@forgery
def many_rows(draw):
    return [request(body=b'{"inputs": [' + b",".join([b'"a"'] * draw.choice([4097, 50_000])) + b"]}")], {422}


@forgery
def long_text(draw):
    text = draw.choice(["x", " ", "a ", "1", "<|im_end|>"]) * 2**17
    row = draw.choice(
        [text, {"prompt": text, "response": ""}, {"prompt": [{"role": text, "content": ""}], "response": ""}]
    )
    body = {"inputs": ["a", row], "over_length": draw.choice(["cut", "refuse"])}
    return [request(body=json.dumps(body).encode()[: 2**18 + 2**20])], {413}


def try_one(server, number) -> str | None:
    """Send a forgery; in words, what is wrong with the answer."""
    forge, draw = FORGERIES[number % len(FORGERIES)], random.Random(number)  # noqa: S311 - forgeries are no secret
    parts, right = forge(draw)
    end = parts[-1] == "end"
    sent = parts[:-1] if end else parts
    answer = exchange(server, *sent, end=end)
    is_right = status(answer) in right and not answer.startswith(HANG)
    return None if is_right else f"{forge.__name__} {sent[0][:300]!r} -> {answer[:300]!r}"


@pytest.mark.slow
def test_no_forged_request_is_answered_breaks_the_server_or_holds_it_up(server):
    with ThreadPoolExecutor(8) as clients:
        wrong = [one for one in clients.map(partial(try_one, server), range(NUM_FORGED)) if one is not None]
    assert not wrong, "\n".join(wrong)
    assert b"not_ready" in exchange(server, request()), "the server answers no valid request any more"
    assert (server._pending_bytes, server._pending_rows) == (0, 0)
    assert not [record.getMessage() for record in server.said if record.exc_info]


@pytest.mark.parametrize("host", ["127.0.0.1:8100", "localhost:9000", "LOCALHOST", "[::1]:8100", "reward.example:80"])
def test_a_server_answers_under_its_own_names(server, host):
    for headers in ({"Host": host}, {"Host": host, "Origin": f"http://{host}"}):
        answer = exchange(server, request(**headers))
        assert status(answer) == 503
        assert b'"not_ready"' in answer


def test_a_client_that_sends_too_much_reads_why(server, monkeypatch):
    """And not a reset connection: what it still sends is taken in for a moment, here as long as a busy client takes."""
    monkeypatch.setattr(door_module, "LINGER_SECONDS", HANG_SECONDS)
    for _ in range(20):
        answer = exchange(server, request(body=b" " * (LIMITS.max_body_bytes + 2**16)))
        assert b"too_large" in answer


def test_bodies_in_flight_are_bounded_together(server):
    half = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(4)]
    patient = replace(LIMITS, body_seconds=HANG_SECONDS)
    server.settings = patient
    try:
        for connection in half[:2]:
            connection.sendall(request(body=b" " * 2**18, Content_Length=str(2**18 + 9)))
        deadline = time.monotonic() + HANG_SECONDS
        while server._pending_bytes < 2**19 and time.monotonic() < deadline:
            pass
        answer = exchange(server, request())
        assert status(answer) == 503
        assert b"overloaded" in answer
        assert b"retry-after" in answer.lower()
    finally:
        for connection in half:
            connection.close()
        server.settings = LIMITS
    while server._pending_bytes and time.monotonic() < deadline:
        pass
    assert b"not_ready" in exchange(server, request())
