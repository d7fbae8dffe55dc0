"""A Prefect server that the commands of these tests share, where its start is not what they are about."""

import pytest

from flows.prefect_api import TIMEOUT_VARIABLE, EmbeddedPrefect
from tasks.home import QUIET_ENVIRONMENT, SAFE_ENVIRONMENT
from used_homes import begin


@pytest.fixture(scope="module")
def prefect_server(tmp_path_factory, databases):
    """Its address and login, as environment of a command.

    It ends with its module: idle, it takes 2 % of a core, to the end of a session more than its start.
    """
    settings = {
        **QUIET_ENVIRONMENT,
        **SAFE_ENVIRONMENT,
        "PREFECT_HOME": str(begin(tmp_path_factory.mktemp("server") / "home", databases) / "prefect"),
        TIMEOUT_VARIABLE: "600",  # many tests may share the cores
    }
    with pytest.MonkeyPatch.context() as patched:
        for name, value in settings.items():
            patched.setenv(name, value)
        server = EmbeddedPrefect()
        server.wait()
    yield {"PREFECT_API_URL": server.api, "PREFECT_API_AUTH_STRING": server.password}
    server.end()
