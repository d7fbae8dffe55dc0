"""Nothing that a client sends to the reward server breaks it: no traceback, no hang, no answer to a foreign request.

A real server on a real port, before vLLM is started: a request that passes every check is told that the model is not
ready, and nothing else is told that.
"""

import json
import logging
import random
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial

import pytest

from rmcore.core.errors import RequestError
from rmcore.serving import door as door_module
from rmcore.serving.client import RewardClient
from rmcore.serving.http_app import HttpSettings, RewardApp
from rmcore.serving.parity import make_probe
from rmcore.serving.served import ServedModel, Weights
from rmcore.serving.types import PoolingType, RewardModelTrainingMode
from rmcore.serving.vllm_process import EngineSettings, VllmEngine
from torch_engine import answering

TOKEN = "the-token-of-this-test"
LIMITS = HttpSettings(token=TOKEN, names=("reward.example",), max_body_bytes=2**18, body_seconds=0.4)
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

    async def make():
        engine = VllmEngine(EngineSettings(place / "vllm", "float32", 128), place / "vllm.log")
        weights = Weights(1, place, "0", RewardModelTrainingMode.FULL, make_probe(rm, bf16=False))
        served = ServedModel(engine, weights, "checkpoint")
        return RewardApp(served, rm.renderer, pooling=PoolingType.LAST, vocab_size=1024, settings=LIMITS)

    said: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = said.append
    loggers = [logging.getLogger(name) for name in ("uvicorn.error", "asyncio")]
    for logger in loggers:
        logger.addHandler(handler)
    with pytest.MonkeyPatch.context() as short, answering(make) as app:
        short.setattr(door_module, "HEADER_SECONDS", 1.0)
        app.said = said
        yield app
    for logger in loggers:
        logger.removeHandler(handler)
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


HOSTS = ("evil.example", "127.0.0.1.evil.example", "evil.example:8100", "localhost.evil.example", "[::1", "8.8.8.8",
         "localhost@evil.example", "", "127.0.0.1, evil.example", "[fe80::1]:8100", "0")  # fmt: skip
ORIGINS = ("null", "http://evil.example", "http://127.0.0.1:1", "https://127.0.0.1:8100", "file://", "")
TOKENS = ("Bearer", "Bearer ", f"Bearer {TOKEN[:-1]}", f"Bearer {TOKEN}x", f"Basic {TOKEN}", TOKEN, "é")
ROUTES = [{"path": path, "method": how} for path, how in zip(("/score", "/weights", "/metrics", "/health"),
                                                            ("POST", "POST", "GET", "GET"), strict=True)]  # fmt: skip
