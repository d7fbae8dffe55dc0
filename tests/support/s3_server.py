"""An S3 server on loopback (moto), for tests of what machines share.

    python s3_server.py PORT

S3 decides which of two conditional writes is first. Moto looks for the object and writes it in two steps, between which
another of its threads may write: so it is given one request at a time.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

from machine import PATIENCE_S, free_ports


@contextmanager
def s3_server() -> Iterator[str]:
    """Run a server for the block; gives its address. Its buckets are gone afterwards."""
    [port] = free_ports(1)
    command = [sys.executable, __file__, str(port)]
    # Where a command of the same process has set PYTHONSAFEPATH, the folder of a program is not on its path.
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            try:
                httpx.get(url, timeout=PATIENCE_S, trust_env=False)  # not by a proxy
                break
            except httpx.TransportError:
                with suppress(subprocess.TimeoutExpired):
                    raise AssertionError(f"the S3 server ended with {server.wait(timeout=0.05)}") from None
        yield url
    finally:
        server.kill()
        server.wait()


def s3_environment(url: str) -> dict[str, str]:
    """What a process needs in its environment to speak to that server."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        "NO_PROXY": ",".join(filter(None, [os.environ.get("NO_PROXY"), "127.0.0.1"])),
    }


def make_bucket(url: str, name: str) -> None:
    """Make a bucket."""
    import boto3  # moto needs it, too

    login = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
    boto3.client("s3", endpoint_url=url, **login).create_bucket(Bucket=name)


def serve(port: int) -> None:
    """Answer on a port until the process is ended, one request at a time."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
    from werkzeug.serving import run_simple

    answer, turn = DomainDispatcherApplication(create_backend_app), threading.Lock()

    def in_turn(environ, start_response):
        with turn:
            return answer(environ, start_response)

    # A thread for each connection: clients keep theirs open.
    run_simple("127.0.0.1", port, in_turn, threaded=True, request_handler=MotoRequestHandler)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
