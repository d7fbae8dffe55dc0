"""The far side of the served model's tests: a program that speaks vLLM's routes, starts in a second and can misbehave.

Its reward of a row is the sum of the folder's `score.weight` times the number of tokens; of a whole checkpoint it is
what PyTorch gives, a few seconds later. As vLLM, it answers 400 to rows that are longer than `--max-model-len` or hold
ids beyond the vocabulary, and 500 where a reward is not finite, as of a row with POISON. As a generator it draws all
tokens alike. Two files of the folder that it was made in steer it:

    nonsense   as many answers of /classify as the file's number says are JSON that nobody expects
    gate       a FIFO: a request is under way once the FIFO can be opened for writing, and goes on when that is closed
"""

import json
import os
import random
import shlex
import sys
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingUnixStreamServer

from rmcore.serving.vllm_start import end_with_starter

VOCABULARY = 1024
POISON = 666


def make_program(place: Path) -> Path:
    """An executable that `EngineSettings` takes for vLLM's."""
    program = place / "python"
    program.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, __file__, str(place)])} "$@"\n')
    program.chmod(0o755)
    return program


class Server(ThreadingUnixStreamServer):
    daemon_threads = True

    def __init__(self, place: Path, folder: Path, socket: str, max_tokens: int) -> None:
        self.place, self.max_tokens, self.lock = place, max_tokens, threading.Lock()
        if folder.name:  # a generator has no weights
            self.load(folder)
        super().__init__(socket, Handler)

    def load(self, folder: Path) -> None:
        from safetensors.numpy import load_file

        if (folder / "tokenizer.json").exists():
            from rmcore.models.reward_model import BradleyTerryRM

            self.rm = BradleyTerryRM.from_pretrained(folder, device="cpu")
            return
        self.rm = None
        weights = [load_file(file) for file in folder.glob("*.safetensors")]
        self.scale = float(next(one["score.weight"] for one in weights if "score.weight" in one).sum())

    def speaks_nonsense(self) -> bool:
        with self.lock:
            file = self.place / "nonsense"
            left = int(file.read_text()) if file.exists() else 0
            if left:
                file.write_text(str(left - 1))
            return left > 0

    def classify(self, rows: list[list[int]]) -> tuple[int, object]:
        if self.speaks_nonsense():
            return 200, {}
        if any(len(row) > self.max_tokens or max(row) >= VOCABULARY for row in rows):
            return 400, {"message": "too long, or out of vocabulary"}
        if any(POISON in row for row in rows):
            return 500, {"message": "Out of range float values are not JSON compliant: nan"}
        return 200, {"data": [{"index": i, "probs": [reward]} for i, reward in enumerate(self.rewards(rows))]}

    def rewards(self, rows: list[list[int]]) -> list[float]:
        if self.rm is None:
            return [self.scale * len(row) for row in rows]
        from rmcore.data.rendering import TokenizedSide

        with self.lock:
            return self.rm.score_sides([TokenizedSide(row, 0) for row in rows]).tolist()


def draw(body: dict) -> dict:
    """The answer of /v1/completions."""
    choices = []
    for index in range(body["n"]):
        drawn, ids = random.Random(body["seed"] + index), list[int]()  # noqa: S311 - tokens of a test
        while len(ids) < body["max_tokens"] and not (ids and ids[-1] in body["stop_token_ids"]):
            ids.append(drawn.randrange(VOCABULARY))
        choices.append({"index": index, "token_ids": ids, "logprobs": {"token_logprobs": [0.0] * len(ids)}})
    return {"choices": choices}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.answer(200, {})

    def do_POST(self) -> None:
        text = self.rfile.read(int(self.headers.get("content-length", 0)))
        body = json.loads(text) if text else {}
        gate = self.server.place / "gate"
        if gate.exists():
            gate.read_bytes()
        if self.path == "/classify":
            self.answer(*self.server.classify(body["input"]))
        elif self.path == "/v1/completions":
            self.answer(200, draw(body))
        elif self.path == "/collective_rpc":
            self.server.load(Path(body["kwargs"]["weights_path"]))
            self.answer(200, {})
        else:
            self.answer(200, {"success": True})

    def answer(self, status: int, body: object) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def address_string(self) -> str:
        return "vllm"


def main() -> None:
    place, _, _, pipe, _, folder, *flags = sys.argv[1:]
    end_with_starter(int(pipe))
    socket, limit = (flags[flags.index(name) + 1] for name in ("--uds", "--max-model-len"))
    is_generator = "generate" in flags
    Server(Path(place), Path() if is_generator else Path(folder), socket, int(limit)).serve_forever()


if __name__ == "__main__":
    os.umask(0o077)
    main()
