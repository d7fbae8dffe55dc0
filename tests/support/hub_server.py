"""A stand-in for the Hugging Face hub: its HTTP routes for making a repository and committing to it, on loopback.

It keeps what the real one keeps (who owns what, what is private, files by their content) and refuses what that refuses.
`hub.fail` makes a route fail; `hub.seen` is every request.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import yaml

LARGE = (".safetensors", ".bin", ".pt")
MODEL = r"/api/models/(?P<name>[^/]+/[^/]+)"


@dataclass
class StoredRepository:
    """What the hub has of one repository."""

    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)

    @property
    def sha(self) -> str:
        """Name of its state; another one after every change."""
        state = [*self.commits, *((name, hashlib.sha1(content).hexdigest()) for name, content in self.files.items())]  # noqa: S324
        return hashlib.sha1(repr(state).encode()).hexdigest()  # noqa: S324 - as git does


def _metadata(card: bytes) -> object:
    block = re.match(rb"---\n(.*?)\n---\n", card, re.DOTALL)
    return None if block is None else yaml.safe_load(block[1])


class Refused(Exception):
    """An answer that is no success; the hub tells why in headers and body."""

    def __init__(self, status: int, message: str, code: str = "") -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


class HubServer:
    """The hub: users by their tokens, repositories, large files, and what was asked."""

    def __init__(self) -> None:
        self.users = {"hf_alice": "alice", "hf_reader": "reader"}
        self.readers = {"reader"}
        self.repositories: dict[str, StoredRepository] = {}
        self.large: dict[str, bytes] = {}
        self.seen: list[tuple[str, str]] = []
        self.fail: dict[str, int] = {}
        """Status by a part of the path; 0 hangs up without an answer."""
        self.meanwhile: dict[str, Callable[[], object]] = {}
        """What others do, once, before a request whose path has this part is answered."""
        self.address = ""

    def forget(self) -> None:
        """Begin anew, at the same address."""
        address = self.address
        self.__init__()
        self.address = address

    def answer(self, method: str, path: str, token: str, body: bytes) -> object:
        """The JSON of an answer."""
        for place, route in ROUTES.items():
            wanted, pattern = place
            found = re.fullmatch(pattern, path)
            if method == wanted and found:
                if route is HubServer._put_large:  # its address is a secret of its own
                    return route(self, "", body, **found.groupdict())
                if token not in self.users:
                    raise Refused(401, "Invalid credentials in Authorization header")
                return route(self, self.users[token], body, **found.groupdict())
        raise Refused(404, f"no route {method} {path}")

    def _whoami(self, user: str, body: bytes) -> object:
        return {"type": "user", "name": user}

    def _info(self, user: str, body: bytes, name: str) -> object:
        stored = self.repositories.get(name)
        if stored is None or (stored.private and not name.startswith(f"{user}/")):
            raise Refused(404, "Repository not found", "RepoNotFound")
        return {
            "id": name,
            "private": stored.private,
            "sha": stored.sha,
            "siblings": [{"rfilename": file} for file in stored.files],
            "cardData": _metadata(stored.files.get("README.md", b"")),
            "tags": [],
            "downloads": 0,
            "likes": 0,
        }

    def _tree(self, user: str, body: bytes, name: str, revision: str) -> object:
        self._info(user, b"", name)
        files = self.repositories[name].files
        return [{"type": "file", "path": path, "size": len(files[path]), "oid": "0"} for path in files]

    def _create(self, user: str, body: bytes) -> object:
        asked = json.loads(body)
        owner = asked.get("organization") or user
        name = f"{owner}/{asked['name']}"
        if owner != user or user in self.readers:
            raise Refused(403, f'You don\'t have the rights to create a model under the namespace "{owner}"')
        if name in self.repositories:
            raise Refused(409, "You already created this model repo")
        self.repositories[name] = StoredRepository(asked.get("visibility") == "private")
        return {"url": f"{self.address}/{name}"}

    def _validate(self, user: str, body: bytes) -> object:
        text = json.loads(body)["content"]
        block = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)
        if block is None:
            return {"errors": [], "warnings": [{"message": "empty or missing yaml metadata in repo card"}]}
        if not isinstance(yaml.safe_load(block[1]), dict):
            raise Refused(400, "the metadata are no mapping")
        return {"errors": [], "warnings": []}

    def _writable(self, user: str, name: str) -> StoredRepository:
        self._info(user, b"", name)
        if not name.startswith(f"{user}/") or user in self.readers:
            raise Refused(403, f"You are not allowed to write to {name}")
        return self.repositories[name]

    def _preupload(self, user: str, body: bytes, name: str) -> object:
        self._writable(user, name)
        return {
            "files": [
                {"path": one["path"], "uploadMode": "lfs" if one["path"].endswith(LARGE) else "regular",
                 "shouldIgnore": False}
                for one in json.loads(body)["files"]
            ]
        }  # fmt: skip

    def _batch(self, user: str, body: bytes, name: str) -> object:
        self._writable(user, name)
        objects = []
        for one in json.loads(body)["objects"]:
            action = {"upload": {"href": f"{self.address}/large/{one['oid']}"}}
            objects.append(one if one["oid"] in self.large else {**one, "actions": action})
        return {"transfer": "basic", "objects": objects}

    def _put_large(self, user: str, body: bytes, oid: str) -> object:
        if hashlib.sha256(body).hexdigest() != oid:
            raise Refused(400, "the content is not that of its digest")
        self.large[oid] = body
        return {}

    def _commit(self, user: str, body: bytes, name: str) -> object:
        stored = self._writable(user, name)
        files = dict(stored.files)
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                if value.get("parentCommit", stored.sha) != stored.sha:
                    raise Refused(412, "A commit has happened since. Please refresh and try again.")
                stored.commits.append(value["summary"])
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.large[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        stored.files = files
        oid = hashlib.sha1(body, usedforsecurity=False).hexdigest()
        return {"commitUrl": f"{self.address}/{name}/commit/{oid}", "commitOid": oid}


ROUTES = {
    ("GET", "/api/whoami-v2"): HubServer._whoami,
    ("GET", MODEL): HubServer._info,
    ("GET", MODEL + r"/tree/(?P<revision>[^/?]+)"): HubServer._tree,
    ("POST", "/api/repos/create"): HubServer._create,
    ("POST", "/api/validate-yaml"): HubServer._validate,
    ("POST", MODEL + "/preupload/main"): HubServer._preupload,
    ("POST", r"/(?P<name>[^/]+/[^/]+)\.git/info/lfs/objects/batch"): HubServer._batch,
    ("PUT", "/large/(?P<oid>[0-9a-f]{64})"): HubServer._put_large,
    ("POST", MODEL + "/commit/main"): HubServer._commit,
}


@contextmanager
def hub_server() -> Iterator[HubServer]:
    """A hub that listens on loopback inside the block."""
    hub = HubServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _handle(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = self.path.partition("?")[0]
            hub.seen.append((self.command, path))
            token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
            for part in [part for part in hub.meanwhile if part in path]:
                hub.meanwhile.pop(part)()
            status = next((code for part, code in hub.fail.items() if part in path), None)
            if status == 0:
                self.close_connection = True
                return
            try:
                if status is not None:
                    raise Refused(status, f"the hub is out of order for {token}")
                method = "GET" if self.command == "HEAD" else self.command
                self._send(200, hub.answer(method, path, token, body))
            except Refused as refusal:
                self._send(refusal.status, {"error": refusal.message, "url": f"{hub.address}/owner/name"}, refusal)

        do_GET = do_HEAD = do_POST = do_PUT = _handle

        def _send(self, status: int, value: object, refusal: Refused | None = None) -> None:
            content = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            if refusal is not None:
                self.send_header("X-Error-Message", refusal.message)
                self.send_header("X-Error-Code", refusal.code)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def log_message(self, *words: object) -> None:
            """Say nothing: the test looks at `seen`."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.address = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
