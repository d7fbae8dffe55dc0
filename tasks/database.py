"""One PostgreSQL database for Prefect and MLflow, in place of the two files of a home, which are for one machine.

Both keep a table of their migrations under one name, so each has a schema of its own in it. The address goes without a
password, because it is in the environment of every service: PostgreSQL's clients take that from `~/.pgpass` or from
PGPASSWORD, which both drivers read.
"""

from contextlib import suppress
from urllib.parse import urlsplit

from rmcore.core.errors import ConfigError, ServiceError
from rmcore.core.extras import require_extra

DATABASE_VARIABLE = "RM_OPT_DATABASE"
"""Environment variable with the address: of the one to use, and in every process that `rm-opt up` starts."""
PREFECT_SCHEMA, MLFLOW_SCHEMA = "prefect", "mlflow"


def require_address(address: str) -> None:
    """Check that this is the address of a PostgreSQL database.

    Raises:
        ConfigError: it is none, or holds a password.
    """
    url = None
    with suppress(ValueError):  # whose message may hold a part of a password
        url = urlsplit(address)
    if url is None or url.scheme != "postgresql" or not url.path.strip("/"):
        raise ConfigError(
            "--database is no address of a PostgreSQL database: write postgresql://USER@HOST/DATABASE, or leave it out "
            "for files of this home."
        )
    # A password with "/", "?" or "#" ends the part with the login, and the "@" after it is in one of the others.
    has_login_elsewhere = "@" in url.path + url.query + url.fragment
    if url.password is not None or has_login_elsewhere or "password" in url.query.lower():
        raise ConfigError(
            "--database holds a password, which the environment of every service would show; leave it out: it is taken "
            "from ~/.pgpass or from PGPASSWORD."
        )


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
