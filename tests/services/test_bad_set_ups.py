"""Set-ups of kept services that cannot work, or are half done: each is refused, or found, with what to do about it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tasks import databases, kept, servers
from tests.kept import SMALL, KeptHome
from tests.runs import processes_of

pytestmark = pytest.mark.services


def supervised(home: KeptHome) -> dict[int, str]:
    """Processes of the home's services: none of them may be left."""
    return {pid: command for pid, command in processes_of(home).items() if "flows.cli" not in command}


def doctor(home: KeptHome) -> list[str]:
    return home.call("services", "doctor", "--json").json["findings"]


@pytest.mark.parametrize("name", ["prefect", "mlflow"])
def test_a_port_that_is_taken_is_named(bare_home: KeptHome, name: str) -> None:
    port = bare_home.prefect_port if name == "prefect" else bare_home.mlflow_port
    with closing(socket.create_server((servers.HOST, port))):
        said = bare_home.up(code=2)["err"]
    assert f"error: --{name}-port {port}: somebody else listens there" in said
    assert supervised(bare_home) == {}


def test_a_database_that_is_none_ends_the_start_with_its_cause_and_leaves_nothing(bare_home: KeptHome) -> None:
    place = databases.file(bare_home.path, "mlflow")
    place.parent.mkdir(parents=True)
    place.write_text("this is no database, though it is long enough to be read as one " * 20)
    said = bare_home.up(code=1)["err"]
    assert "mlflow" in said and "file is not a database" in said
    assert supervised(bare_home) == {}
    assert any("database of mlflow" in text for text in doctor(bare_home))


REFUSED = {
    "no url": ("--mlflow-database", "mysql://u@h/d", "write postgresql://user:password@host:port/database"),
    "an empty variable": ("--prefect-database", "env:NOT_THERE", "the environment has no such variable"),
}


@pytest.mark.parametrize(("option", "value", "why"), REFUSED.values(), ids=REFUSED)
def test_a_database_that_cannot_be_one_is_refused(bare_home: KeptHome, option: str, value: str, why: str) -> None:
    said = bare_home.up(option, value, code=2)["err"]
    assert option in said and why in said


def test_there_is_no_environment_and_no_deployment_without_services(bare_home: KeptHome) -> None:
    for words in (("env",), ("deploy",)):
        command = bare_home.call(*words)
        assert (command.process.returncode, command.out) == (2, "") and "headway services up" in command.err


def test_older_databases_are_copied_before_they_are_brought_up_to_date(bare_home: KeptHome) -> None:
    """With the schema of the oldest Prefect that is supported, and with the last one before this MLflow's, which is the
    oldest supported itself; both have a run, which the servers of now show."""
    older = {"prefect": older_prefect(bare_home.path), "mlflow": older_mlflow(bare_home.path)}
    assert older["prefect"] == OLDEST_PREFECT
    assert len([text for text in doctor(bare_home) if "copies it and brings it up to date" in text]) == 2
    bare_home.up()
    for name, revision in older.items():
        place = databases.file(bare_home.path, name)
        assert databases.state(bare_home.path, name) == "current" and databases.revision(place) != revision
        [copy] = place.parent.glob(f"{name}-before-*.db")
        assert databases.revision(copy) == revision
        with closing(sqlite3.connect(copy)) as database:
            assert database.execute("pragma integrity_check").fetchone() == ("ok",)
    [flow_run] = bare_home.ask("POST", "/flow_runs/filter", {})
    assert (flow_run["name"], flow_run["state_type"]) == ("last-year", "COMPLETED")
    shown = f"{bare_home.mlflow_page}/api/2.0/mlflow/runs/get?run_id={MLFLOW_RUN}"
    with urllib.request.urlopen(shown, timeout=30) as answer:
        run = json.load(answer)["run"]
    assert (run["info"]["run_name"], run["info"]["status"]) == ("last-year", "FINISHED")
    assert [(one["key"], one["value"]) for one in run["data"]["metrics"]] == [("reward/mean", 0.5)]


OLDEST_PREFECT = "8f5eda7c1dd7"
"""Newest schema revision of Prefect 3.9.0."""
FLOW, FLOW_RUN, STATE = ("1" * 8 + "-1111-4111-8111-" + digit * 12 for digit in "123")
MLFLOW_RUN = "a" * 32


def older_prefect(home: Path) -> str:
    place = databases.file(home, "prefect")
    place.parent.mkdir(parents=True)
    env = servers.clean_environ() | {"PREFECT_HOME": str(place.parent), "DO_NOT_TRACK": "1",
                                     "PREFECT_API_DATABASE_CONNECTION_URL": databases.prefect_url(home)}
    for words in (("upgrade", "-y"), ("downgrade", "-y", "-r", OLDEST_PREFECT)):
        subprocess.run([sys.executable, "-m", "prefect", "server", "database", *words], env=env, cwd=home, check=True,
                       capture_output=True)
    with closing(sqlite3.connect(place)) as database, database:
        database.execute("insert into flow (id, name) values (?, 'train')", (FLOW,))
        database.execute("insert into flow_run (id, name, flow_id, state_id, state_type, state_name, total_run_time) "
                         "values (?, 'last-year', ?, ?, 'COMPLETED', 'Completed', '1970-01-01 00:01:00.000000')",
                         (FLOW_RUN, FLOW, STATE))
        database.execute("insert into flow_run_state (id, type, name, flow_run_id) "
                         "values (?, 'COMPLETED', 'Completed', ?)", (STATE, FLOW_RUN))
    revision = databases.revision(place)
    assert databases.state(home, "prefect") == "older" and revision is not None
    return revision


