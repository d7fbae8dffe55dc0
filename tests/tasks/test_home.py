"""The home is its owner's, and no client asks a proxy for this machine itself."""

import os
import re
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from sqlalchemy import create_engine, text
from typer.testing import CliRunner

from flows.cli import app
from machine import PATIENCE_S
from rmcore.config.judging import JudgingConfig
from rmcore.core.errors import ConfigError
from rmcore.core.manifests import FORMAT_FILE
from rmcore.core.store import Store
from rmcore.core.web import keep_direct
from rmcore.judging.endpoint import Address, Endpoint
from rmcore.serving.client import RewardClient
from tasks.home import HOME_FOLDERS, default_tracking_uri, home, make_home
from tasks.mlflow_client import alone_with

NOBODY = 65534
runner = CliRunner()
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")


@AS_ROOT
@pytest.mark.parametrize("folder", ["", *HOME_FOLDERS])
def test_a_home_of_another_user_is_refused(tmp_path, folder):
    place = tmp_path / "home" / folder
    place.mkdir(parents=True)
    os.chown(place, NOBODY, NOBODY)
    with pytest.raises(ConfigError, match=rf"belongs to uid {NOBODY}, and this process runs as uid 0"):
        make_home(tmp_path / "home")


@AS_ROOT
def test_a_link_of_another_user_is_refused_and_one_of_the_owner_is_not(tmp_path):
    place, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    place.mkdir()
    elsewhere.mkdir()
    (place / "store").symlink_to(elsewhere)
    make_home(place)
    os.lchown(place / "store", NOBODY, NOBODY)
    with pytest.raises(ConfigError, match="belongs to uid"):
        make_home(place)


@pytest.mark.parametrize("command", [["down"], ["store", "gc", "--keep", "1"], ["store", "ls"], ["info"]], ids=" ".join)
def test_nobody_else_may_look_into_the_home_that_a_first_command_makes(command, tmp_path, monkeypatch):
    place = tmp_path / "home"
    monkeypatch.setenv("RM_OPT_HOME", str(place))
    before = os.umask(0)
    try:
        assert runner.invoke(app, command, catch_exceptions=False).exit_code == 0
    finally:
        os.umask(before)
    assert not place.exists() or not place.stat().st_mode & 0o077


def test_what_is_stored_in_a_folder_that_others_may_read_is_for_its_owner_alone(tmp_path):
    for folder in (tmp_path / "home", *(tmp_path / "home" / name for name in HOME_FOLDERS)):
        folder.mkdir()
        folder.chmod(0o755)
    make_home(tmp_path / "home")
    assert {name: (tmp_path / "home" / name).stat().st_mode & 0o777 for name in HOME_FOLDERS} == dict.fromkeys(
        HOME_FOLDERS, 0o700
    )
    assert (tmp_path / "home").stat().st_mode & 0o777 == 0o755  # it may be a folder that holds other things, too


@pytest.fixture
def used(tmp_path, monkeypatch):
    """A home with one artifact."""
    monkeypatch.setenv("RM_OPT_HOME", str(tmp_path))
    make_home(home())
    with Store(home() / "store").publish("prepare", "mine", {"seed": 0}, outcome=("pairs",)) as folder:
        (folder / "pairs").write_text("mine")
    return tmp_path


def test_a_home_of_this_version_opens(used):
    assert home() == used
    assert runner.invoke(app, ["store", "ls"], catch_exceptions=False).stdout.endswith(f"in {used / 'store'}\n")


@pytest.mark.parametrize("mark", [None, "2\n"], ids=["none", "newer"])
@pytest.mark.parametrize(
    "words",
    [
        *("run", "run --from mine", "runs", "open", "verdict", "compare a b", "up", "down", "info"),
        *("store ls", "store verify", "store gc --keep 0", "store why mine", "experiment ablation --plan"),
    ],
)
def test_every_command_refuses_a_home_of_another_version_and_changes_nothing(used, mark, words):
    file = used / "store" / FORMAT_FILE
    file.unlink() if mark is None else file.write_text(mark)
    before = sorted(used.rglob("*"))
    refused = runner.invoke(app, words.split()).exception
    assert isinstance(refused, ConfigError), refused
    assert re.search(r"store was written by another version .*: set RM_OPT_HOME to a new folder, or move", str(refused))
    assert sorted(used.rglob("*")) == before


