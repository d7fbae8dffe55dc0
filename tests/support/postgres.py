"""A PostgreSQL server of a test's own, on a free port of this machine, with a password as servers have one."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from machine import PATIENCE_S, free_ports

PASSWORD = "secret-of-the-database"
USER, DATABASE = "rm", "runs"


def programs() -> Path:
    """Folder of the server's programs; skips where it is not installed."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    initdb = str(found[-1]) if found else shutil.which("initdb")
    if initdb is None:
        assert os.environ.get("CI") != "true", "CI installs PostgreSQL"
        pytest.skip("PostgreSQL's server is not installed")
    return Path(initdb).parent


class Postgres:
    """The server; it refuses to run as root, so there it runs as nobody."""

    def __init__(self) -> None:
        self.bin = programs()
        self.folder = Path(tempfile.mkdtemp(prefix="rm-postgres-"))
        self.as_user = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"] if os.geteuid() == 0 else []
        if self.as_user:
            shutil.chown(self.folder, "nobody", "nogroup")
        [self.port] = free_ports(1)
        secret = self.folder / "password"
        secret.write_text(PASSWORD)
        secret.chmod(0o644)
        options = ["-U", USER, "-A", "scram-sha-256", "-E", "UTF8", f"--pwfile={secret}", "-N"]
        self._run("initdb", "-D", self.folder / "data", *options)
        self.start()
        self.environment = {"PGPASSWORD": PASSWORD}
        self._run("createdb", "-h", "127.0.0.1", "-p", self.port, "-U", USER, DATABASE)
        self.address = f"postgresql://{USER}@127.0.0.1:{self.port}/{DATABASE}"

    def start(self) -> None:
        options = f"-p {self.port} -k {self.folder} -h 127.0.0.1 -c fsync=off -c max_connections=200"
        self._run(
            "pg_ctl", "-D", self.folder / "data", "-o", options, "-l", self.folder / "data" / "log", "-w", "start"
        )

    def stop(self) -> None:
        self._run("pg_ctl", "-D", self.folder / "data", "-m", "immediate", "-w", "stop")

    def sql(self, text: str) -> str:
        """What psql prints of a query, unaligned."""
        return self._run("psql", "-h", "127.0.0.1", "-p", self.port, "-U", USER, "-d", DATABASE, "-Atc", text)

    def _run(self, program, *words) -> str:
        command = [*self.as_user, str(self.bin / program), *map(str, words)]
        done = subprocess.run(
            command, env=os.environ | {"PGPASSWORD": PASSWORD, "LC_ALL": "C"}, cwd="/", text=True, timeout=PATIENCE_S,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        return done.stdout

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self.folder)
