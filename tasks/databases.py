"""The databases of Prefect and MLflow under one home: which they are, what schema they have, a copy before it changes.

Each is a sqlite file under HEADWAY_HOME unless `headway services up` was told of a PostgreSQL one; its URL holds a
password, and is kept as a secret is. Imports neither Prefect nor MLflow: the newest schema that an installed package
knows is read from the names of its migrations.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import sqlite3
import time
from collections.abc import Mapping
from contextlib import closing
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

from rl_core.errors import ConfigError

NAMES = ("prefect", "mlflow")
FILES = {"prefect": "prefect.db", "mlflow": "mlflow.db"}
MIGRATIONS = {"prefect": "server/database/_migrations/versions/sqlite", "mlflow": "store/db_migrations/versions"}
SQLITE = "sqlite"
"""What to say on the command line for the file under HEADWAY_HOME."""


def file(home: Path, name: str) -> Path:
    """The sqlite file of Prefect (`prefect`) or MLflow (`mlflow`)."""
    return home.resolve() / name / FILES[name]


def url(home: Path, name: str) -> str:
    """`sqlite:////home/mlflow/mlflow.db`, or the PostgreSQL URL that was chosen, with its password."""
    return chosen(home, name) or f"sqlite:///{file(home, name)}"


def prefect_url(home: Path) -> str:
    """The same as Prefect wants it: with the driver that its server needs."""
    scheme, _, rest = url(home, "prefect").partition("://")
    return f"{'sqlite+aiosqlite' if scheme == 'sqlite' else 'postgresql+asyncpg'}://{rest}"


def is_sqlite(home: Path, name: str) -> bool:
    return chosen(home, name) is None


def chosen(home: Path, name: str) -> str | None:
    """The PostgreSQL URL, with its password; None for the sqlite file."""
    try:
        return _secret(home, name).read_text().strip() or None
    except FileNotFoundError:
        return None


def _secret(home: Path, name: str) -> Path:
    return home / "secrets" / f"{name}-database"


def checked(name: str, given: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """The URL that `sqlite` (None), `postgresql://user:password@host/database` or `env:NAME` stands for.

    A password belongs into `env:NAME`: command lines can be read by everybody on the machine. Raises ConfigError.
    """
    option, said = f"--{name}-database", given
    if given.startswith("env:"):
        given = environ.get(given.removeprefix("env:"), "")
        if not given:
            raise ConfigError(f"{option} {said}: the environment has no such variable, or it is empty")
    if given == SQLITE:
        return None
    parts = urlsplit(given)
    if parts.scheme not in ("postgresql", "postgres") or not parts.hostname or not parts.path.strip("/"):
        shown = said if said.startswith("env:") or "@" not in said else f"{said.partition('://')[0]}://..."
        raise ConfigError(f"{option} {shown}: write postgresql://user:password@host:port/database, env:NAME for a "
                          f"variable that holds it, or {SQLITE}")
    if name == "mlflow" and importlib.util.find_spec("psycopg") is None:
        raise ConfigError(f"{option}: MLflow reaches PostgreSQL by psycopg, which is not installed: "
                          "pip install 'headway[postgres]'")
    return parts._replace(scheme="postgresql").geturl()


def choose(home: Path, name: str, wanted: str | None) -> None:
    """Take a URL of `checked` from the next start of the server on, and for every run that begins."""
    place = _secret(home, name)
    if wanted is None:
        place.unlink(missing_ok=True)
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    place.parent.chmod(0o700)
    aside = place.with_name(f".{place.name}.{os.getpid()}")
    with open(os.open(aside, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as out:
        out.write(wanted)
    aside.replace(place)


# -- schemas of the sqlite files

@cache
def known_revisions(name: str) -> tuple[frozenset[str], str]:
    """Schema revisions that the installed Prefect or MLflow knows, and the newest of them."""
    found = importlib.util.find_spec(name)
    assert found is not None and found.origin is not None
    down: dict[str, str | None] = {}
    for path in (Path(found.origin).parent / MIGRATIONS[name]).glob("*.py"):
        words = dict(re.findall(r"^(revision|down_revision)(?:: [^=]+)? = [\"']?(\w+)[\"']?", path.read_text(),
                                re.MULTILINE))
        if "revision" in words:
            down[words["revision"]] = words.get("down_revision")
    newest = set(down) - set(down.values())
    assert len(newest) == 1, f"{name}: migrations with {len(newest)} ends"
    return frozenset(down), newest.pop()


def revision(place: Path) -> str | None:
    """Schema revision of a sqlite file; None where there is no file, or none in it."""
    if not place.exists():
        return None
    try:
        with closing(sqlite3.connect(f"file:{place}?mode=ro", uri=True, timeout=10)) as database:
            rows = database.execute("select version_num from alembic_version").fetchall()
    except sqlite3.Error:
        return None
    return rows[0][0] if len(rows) == 1 else None


def state(home: Path, name: str) -> str:
    """Of a sqlite database: `absent`, `current`, `older` than the installed package, or `newer`; `unknown` without a
    schema; `elsewhere` for PostgreSQL."""
    if not is_sqlite(home, name):
        return "elsewhere"
    place = file(home, name)
    if not place.exists():
        return "absent"
    has = revision(place)
    if has is None:
        return "unknown"
    known, newest = known_revisions(name)
    return "current" if has == newest else "older" if has in known else "newer"


def copy_before_migration(home: Path, name: str) -> Path | None:
    """Copy a sqlite database whose schema the installed package is going to change; None where it will not.

    The copy, `prefect-before-3.9.1-20260131-074512.db`, is whole: sqlite makes it, with what is in its log alone.
    """
    if state(home, name) != "older":
        return None
    place = file(home, name)
    label = f"{name}-before-{importlib.metadata.version(name)}-{time.strftime('%Y%m%d-%H%M%S')}"
    copy, aside = place.with_name(f"{label}.db"), place.with_name(f".{label}.tmp")
    with closing(sqlite3.connect(place, timeout=60)) as source, closing(sqlite3.connect(aside)) as target:
        source.backup(target)
    aside.replace(copy)
    return copy