@pytest.mark.parametrize("name", ["why?", "?", "a?b=c/home", "#why?"])
def test_a_home_whose_path_no_address_of_a_database_can_hold_is_refused(tmp_path, name):
    with pytest.raises(ConfigError, match="question mark"):
        make_home(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["plain", "a b", "a#b", "#%41", "100%", "%3F", "a&b=c;d", "a:b@c", "中文 é"])
def test_databases_lie_in_the_home_whatever_it_is_called(tmp_path, name):
    (tmp_path / name / "mlflow").mkdir(parents=True)
    address = default_tracking_uri(tmp_path / name)
    with alone_with(address), create_engine(address).connect() as connection:
        connection.execute(text("CREATE TABLE runs (name TEXT)"))
    found = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file())
    assert found == [f"{name}/mlflow/mlflow.db", f"{name}/mlflow/mlflow.db.lock"]


CLIENTS = """
import sys, urllib.request
from tasks.home import configure_environment
configure_environment()
import httpx, requests
from prefect.client.orchestration import SyncPrefectClient
from rmcore.serving.client import RewardClient
for address in sys.argv[1:]:
    assert httpx.get(address, timeout=60).json() == {}
    assert requests.get(address).json() == {}
    assert urllib.request.urlopen(address).read() == b"{}"
    with SyncPrefectClient(address) as client:
        assert client._client.get("/").json() == {}
    RewardClient(address).close()
    print("asked all")
"""


class Plain(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["socks5h", "http"])
def test_no_client_asks_a_proxy_for_loopback(tmp_path, kind):
    with ThreadingHTTPServer(("127.0.0.1", 0), Plain) as server, socket.create_server(("127.0.0.1", 0)) as proxy:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"{kind}://127.0.0.1:{proxy.getsockname()[1]}"
        names = ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")
        inherited = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
        environment = inherited | dict.fromkeys(names, address) | {"RM_OPT_HOME": str(tmp_path / "home")}
        places = [f"http://{host}:{server.server_port}" for host in ("127.0.0.1", "localhost")]
        done = subprocess.run(
            [sys.executable, "-c", CLIENTS, *places],
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        server.shutdown()
        proxy.settimeout(0)
        with pytest.raises(BlockingIOError):
            proxy.accept()
    assert done.stdout == "asked all\n" * 2, done.stderr


@pytest.mark.parametrize("kind", ["socks", "socks4", "ftp"])
@pytest.mark.parametrize("variable", ["http_proxy", "HTTPS_PROXY", "ALL_PROXY"])
def test_a_proxy_that_no_client_can_use_is_named_before_any_is_made(monkeypatch, tmp_path, variable, kind):
    monkeypatch.setenv(variable, f"{kind}://user:secret@proxy:1080")
    judge = Address("m", "https://10.0.0.5/v1")
    clients = (lambda: RewardClient("http://10.0.0.5:8000"), lambda: Endpoint(judge, JudgingConfig(), tmp_path))
    for make in (keep_direct, *clients):
        with pytest.raises(ConfigError, match=f"{variable} names a proxy of the kind '{kind}'") as refused:
            make()
        assert "secret" not in str(refused.value)


def test_what_is_direct_already_stays_so(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "intern.example, 10.0.0.0/8,")
    monkeypatch.setenv("no_proxy", "")
    keep_direct(["10.0.0.5"])
    keep_direct()
    assert os.environ["NO_PROXY"].split(",") == [
        *("intern.example", "10.0.0.0/8"),
        *("127.0.0.1", "localhost", "::1", "10.0.0.5"),
    ]
    assert os.environ["no_proxy"] == "127.0.0.1,localhost,::1,10.0.0.5"


def test_a_home_that_cannot_be_made_is_a_clear_error(tmp_path):
    (tmp_path / "home").write_text("a file is in the way")
    with pytest.raises(ConfigError, match=r"RM_OPT_HOME is .*, which cannot be made"):
        make_home(tmp_path / "home" / "below")
