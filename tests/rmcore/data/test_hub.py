"""Hub names through the real `datasets` and `huggingface_hub`, against a small server that answers as the hub does."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from machine import PATIENCE_S

pytestmark = pytest.mark.slow

COMMIT = "c0ffee" * 6 + "abcd"
FILES = {"train.csv": b"prompt,chosen,rejected\np,a,b\nq,a,b\n"}
CODE = """
import sys, time
slept = []
time.sleep = slept.append
from rmcore.data.readers.sources import load_pairs, source_digest
from rmcore.core.errors import DataError
assert not {"datasets", "torch", "pandas"} & set(sys.modules), "heavy imports"
calls = [lambda: [pair.prompt for pair in load_pairs("someone/pairs").pairs], lambda: source_digest("someone/pairs"),
         lambda: load_pairs("someone/pairs", split="dev"), lambda: load_pairs("someone/none")]
for call in calls:
    try:
        print(call())
    except DataError as error:
        print("DataError:", error)
assert sum(slept) < 5, "the library would try again for 23 s"
"""


class HubHandler(BaseHTTPRequestHandler):
    """The few answers of the hub's public HTTP interface that a data set of plain files needs."""

    def do_GET(self):
        path = unquote(urlsplit(self.path).path)
        resolve, api = "/datasets/someone/pairs/resolve/", "/api/datasets/someone/pairs"
        if path.startswith(resolve):
            name = path.removeprefix(resolve).partition("/")[2]
            headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{name}"'}
            if name in FILES:
                self.answer(200, FILES[name], headers)
            else:
                self.answer(404, b"", headers | {"X-Error-Code": "EntryNotFound"})
        elif path.startswith(f"{api}/tree/"):
            self.answer_json(
                [{"type": "file", "path": name, "size": len(data), "oid": "0"} for name, data in FILES.items()]
            )
        elif path == api or path.startswith(f"{api}/revision/"):
            files = [{"rfilename": name} for name in FILES]
            self.answer_json({"id": "someone/pairs", "sha": COMMIT, "siblings": files, "tags": []})
        else:
            self.answer(404, b"", {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def answer_json(self, value):
        self.answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def answer(self, status, body, headers):
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args):
        """Stay quiet."""


@pytest.fixture
def hub_address():
    server = ThreadingHTTPServer(("127.0.0.1", 0), HubHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def run(tmp_path, **environment):
    """What CODE prints in a fresh process: both libraries read their environment once, at import."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        cwd=Path(__file__).parents[3],
        env=clean | {"HF_HOME": str(tmp_path)} | environment,
    )
    assert done.returncode == 0, done.stderr
    assert "Generating" not in done.stderr, "progress bars although stderr is no terminal"
    return done.stdout.splitlines()


def test_a_hub_name_is_loaded_at_a_commit_and_again_without_the_network(tmp_path, hub_address):
    pairs, digest, no_split, nobody = run(tmp_path, HF_ENDPOINT=hub_address)
    assert pairs == "['p', 'q']"
    assert digest == f"hub:someone/pairs@{COMMIT}"
    assert "split 'dev', of the hub cannot be loaded" in no_split
    assert "['train']" in no_split
    assert "'someone/none' is neither a file or folder here nor a data set that the" in nobody
    assert run(tmp_path, HF_ENDPOINT=hub_address, HF_HUB_OFFLINE="1")[:2] == [pairs, digest]


def test_without_a_network_a_hub_name_fails_soon_and_names_the_local_forms(tmp_path):
    lines = run(tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert len(lines) == 4
    for line in lines:
        assert "is no file or folder here" in line
        assert "does not answer" in line
        assert ".parquet, .json, .jsonl, .csv or .tsv file" in line
