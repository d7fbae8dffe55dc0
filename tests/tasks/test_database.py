"""Which database services are started with, and what a database must be like."""

import psutil
import pytest

from flows import services
from postgres import DATABASE, Postgres
from rmcore.core.errors import ConfigError, ServiceError
from tasks.database import make_schemas, mlflow_address, prefect_environment, require_address
from tasks.local_services import Service


@pytest.fixture(scope="module")
def postgres():
    server = Postgres()
    yield server
    server.close()


@pytest.mark.slow
@pytest.mark.parametrize("address", ["postgresql://me@host/runs", "postgresql://host:5433/runs?sslmode=require"])
def test_an_address_of_postgresql_is_taken(address):
    require_address(address)


@pytest.mark.parametrize(
    "address",
    [
        "",
        "runs",
        "postgresql://",
        "postgresql://host",
        "mysql://host/runs",
        "sqlite:///runs.db",
        "postgresql+pg8000://h/d",
    ],
)
def test_what_is_no_database_of_postgresql_is_refused(address):
    with pytest.raises(ConfigError, match="no address of a PostgreSQL database"):
        require_address(address)


@pytest.mark.parametrize(
    "address",
    [
        *("postgresql://me:secret@host/runs", "postgresql://me:sec@re:secret@h/r", "postgresql://h/d?password=secret"),
        *("postgresql://me:p/secret@127.0.0.1/runs", "postgresql://me:p/a?secret@h/d", "postgresql://me:p/#secret@h/d"),
        *("postgresql://me:se[cret@h/d", "postgresql://me:secret@[::1/d", "postgresql://h/d?sslPassword=secret"),
    ],
)
def test_a_password_is_refused_and_not_repeated(address, monkeypatch, tmp_path):
    """Nor where services already run: no sentence has the address before it was looked at."""
    monkeypatch.setenv("RM_OPT_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(services, "running_services", lambda _: {"worker": Service("worker", psutil.Process(), None)})
    for call in (require_address, lambda address: services.up(database=address)):
        with pytest.raises(ConfigError, match=r"holds a password|no address of a PostgreSQL database") as error:
            call(address)
        assert "cret" not in str(error.value)
        assert "127.0.0.1" not in str(error.value)


def test_each_driver_is_asked_for_encryption_in_its_own_words():
    asked = "postgresql://h/d?sslmode=require"
    assert mlflow_address(asked).endswith("?sslmode=require&options=-csearch_path%3Dmlflow")
    assert (
        prefect_environment(asked)["PREFECT_SERVER_DATABASE_CONNECTION_URL"] == "postgresql+asyncpg://h/d?ssl=require"
    )


@pytest.mark.services
def test_both_schemas_are_made_once_and_kept(postgres, monkeypatch):
    monkeypatch.setenv("PGPASSWORD", postgres.environment["PGPASSWORD"])
    make_schemas(postgres.address)
    postgres.sql("create table mlflow.kept (x int)")
    make_schemas(postgres.address)
    assert postgres.sql("select count(*) from mlflow.kept").strip() == "0"
    assert postgres.sql("select to_regnamespace('prefect')").strip() == "prefect"


@pytest.mark.services
def test_a_database_that_cannot_be_used_is_named_with_why(postgres, monkeypatch):
    monkeypatch.setenv("PGPASSWORD", "wrong")
    with pytest.raises(ServiceError, match="password authentication failed") as error:
        make_schemas(postgres.address)
    assert "PGPASSWORD" in str(error.value)
    monkeypatch.setenv("PGPASSWORD", postgres.environment["PGPASSWORD"])
    with pytest.raises(ServiceError, match='database "absent" does not exist'):
        make_schemas(postgres.address.replace(f"/{DATABASE}", "/absent"))
    with pytest.raises(ServiceError, match=r"127\.0\.0\.1:9/runs cannot be used .*refused"):
        make_schemas(f"postgresql://rm@127.0.0.1:9/{DATABASE}")
    postgres.sql("create database old encoding 'SQL_ASCII' lc_collate 'C' lc_ctype 'C' template template0")
    with pytest.raises(ServiceError, match=r"keeps texts as SQL_ASCII.*createdb --encoding UTF8"):
        make_schemas(postgres.address.replace(f"/{DATABASE}", "/old"))
    postgres.sql("create role reader login password 'secret-of-the-database'")
    postgres.sql("create database theirs")
    with pytest.raises(ServiceError, match="permission denied"):
        make_schemas(postgres.address.replace("rm@", "reader@").replace(f"/{DATABASE}", "/theirs"))
