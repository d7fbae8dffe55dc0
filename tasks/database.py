"""One PostgreSQL database for Prefect and MLflow, in place of the two files of a home, which are for one machine.

Both keep a table of their migrations under one name, so each has a schema of its own in it. The address goes without a
password, because it is in the environment of every service: PostgreSQL's clients take that from `~/.pgpass` or from
PGPASSWORD, which both drivers read.
"""

import os
from contextlib import suppress
from pathlib import Path

from rmcore.core.errors import ConfigError, ServiceError
from rmcore.core.extras import require_extra
from rmcore.core.files import write_text

DATABASE_VARIABLE = "RM_OPT_DATABASE"
"""Environment variable with the address: of the one to use, and in every process that `rm-opt up` starts."""
SQLITE = "sqlite"
"""Names the files of the home, where an address could stand."""
PREFECT_SCHEMA, MLFLOW_SCHEMA = "prefect", "mlflow"
_RECORD = "database"


def checked_address(address: str) -> str | None:
    """The address of a PostgreSQL database, as it was given; None where it is `sqlite`.

    Raises:
        ConfigError: it is none, or holds a password.
    """
    if address == SQLITE:
        return None
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    url = None
    with suppress(ArgumentError, ValueError):  # whose messages may hold a part of a password
        url = make_url(address)
    if url is None or url.drivername != "postgresql" or not url.database:
        raise ConfigError(
            "--database is no address of a PostgreSQL database: write postgresql://USER@HOST/DATABASE, or sqlite for "
            "files of this home."
        )
    if url.password is not None or "password" in url.query:
        raise ConfigError(
            "--database holds a password, which the environment of every service would show; leave it out: it is taken "
            "from ~/.pgpass or from PGPASSWORD."
        )
    return address


def mlflow_address(address: str) -> str:
    """MLflow's own form of the address, by which its tables lie in their schema.

    >>> mlflow_address("postgresql://me@host/runs")
    'postgresql+psycopg2://me@host/runs?options=-csearch_path%3Dmlflow'
    """
    scheme, _, rest = address.partition("://")
    return f"{scheme}+psycopg2://{rest}{'&' if '?' in rest else '?'}options=-csearch_path%3D{MLFLOW_SCHEMA}"


def prefect_environment(address: str) -> dict[str, str]:
    """Variables by which Prefect's server keeps its tables in their schema; extensions may lie in `public`."""
    scheme, _, rest = address.partition("://")
    return {
        # asyncpg calls `ssl` what libpq calls `sslmode`; the values are the same.
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": f"{scheme}+asyncpg://{rest.replace('sslmode=', 'ssl=')}",
        "PREFECT_SERVER_DATABASE_SQLALCHEMY_CONNECT_ARGS_SEARCH_PATH": f"{PREFECT_SCHEMA},public",
    }


def make_schemas(address: str) -> None:
    """Make both schemas where they are not there.

    Raises:
        ConfigError: the driver is not installed.
        ServiceError: the database does not answer, refuses the login, lets this user make no schema, or is not UTF-8.
    """
    require_extra("psycopg2", "cluster", "PostgreSQL")
    import psycopg2

    try:
        connection = psycopg2.connect(address, connect_timeout=10)
        try:
            with connection, connection.cursor() as cursor:
                cursor.execute("SHOW server_encoding")
                [encoding] = cursor.fetchone()
                if encoding != "UTF8":
                    raise ServiceError(
                        f"the database {address} keeps texts as {encoding}, which has no place for most letters: make "
                        "one with createdb --encoding UTF8 --template template0."
                    )
                for schema in (PREFECT_SCHEMA, MLFLOW_SCHEMA):
                    cursor.execute(f"CREATE SCHEMA IF NOT EXISTS {schema}")
        finally:
            connection.close()
    except psycopg2.Error as error:
        raise ServiceError(
            f"the database {address} cannot be used ({' '.join(str(error).split())[:300]}). See that it runs, that its "
            "user may log in (~/.pgpass or PGPASSWORD) and may make schemas in it."
        ) from error


def chosen_database(folder: Path, given: str | None) -> str | None:
    """The database to start services with: as given, else `$RM_OPT_DATABASE`, else as they were started last.

    Args:
        folder: of the home's services, where `keep_choice` has written.
        given: an address, `sqlite`, or None.

    Raises:
        ConfigError: it is no address, or holds a password.
    """
    record = folder / _RECORD
    kept = record.read_text(encoding="utf-8").strip() if record.is_file() else SQLITE
    address = given or os.environ.get(DATABASE_VARIABLE) or kept
    return checked_address(address)


def keep_choice(folder: Path, database: str | None) -> None:
    """Remember what services were started with, for the next start."""
    write_text(folder / _RECORD, f"{database or SQLITE}\n", mode=0o600)