MAKE_OLDER = """
import sys
from alembic import command
from alembic.script import ScriptDirectory
from mlflow.store.db import utils
url = sys.argv[1]
engine = utils.create_sqlalchemy_engine_with_retry(url)
utils.InitialBase.metadata.create_all(engine)
config = utils._get_alembic_config(url)
scripts = ScriptDirectory.from_config(config)
with engine.begin() as connection:
    config.attributes["connection"] = connection
    command.upgrade(config, scripts.get_revision(scripts.get_current_head()).down_revision)
"""


def older_mlflow(home: Path) -> str:
    place = databases.file(home, "mlflow")
    place.parent.mkdir(parents=True)
    subprocess.run([sys.executable, "-c", MAKE_OLDER, databases.url(home, "mlflow")], check=True, capture_output=True,
                   env=servers.clean_environ() | {"MLFLOW_DISABLE_TELEMETRY": "true"})
    with closing(sqlite3.connect(place)) as database, database:
        database.execute("insert into experiments (experiment_id, name, artifact_location, lifecycle_stage) "
                         "values (7, 'headway', ?, 'active')", ((place.parent / "artifacts").as_uri(),))
        database.execute("insert into runs (run_uuid, name, experiment_id, status, start_time, end_time, "
                         "lifecycle_stage, artifact_uri, source_type, user_id) "
                         "values (?, 'last-year', 7, 'FINISHED', 1, 2, 'active', ?, 'LOCAL', 'me')",
                         (MLFLOW_RUN, f"{place.parent.as_uri()}/artifacts/{MLFLOW_RUN}"))
        for table in ("metrics", "latest_metrics"):
            database.execute(f"insert into {table} (key, value, timestamp, run_uuid, step, is_nan) "
                             "values ('reward/mean', 0.5, 1, ?, 0, 0)", (MLFLOW_RUN,))
    revision = databases.revision(place)
    assert databases.state(home, "mlflow") == "older" and revision is not None
    return revision


# -- PostgreSQL

def postgres_programs() -> Path | None:
    """Where Debian has its `initdb`."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return found[-1].parent if found else Path(there).parent if (there := shutil.which("initdb")) else None


@pytest.fixture
def postgres(tmp_path: Path) -> Iterator[str]:
    """URL, without the database, of a server of PostgreSQL from the system's packages."""
    programs = postgres_programs()
    if programs is None:
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql")
    pytest.importorskip("psycopg", reason="pip install 'headway[postgres]'")
    data, port, secret = tmp_path / "pg", servers.free_port(), tmp_path / "pg-password"
    secret.write_text("pa-ss_word")
    user = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"] if os.getuid() == 0 else []
    data.mkdir()
    if user:
        for path in (data, secret):
            shutil.chown(path, "postgres", "postgres")
        top = Path(tempfile.gettempdir())
        for parent in (tmp_path, *tmp_path.parents):
            if top in parent.parents:
                parent.chmod(0o755)
    subprocess.run([*user, str(programs / "initdb"), "-D", str(data), "-U", "headway", "--auth=scram-sha-256",
                    f"--pwfile={secret}"], check=True, capture_output=True)
    server = subprocess.Popen([*user, str(programs / "postgres"), "-D", str(data), "-p", str(port), "-k", str(data),
                               "-h", servers.HOST], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"postgresql://headway:pa-ss_word@{servers.HOST}:{port}"
    try:
        make_databases(url)
        yield url
    finally:
        server.send_signal(signal.SIGINT)  # at SIGTERM it would wait for its clients
        server.wait(20)


def make_databases(url: str) -> None:
    import time

    import psycopg

    until = time.monotonic() + 30
    while True:
        try:
            connection = psycopg.connect(f"{url}/postgres", autocommit=True)
            break
        except psycopg.OperationalError:
            assert time.monotonic() < until
            time.sleep(0.2)
    for name in databases.NAMES:
        connection.execute(f"create database {name}")
    connection.close()


def test_both_servers_and_a_run_work_on_postgresql(bare_home: KeptHome, postgres: str,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    import psycopg

    monkeypatch.setenv("PG_PREFECT", f"{postgres}/prefect")
    monkeypatch.setenv("PG_MLFLOW", f"{postgres}/mlflow")
    report = bare_home.up("--prefect-database", "env:PG_PREFECT", "--mlflow-database", "env:PG_MLFLOW")
    assert "pa-ss_word" not in str(report) and report["databases"]["mlflow"].startswith("postgresql://headway:***@")
    assert doctor(bare_home) == []
    sets = [f"{name}={'null' if value is None else value}" for name, value in {**SMALL, "total_steps": 6}.items()]
    command = bare_home.train("postgres", *sets)
    assert command.wait() == 0, command.said
    with closing(psycopg.connect(f"{postgres}/mlflow")) as connection, connection.cursor() as cursor:
        cursor.execute("select status from runs where run_uuid = %s", (command.json["mlflow_run_id"],))
        assert cursor.fetchall() == [("FINISHED",)]
    with closing(psycopg.connect(f"{postgres}/prefect")) as connection, connection.cursor() as cursor:
        cursor.execute("select state_type::text from flow_run where name = 'postgres'")
        assert cursor.fetchall() == [("COMPLETED",)]
    assert not databases.file(bare_home.path, "prefect").exists()
    secret = "pa-ss_word"
    said = {words: bare_home.call(*words, "--json") for words in (
        ("doctor",), ("status", "postgres"), ("plan", "--run-key", "postgres"), ("services", "doctor"))}
    assert said[("doctor",)].json["runs"][0]["tracking"].startswith("postgresql://headway:***@")
    assert [words for words, one in said.items() if not one.json or secret in one.out + one.err] == []
    for place in (kept.directory(bare_home.path), command.run.root):
        for path in place.rglob("*"):
            if path.is_file():
                assert secret.encode() not in path.read_bytes(), path