TYPES = ("text/plain", "application/x-www-form-urlencoded", "application/jsonp", "", "é", "multipart/form-data")
CODINGS = ("gzip, chunked", "identity", "xchunked", "chunked, chunked", "\x0bchunked")
BAD_CHUNKS = (b"zz\r\n", b"-1\r\n", b"5\r\nab", b"ffffffffffffffffffff\r\n", b"1\r\nab\r\n", b"\x00\r\n")
CHUNKED = {"drop": ("Content-Length",), "Transfer_Encoding": "chunked"}
LINES = (b"POST /score\r\n\r\n", b"POST /score HTTP/9.9\r\nConnection: close\r\n\r\n", b"\x16\x03\x01\x02\x00\x01",
         b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET  /score HTTP/1.1\r\nHost: a\r\n\r\n")  # fmt: skip
HEADERS = ("X Y: z", "X\x00: z", "X: a\x00b", " folded: a", "X : y", ": empty", "no colon", "X: \x7f\x01")
PATHS = ("//score", "/score/", "/../score", "/%2e%2e/weights", "http://evil.example/score", "/collective_rpc", "*")
METHODS = ("PUT", "DELETE", "TRACE", "OPTIONS", "CONNECT", "PATCH", "GET", "HEAD", "BREW")
UPGRADE = {"Connection": "Upgrade, close", "Sec_WebSocket_Key": "AAAAAAAAAAAAAAAAAAAAAA==",
           "Sec_WebSocket_Version": "13"}  # fmt: skip
NUMBERS = ("NaN", "Infinity", "-Infinity", "1e999", "-1", "1" * 4000, "1" * 5000, "9" * 100_000, "1.5", "true")
IN_NUMBERS = ('{"inputs": [[%s, 1]]}', '{"inputs": [%s]}', '{"inputs": [[1, 2, %s]]}',
              '{"inputs": [[1]], "policy_version": -%s}')  # fmt: skip
PROBES = ({"token_ids": []}, {"rewards": [1, 2]}, {"tolerance": 0}, {"rewards": [10**400]})
FOLDERS = ("../..", "/etc", "a\x00b", "é" * 9999, "\ud800")
TEXTS = (b'{"inputs": ["\xff"]}', b'{"inputs": ["\\ud800"]}', b"\xef\xbb\xbf" + GOOD_BODY, b"", b"null", b"{}",
         GOOD_BODY.decode().encode("utf-16"), b'{"inputs": ["a"]} x', b'{"inputs": ["a\x00"]}',
         b'{"inputs": ["\xed\xa0\x80"]}')  # fmt: skip


def cut(draw, whole: bytes, end: int) -> bytes:
    return whole[: draw.randint(0, end)]


def deep(draw) -> bytes:
    depth, (opening, closing_) = draw.choice([200, 5_000, 100_000]), draw.choice([("[", "]"), ('{"a":', "}")])
    body = opening * depth + "1" + closing_ * depth
    return draw.choice([body, f'{{"inputs": {body}}}']).encode()[: 2**18]


def long_row(draw) -> bytes:
    text = draw.choice(["x", " ", "a ", "1", "<|im_end|>"]) * 2**17
    pair = {"prompt": [{"role": text, "content": ""}], "response": ""}
    row = draw.choice([text, {"prompt": text, "response": ""}, pair])
    return json.dumps({"inputs": ["a", row], "over_length": draw.choice(["cut", "refuse"])}).encode()[: 2**18 + 2**20]


def update_with(**changes) -> bytes:
    return request("/weights", json.dumps(UPDATE | changes).encode())


FORGERIES = {
    "host": (lambda d: [request(Host=d.choice(HOSTS))], {400, 421}),
    "two hosts": (lambda d: [request(Content_Type=f"application/json\r\nHost: {d.choice([HOSTS[0], '[::1]'])}")],
                  {400, 421}),
    "no host": (lambda d: [request(drop=("Host",))], {400, 421}),
    "origin": (lambda d: [request(Origin=d.choice(ORIGINS))], {403}),
    "two origins": (lambda d: [request(Origin="http://127.0.0.1:8100\r\nOrigin: http://evil.example")], {403}),
    "token": (lambda d: [request(**d.choice(ROUTES), Authorization=d.choice(TOKENS))], {401}),
    "no token": (lambda d: [request(d.choice(list(BODIES)), drop=("Authorization",), body=d.randbytes(2**17))],
                 {401, None}),
    "type": (lambda d: [request(Content_Type=d.choice(TYPES))], {422}),
    "lying length": (lambda d: [request(Content_Length=d.choice(["-1", "+5", "1e3", "0x10", "5, 6", "1" * 5000, " "]))],
                     {400}),
    "huge length": (lambda d: [request(Content_Length=str(d.choice([10**9, 2**63, 10**19])))], {408, 413}),
    "short body": (lambda d: [request(Content_Length=str(len(GOOD_BODY) + d.randint(1, 99)))], {408}),
    "encoding": (lambda d: [request(drop=("Content-Length",), Transfer_Encoding=d.choice(CODINGS))], {400, 501}),
    "broken chunks": (lambda d: [request(d.choice([*BODIES, "/nothing"]), b"", Transfer_Encoding="chunked",
                                         drop=("Content-Length", *d.choice([(), ("Authorization",)])))
                                 + d.choice(BAD_CHUNKS)], {400, 401, 404, 408, None}),
    "endless chunks": (lambda d: [request(body=b"", **CHUNKED), *[b"10000\r\n" + b" " * 2**16 + b"\r\n"] * 64],
                       {413, None}),
    "body of a GET": (lambda d: [request(d.choice(["/health", "/version", "/metrics"]), b"", "GET", **CHUNKED),
                                 *[b"1000\r\n" + b" " * 2**12 + b"\r\n"] * 20], {200, 503, None}),
    "slow headers": (lambda d: [cut(d, request(), request().index(b"\r\n\r\n") + 3)], {None}),
    "slow body": (lambda d: [request(path := d.choice(list(BODIES)))[: -d.randint(1, len(BODIES[path]))]], {408}),
    "left early": (lambda d: [cut(d, request(), len(request()) - 1), "end"], {400, 408, None}),
    "long headers": (lambda d: [request(X_Long="a" * d.choice([2**17, 2**20]))], {400, None}),
    "line": (lambda d: [d.choice([*LINES, d.randbytes(200) + b"\r\n\r\n"])], {400, 421, None}),
    "header": (lambda d: [request(Content_Type=f"application/json\r\n{d.choice(HEADERS)}")], {400, 422, 503}),
    "path": (lambda d: [request(d.choice(PATHS), GOOD_BODY)], {404, 307, 400}),
    "method": (lambda d: [request(method=d.choice(METHODS))], {405, 400}),
    "upgrade": (lambda d: [request("/health", b"", "GET", Upgrade=d.choice(["websocket", "h2c"]), **UPGRADE)],
                {503, 400}),
    "deep JSON": (lambda d: [request(d.choice(list(BODIES)), deep(d))], {422, 413}),
    "number": (lambda d: [request(body=(d.choice(IN_NUMBERS) % d.choice(NUMBERS)).encode())], {422}),
    "minus 0, a token": (lambda d: [request(body=b'{"inputs": [[-0, -0]]}')], {503, 422}),
    "probe": (lambda d: [update_with(probe=UPDATE["probe"] | d.choice(PROBES))], {422}),
    "folder": (lambda d: [update_with(folder=d.choice(FOLDERS))], {503, 422}),
    "text": (lambda d: [request(body=d.choice([*TEXTS, d.randbytes(99)]))], {422}),
    "many rows": (lambda d: [request(body=b'{"inputs": [' + b",".join([b'"a"'] * d.choice([4097, 50_000])) + b"]}")],
                  {422}),
    "long text": (lambda d: [request(body=long_row(d))], {413, 422}),  # 422: a role of spaces alone is no role
}  # fmt: skip
"""What gives the parts of a request, and the statuses that are right (None: closed, perhaps while it was sent)."""


def try_one(server, number) -> str | None:
    """Send a forgery; in words, what is wrong with the answer."""
    name, draw = list(FORGERIES)[number % len(FORGERIES)], random.Random(number)  # noqa: S311 - forgeries are no secret
    forge, right = FORGERIES[name]
    parts = forge(draw)
    end = parts[-1] == "end"
    sent = parts[:-1] if end else parts
    answer = exchange(server, *sent, end=end)
    is_right = status(answer) in right and not answer.startswith(HANG)
    return None if is_right else f"{name} {sent[0][:300]!r} -> {answer[:300]!r}"


@pytest.mark.slow
def test_no_forged_request_is_answered_breaks_the_server_or_holds_it_up(server):
    with ThreadPoolExecutor(8) as clients:
        wrong = [one for one in clients.map(partial(try_one, server), range(NUM_FORGED)) if one is not None]
    assert not wrong, "\n".join(wrong)
    assert b"not_ready" in exchange(server, request()), "the server answers no valid request any more"
    assert server._pending_rows == 0
    assert not [record.getMessage() for record in server.said if record.exc_info]


@pytest.mark.parametrize("host", ["127.0.0.1:8100", "localhost:9000", "LOCALHOST", "[::1]:8100", "reward.example:80"])
def test_a_server_answers_under_its_own_names(server, host):
    for headers in ({"Host": host}, {"Host": host, "Origin": f"http://{host}"}):
        answer = exchange(server, request(**headers))
        assert status(answer) == 503
        assert b'"not_ready"' in answer


@pytest.mark.parametrize(("login", "said"), [(TOKEN, "too_large"), ("another", "unauthorized")])
def test_a_client_that_is_refused_while_it_sends_reads_why(server, login, said):
    """And not a reset connection, which a client would try again."""
    with RewardClient(f"http://127.0.0.1:{server.port}", token=login, attempts=1) as client:
        for _ in range(20):
            with pytest.raises(RequestError, match=said):
                client.score(["a" * (LIMITS.max_body_bytes + 2**20)])
