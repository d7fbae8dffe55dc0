"""The login of a home's owner: each server is given its own password, and asked again where it is busy."""

import time

import httpx

from machine import PATIENCE_S
from tasks.passwords import basic_authorization, identity


class OwnerLogin(httpx.Auth):
    """Logs in to the servers of a home.

    Args:
        home: that `rm-opt up` runs in.
        places: the servers' addresses, by their names.
    """

    def __init__(self, home, places):
        known = identity(home)
        self.passwords = {place: known.password(name) for name, place in places.items()}

    def auth_flow(self, request):
        request.headers.update(basic_authorization(self.passwords[f"http://{request.url.netloc.decode()}"]))
        yield request


class Patient(httpx.HTTPTransport):
    """Asks a server again that is busy (503: Prefect's database is locked), as Prefect's own client does."""

    def handle_request(self, request):
        deadline = time.monotonic() + PATIENCE_S
        while (answer := super().handle_request(request)).status_code == 503 and time.monotonic() < deadline:
            answer.close()
            time.sleep(0.5)
        return answer


def owners(run):
    """Give the pid of the process that a flow run names, in a list that is empty as long as it names none."""
    return [int(run["labels"]["rm-owner"].split(":")[1])] if "rm-owner" in run["labels"] else []
