"""An HTTP server that speaks OpenAI's chat interface and answers as a function says: a judge with known faults.

`FORMS` are answers as servers give them, which say 7 or A; what a server with worse intentions does is in the tests.
"""

import contextlib
import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from rmcore.config.judging import JudgingConfig
from rmcore.judging.answers import Question
from rmcore.judging.endpoint import Address, Endpoint

TEXTS = re.compile(r"<(text-[0-9a-f]{12})>\n(.*?)\n</\1>", re.DOTALL)


@dataclass
class Asked:
    """One request: its body, its headers, the texts between tags, and how many came before it."""

    body: dict[str, Any]
    headers: dict[str, str]
    texts: list[str]
    number: int


@dataclass
class Raw:
    """An answer that is no chat completion: a status, headers and a body; `cut` closes before the body is whole.

    A body in pieces is sent as they come, until the client goes, and has no stated length.
    """

    status: int = 200
    body: bytes | Iterator[bytes] = b""
    headers: dict[str, str] = field(default_factory=dict)
    cut: bool = False


KEY = "sk-secret-of-the-test"
Behaviour = Callable[[Asked], "str | dict[str, Any] | Raw"]


def completion(text: str | None, **fields: Any) -> dict[str, Any]:
    """A chat completion with this text."""
    message = {"role": "assistant", "content": text, **fields.pop("message", {})}
    choice = {"index": 0, "finish_reason": "stop", "message": message, **fields.pop("choice", {})}
    usage = {"prompt_tokens": 100, "completion_tokens": 2, "total_tokens": 102}
    return {
        **{"id": "1", "object": "chat.completion", "created": 0, "model": "judge-1"},
        **{"choices": [choice], "usage": usage, **fields},
    }


def _with_logprobs(logprobs: dict[str, Any]) -> Callable[[str], dict[str, Any]]:
    return lambda word: completion(word, choice={"logprobs": logprobs})


_THOUGHTS = "The first one is better, so B or 2."
_PIECES = [{"token": "\u0120" + word, "logprob": -0.69, "bytes": None} for word in ("7", "9", "A", "B")]
FORMS: dict[str, Callable[[str], dict[str, Any]]] = {
    "list of parts": lambda word: completion(
        None,
        message={"content": [
            {"type": "thinking", "thinking": [{"type": "text", "text": _THOUGHTS}]}, {"type": "text", "text": word},
        ]},
    ),
    "harmony": lambda word: completion(
        f"<|channel|>analysis<|message|>{_THOUGHTS}<|end|><|start|>assistant<|channel|>final<|message|>{word}<|return|>"
    ),
    "harmony without control tokens": lambda word: completion(f"analysis{_THOUGHTS}assistantfinal{word}"),
    "think": lambda word: completion(f"<think>{_THOUGHTS}</think>\n\n{word}"),
    "magistral": lambda word: completion(f"[THINK]{_THOUGHTS}[/THINK]{word}"),
    "fenced word": lambda word: completion(f"```\n{word}\n```"),
    "fenced JSON": lambda word: completion(f'```json\n{{"verdict": "{word}"}}\n```'),
    "log-probabilities of completions": _with_logprobs(
        {"tokens": ["7"], "token_logprobs": [-0.69], "text_offset": [0], "top_logprobs": [{"7": -0.69, "9": -0.69}]}
    ),
    "log-probabilities of pieces": _with_logprobs({"content": [{**_PIECES[0], "top_logprobs": _PIECES}]}),
}  # fmt: skip


@dataclass
class Server:
    """Where it answers, and all that it was asked."""

    url: str
    asked: list[Asked]

    @property
    def named(self) -> str:
        """As `policy.judge` names it."""
        return f"openai:judge-1@{self.url}"


@contextmanager
def judge_server(
    behaviour: Behaviour, root: str | None = None, port: int = 0, busy: Sequence[int] = ()
) -> Iterator[Server]:
    """Serve until the block ends; with a `root` it tells of it as vLLM does, else it has no list of models.

    The first requests of the list are answered with the statuses of `busy`.
    """
    asked: list[Asked] = []
    statuses = iter(busy)
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            question = body["messages"][0]["content"]
            with lock:
                headers = {name.lower(): value for name, value in self.headers.items()}
                one = Asked(body, headers, [text for _, text in TEXTS.findall(question)], len(asked))
                asked.append(one)
            said = behaviour(one)
            if isinstance(said, str):
                said = completion(said)
            raw = said if isinstance(said, Raw) else Raw(200, json.dumps(said).encode())
            self.send_response(raw.status)
            for name, value in {"Content-Type": "application/json", **raw.headers}.items():
                self.send_header(name, value)
            whole = raw.body if isinstance(raw.body, bytes) else None
            if whole is not None:
                self.send_header("Content-Length", str(len(whole) + 100 * raw.cut))
            self.end_headers()
            with contextlib.suppress(ConnectionError):
                for piece in raw.body if whole is None else (whole,):
                    self.wfile.write(piece)
            self.close_connection = raw.cut or whole is None

        def do_GET(self) -> None:
            models = [{"id": "judge-1", "object": "model", "created": 0, "owned_by": "test", "root": root}]
            body = json.dumps({"object": "list", "data": models}).encode()
            self.send_response(next(statuses, 404 if root is None else 200))
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 256

    server = Quiet(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield Server(f"http://127.0.0.1:{server.server_port}/v1", asked)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


ASK_ALL = """
import signal, sys
from pathlib import Path
from rmcore.config.judging import JudgingConfig
from rmcore.judging.endpoint import Address, Endpoint, Question
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
asked = Endpoint(Address.parse(sys.argv[1]), JudgingConfig(concurrency=int(sys.argv[3])), Path(sys.argv[2]))
print([one.text for one in asked.ask([Question((("user", f"question {at}"),), ("1", "2")) for at in range(40)])])
"""
"""A program that asks forty questions: of an address, with a folder for the answers, so many at a time."""


def questions(number, choices=("1", "2")):
    return [Question((("user", f"question {at}"),), choices) for at in range(number)]


def endpoint(server, folder, **settings):
    return Endpoint(Address.parse(server.named), JudgingConfig(**settings), folder)
