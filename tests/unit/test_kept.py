"""Kept services without servers: what is noted, which database is chosen, when one is started again or given up."""

from __future__ import annotations

import json
import os
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest

from flows.presets import nested
from flows.serving import diagnosis_lines, environment_lines, page_lines
from rl_core.config import Config
from rl_core.errors import BrokenFile, ConfigError, DeadlinePassed, DeadPart
from tasks import databases, keeper, keeping, kept, servers, services
from tasks.destination import destination
from tasks.keeping import environment, status
from tasks.kept import Kept, Service, Settings
from tasks.servers import Process
from tasks.service_doctor import DEPLOYMENTS, examine
from tasks.supervisor import ASK_S, BACKOFF_S, HANGS_S, RESTARTS, START_S, Supervisor, Watched
from tests.answering import answering

GONE = Process(2**22 - 1, 1)
ROOT = Path(__file__).resolve().parents[2]


# -- what is noted

def test_what_is_noted_is_read_again(tmp_path: Path) -> None:
    noted = Kept(supervisor=GONE, since_us=5, services={
        "prefect": Service(name="prefect", state="ready", process=GONE, address="http://127.0.0.1:1", restarts=2),
        "worker": Service(name="worker", why="ended by itself")})
    kept.write(tmp_path, noted)
    assert kept.read(tmp_path) == noted
    assert not noted.watched and not noted.ready and not noted.services["prefect"].alive
    assert kept.address(tmp_path, "prefect") is None, "its process is gone"
    kept.write_settings(tmp_path, Settings(prefect_port=1, mlflow_port=2))
    assert kept.read_settings(tmp_path) == Settings(prefect_port=1, mlflow_port=2)


@pytest.mark.parametrize("text", ["", "{}", '{"format": 99}'], ids=["cut", "without a format", "newer"])
def test_a_note_that_cannot_be_read_is_named(tmp_path: Path, text: str) -> None:
    kept.directory(tmp_path).mkdir()
    (kept.directory(tmp_path) / "kept.json").write_text(text)
    with pytest.raises(BrokenFile, match=r"kept\.json"):
        kept.read(tmp_path)
    assert kept.address(tmp_path, "prefect") is None and kept.prefect_api(tmp_path) is None
    assert any("kept.json" in text for text in examine(tmp_path, {})["findings"])


def test_of_another_boot_nothing_is_there(tmp_path: Path) -> None:
    kept.write(tmp_path, Kept(supervisor=GONE, since_us=5))
    path = kept.directory(tmp_path) / "kept.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "boot_id": "another"}))
    assert kept.read(tmp_path) is None and not status(tmp_path)["up"]


def test_without_services_there_is_no_environment(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="headway services up"):
        environment(tmp_path)


def test_exports_are_for_any_shell() -> None:
    assert environment_lines({"A": "it's", "B": "x"}, ["C"]) == ["unset C", """export A='it'"'"'s'""", "export B=x"]


def test_reports_in_words() -> None:
    pages = page_lines({"services": {"mlflow": {"address": "http://m"}, "prefect": {"address": "http://p"}},
                        "secret": "/s"})
    assert pages[:2] == ["MLflow   http://m", "Prefect  http://p"]
    assert diagnosis_lines({"findings": [], "notes": ["n"]}) == ["note:  n", "nothing is wrong"]
    assert diagnosis_lines({"findings": ["f"], "notes": []}) == ["wrong: f"]


# -- what is wrong with them

def test_directories_of_the_services_are_for_their_owner_alone(tmp_path: Path) -> None:
    """Made so whatever the umask is, and where they are found otherwise."""
    found = kept.directories(tmp_path)
    found[0].mkdir()
    before = os.umask(0)
    try:
        for place in found:
            servers.for_owner_alone(place)
    finally:
        os.umask(before)
    assert [(place.name, stat.S_IMODE(place.stat().st_mode)) for place in found] == [
        ("prefect", 0o700), ("mlflow", 0o700), ("services", 0o700)]
    kept.write_settings(tmp_path, Settings(prefect_port=servers.free_port(), mlflow_port=servers.free_port()))
    assert examine(tmp_path, {})["findings"] == []
    found[0].chmod(0o755)
    assert examine(tmp_path, {})["findings"] == [
        f"{found[0]} can be read by others (mode 0755): chmod 700 {found[0]}"]
    (kept.directory(tmp_path) / "settings.json").unlink()
    assert examine(tmp_path, {})["findings"] == [], "a home in which services never were up"


@pytest.mark.parametrize("silent", ["GET /api/admin/settings", f"GET /api/work_pools/{kept.POOL}",
                                    "GET /api/deployments/name/nightly/nightly"])
def test_a_busy_server_is_not_said_to_lack_what_it_does_not_tell_of(tmp_path: Path, silent: str) -> None:
    answers = {
        "GET /api/admin/version": (200, "3"), f"GET /api/work_pools/{kept.POOL}": (200, {"type": "process",
                                                                                       "is_paused": False}),
        "GET /api/admin/settings": (200, {"server": {"analytics_enabled": False, "concurrency": {
            "lease_storage": "prefect.server.concurrency.lease_storage.filesystem"}}}),
        "POST /api/automations/filter": (200, [{"enabled": True}]),
        **{f"GET /api/deployments/name/{name}": (200, {}) for name in DEPLOYMENTS}}
    me = Process(1, keeper.start_time(1) or 0)
    with answering({asked: said for asked, said in answers.items() if asked != silent}) as prefect:
        kept.write(tmp_path, Kept(supervisor=me, since_us=0, services={name: Service(
            name=name, state="ready", process=me, address=prefect.page if name == "prefect" else None)
            for name in kept.NAMES}))
        said = examine(tmp_path, {})
    assert [text.partition(" to ")[2] for text in said["findings"] + said["notes"]] == [silent.replace("/api", "")]
    assert bool(said["notes"]) == ("deployments" in silent)


# -- who uses them

API, KEPT = "http://p/api", "http://kept/api"


@pytest.mark.parametrize(("isolated", "environ", "want"), {
    "isolated": (True, {"PREFECT_API_URL": API}, (KEPT, kept.WHY)),
    "an address goes before it": (False, {"PREFECT_API_URL": API}, (API, "PREFECT_API_URL")),
    "its own address": (False, {"PREFECT_API_URL": KEPT}, (KEPT, kept.WHY)),
    "it goes before a profile": (False, {}, (KEPT, kept.WHY)),
    "a flow of the worker": (True, {"PREFECT_API_URL": API, "PREFECT__FLOW_RUN_ID": "1"},
                             (API, "the server that started this flow run")),
}.values(), ids=lambda value: None)
def test_a_kept_server_is_headways_own(tmp_path: Path, isolated: bool, environ: dict[str, str],
                                       want: tuple[str, str]) -> None:
    (tmp_path / "profiles.toml").write_text('active = "w"\n[profiles.w]\nPREFECT_API_URL = "http://profile/api"\n')
    environ = {"PREFECT_PROFILES_PATH": str(tmp_path / "profiles.toml")} | environ
    assert services.ambient(isolated=isolated, environ=environ, kept_api=KEPT)["prefect"] == want


def test_a_start_stays_with_the_kept_server_while_it_is_restarted() -> None:
    environ = {"PREFECT_API_URL": KEPT, services.PRIVATE: "ray"}
    assert services.ambient(isolated=True, environ=environ, kept_api=None) == {"prefect": (KEPT, kept.WHY)}


def test_runs_are_tracked_in_the_database_of_the_kept_server(tmp_path: Path) -> None:
    """Whether it is up or not: they find their MLflow run again."""
    sqlite = f"sqlite:///{tmp_path}/mlflow/mlflow.db"
    me = Process(1, keeper.start_time(1) or 0)
    kept.write(tmp_path, Kept(supervisor=me, since_us=0, services={
        "mlflow": Service(name="mlflow", state="ready", process=me, address="http://127.0.0.1:5000")}))
    for uri in ("http://127.0.0.1:5000", "http://127.0.0.1:5000/"):
        assert destination(Config(), tmp_path, {"MLFLOW_TRACKING_URI": uri}).uri == sqlite
    assert destination(Config(), tmp_path, {"MLFLOW_TRACKING_URI": "http://other"}).uri == "http://other"
    databases.choose(tmp_path, "mlflow", "postgresql://me:pw@host/db")
    assert destination(Config(isolated=True), tmp_path, {}).uri == "postgresql://me:pw@host/db"
    assert "pw" not in str(destination(Config(), tmp_path, {}))


# -- databases

def test_a_database_is_chosen_as_a_secret(tmp_path: Path) -> None:
    assert databases.prefect_url(tmp_path) == f"sqlite+aiosqlite:///{tmp_path}/prefect/prefect.db"
    databases.choose(tmp_path, "prefect", databases.checked("prefect", "env:X", {"X": "postgres://u:p@h:1/d"}))
    assert databases.prefect_url(tmp_path) == "postgresql+asyncpg://u:p@h:1/d"
    assert servers.prefect_env(tmp_path, 1, "a:b")["PREFECT_API_DATABASE_CONNECTION_URL"].endswith("u:p@h:1/d")
    assert stat.S_IMODE((tmp_path / "secrets" / "prefect-database").stat().st_mode) == 0o600
    databases.choose(tmp_path, "prefect", databases.checked("prefect", "sqlite"))
    assert databases.is_sqlite(tmp_path, "prefect")


def test_a_database_is_copied_before_every_start_that_migrates_it(tmp_path: Path) -> None:
    """Also one that was put back from a copy after this Prefect had migrated it; and the mark of PostgreSQL, which a
    start made meanwhile, says nothing of the file."""
    base, newest = tmp_path / "prefect", databases.known_revisions("prefect")[1]
    base.mkdir()
    set_revision(base / "prefect.db", newest)
    assert not servers.migrated(base)
    with servers.first_start(base):
        pass
    assert servers.migrated(base) and not list(base.glob("*-before-*"))
    older = sorted(databases.known_revisions("prefect")[0] - {newest})[0]
    set_revision(base / "prefect.db", older)
    assert not servers.migrated(base)
    with servers.first_start(base):
        [copy] = base.glob("prefect-before-*.db")
        assert databases.revision(copy) == older
        set_revision(base / "prefect.db", newest)
    assert servers.migrated(base)
    databases.choose(tmp_path, "prefect", "postgresql://u:p@h:1/d")
    assert not servers.migrated(base), "another database"
    with servers.first_start(base):
        pass
    assert servers.migrated(base)
    databases.choose(tmp_path, "prefect", None)
    set_revision(base / "prefect.db", older)
    assert not servers.migrated(base)


def set_revision(place: Path, revision: str) -> None:
    with closing(sqlite3.connect(place)) as database, database:
        database.execute("create table if not exists alembic_version (version_num text)")
        database.execute("delete from alembic_version")
        database.execute("insert into alembic_version values (?)", (revision,))


@pytest.mark.parametrize(("given", "why"), {
    "another kind": ("mysql://u@h/d", "write postgresql://"),
    "without a database": ("postgresql://u@h", "write postgresql://"),
    "a path": ("/tmp/x.db", "write postgresql://"),
    "a variable that is not there": ("env:NO", "no such variable"),
}.values(), ids=lambda value: None)
def test_what_is_no_database_is_refused(given: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        databases.checked("prefect", given, {})


def test_a_refusal_tells_no_password() -> None:
    with pytest.raises(ConfigError) as refusal:
        databases.checked("prefect", "mysql://u:secret@h/d", {})
    assert "secret" not in str(refusal.value)


@pytest.mark.parametrize("name", databases.NAMES)
def test_schemas_are_compared_with_the_installed_package(tmp_path: Path, name: str) -> None:
    known, newest = databases.known_revisions(name)
    place, older = databases.file(tmp_path, name), next(one for one in sorted(known) if one != newest)
    assert (databases.state(tmp_path, name), databases.copy_before_migration(tmp_path, name)) == ("absent", None)
    for revision, want in {newest: "current", older: "older", "fffffffffff": "newer"}.items():
        place.parent.mkdir(exist_ok=True)
        place.unlink(missing_ok=True)
        with closing(sqlite3.connect(place)) as database:
            database.execute("create table alembic_version (version_num text)")
            database.execute("insert into alembic_version values (?)", (revision,))
            database.commit()
        assert databases.state(tmp_path, name) == want
        copy = databases.copy_before_migration(tmp_path, name)
        assert (copy is not None) == (want == "older")
        assert copy is None or databases.revision(copy) == older


# -- when a service is started again

class Clock:
    """Time that passes when it is told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watcher(tmp_path: Path, clock: Clock) -> Iterator[Supervisor]:
    """A supervisor of one real process, `mlflow`, that does nothing, and answers as `answering` says."""
    kept.directory(tmp_path).mkdir()
    made = Supervisor(tmp_path, Settings(prefect_port=servers.free_port(), mlflow_port=servers.free_port()), clock)
    yield made
    made.end()


def watch(watcher: Supervisor, home: Path, seconds: str, answering: list[bool]) -> Watched:
    """One that ends by itself after so many seconds."""
    one = Watched("mlflow", lambda: servers.spawn(["sleep", seconds], {}, cwd=home, log=kept.log(home, "mlflow")),
                  lambda: answering[0])
    watcher.watched = [one]
    return one


def look(watcher: Supervisor, clock: Clock, state: str, tries: int = 400) -> Service:
    """Look, a second of its time after the other, until the service is in this state."""
    for _ in range(tries):
        watcher.look()
        if (service := watcher.kept.services["mlflow"]).state == state:
            return service
        clock.now += 1.0
        time.sleep(0.005)
    raise AssertionError(watcher.kept.services["mlflow"])


def test_a_service_that_never_answers_is_tried_twice(tmp_path: Path, watcher: Supervisor, clock: Clock) -> None:
    watch(watcher, tmp_path, "100", [False])
    first = look(watcher, clock, "starting").process
    lost = look(watcher, clock, "given up")
    assert lost.why is not None and lost.why.startswith(f"did not answer in {START_S:.0f} s")
    assert first is not None and not keeper.is_alive(*first) and lost.process is None
    assert START_S * 2 <= clock.now <= START_S * 2 + 20


def test_a_service_that_hangs_is_started_again(tmp_path: Path, watcher: Supervisor, clock: Clock) -> None:
    answering = [True]
    watch(watcher, tmp_path, "100", answering)
    first, since = look(watcher, clock, "ready"), clock.now
    answering[0] = False
    down = look(watcher, clock, "down")
    assert HANGS_S <= clock.now - since <= HANGS_S + 10
    assert down.restarts == 1 and first.process is not None and not keeper.is_alive(*first.process)
    answering[0] = True
    assert look(watcher, clock, "ready").process != first.process


def test_a_service_that_ends_again_and_again_is_given_up(tmp_path: Path, watcher: Supervisor, clock: Clock) -> None:
    one = watch(watcher, tmp_path, "100", [True])
    gaps = list[float]()
    for _ in range(RESTARTS + 1):
        service = look(watcher, clock, "ready")
        assert service.process is not None
        keeper.end_sessions([service.process], 0.0)
        watcher.look()
        gaps.append(one.not_before - clock.now)
    assert gaps[:RESTARTS] == list(BACKOFF_S)
    lost = watcher.kept.services["mlflow"]
    assert (lost.state, lost.restarts) == ("given up", RESTARTS)
    assert lost.why is not None and lost.why.startswith(f"ended {RESTARTS + 1} times in 600 s: ended by itself")
    noted = kept.read(tmp_path)
    assert noted is not None and noted.services["mlflow"] == lost


def test_a_run_whose_owner_cannot_be_seen_is_looked_at_again(tmp_path: Path, clock: Clock) -> None:
    """Nothing is said of it meanwhile, and the others are judged."""
    def pending(name: str) -> dict[str, object]:
        return {"id": name, "name": name, "work_pool_name": kept.POOL,
                "state": {"type": "PENDING", "timestamp": "2026-01-31T00:00:00+00:00"}}

    with answering({"POST /api/flow_runs/filter": (200, [pending("hidden"), pending("gone")]),
                    "POST /api/events/filter": (200, {"events": []}),
                    **{f"POST /api/flow_runs/{name}/set_state": (200, {"status": "ACCEPT"})
                       for name in ("hidden", "gone")}}) as prefect:
        kept.directory(tmp_path).mkdir()
        watcher = Supervisor(tmp_path, Settings(prefect_port=prefect.server_port, mlflow_port=1), clock)
        watcher._up_since = datetime.now(UTC)
        hidden = tmp_path / "runs" / "hidden"
        hidden.parent.mkdir()
        hidden.write_text("no directory: what is below it cannot be opened")

        def crashed() -> list[str]:
            prefect.asked.clear()
            watcher._look_for_the_dead()
            return [asked.split("/")[3] for asked in prefect.asked if asked.endswith("set_state")]

        assert (crashed(), crashed()) == (["gone"], []), "it is given time"
        hidden.unlink()
        clock.now += ASK_S
        assert crashed() == ["hidden", "gone"]
        clock.now += ASK_S
        assert crashed() == [] and prefect.asked == [], "all have been seen"


# -- `up` where one of the three does not get ready

SUPERVISES = """
import sys
from pathlib import Path
from tasks import kept, servers, supervisor
from tasks.supervisor import Supervisor

def sleeping(name, seconds):
    return lambda self: servers.spawn(["sleep", seconds], self._mark(), cwd=self._home, log=kept.log(self._home, name))

Supervisor._start_mlflow = sleeping("mlflow", sys.argv[2])
Supervisor._start_prefect, Supervisor._start_worker = sleeping("prefect", "600"), sleeping("worker", "600")
Supervisor._worker_answers = lambda self: True
servers.mlflow_answers, servers.prefect_answers = lambda address: False, lambda api, auth: True
sys.exit(supervisor.main(Path(sys.argv[1])))
"""
"""A real supervisor. Its Prefect and its worker are ready at once; its MLflow lives for some seconds, and never is."""


class Supervising:
    """Starts supervisors of a home."""

    def __init__(self, home: Path, mlflow_s: str = "0.3") -> None:
        self.home, self.mlflow_s = home, mlflow_s
        self.started = list[subprocess.Popen[bytes]]()

    def start(self, home: Path) -> None:
        self.started.append(subprocess.Popen([sys.executable, "-c", SUPERVISES, str(home), self.mlflow_s], cwd=ROOT))

    def noted(self, mlflow: str) -> Kept:
        """What is noted once the others are ready, and MLflow is in this state."""
        until = time.monotonic() + 60
        while True:
            found = kept.read(self.home)
            states = {} if found is None else {name: service.state for name, service in found.services.items()}
            if found is not None and states == {"mlflow": mlflow, "prefect": "ready", "worker": "ready"}:
                return found
            assert time.monotonic() < until, states
            time.sleep(0.05)


@pytest.fixture
def supervising(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervising]:
    kept.directory(tmp_path).mkdir()
    kept.write_settings(tmp_path, Settings(prefect_port=servers.free_port(), mlflow_port=servers.free_port()))
    one = Supervising(tmp_path)
    monkeypatch.setattr(keeping, "_spawn", one.start)
    yield one
    keeping.down(tmp_path)
    for process in one.started:
        process.wait(10)


FAILS_AGAIN = {
    # seconds that MLflow lives, whether the supervisor was killed, and what is said
    "it ends": ("0.3", False, DeadPart, "mlflow: ended by itself"),
    "it never answers": ("600", False, DeadlinePassed, "mlflow did not get ready in 2 s"),
    "it ends under a new supervisor": ("0.3", True, DeadPart, "mlflow: ended by itself")}


@pytest.mark.skipif(not keeper.PROC, reason="processes are not listed")
@pytest.mark.parametrize(("seconds", "killed", "error", "why"), FAILS_AGAIN.values(), ids=FAILS_AGAIN)
def test_a_service_that_fails_again_ends_none_of_those_that_were_up(
        supervising: Supervising, monkeypatch: pytest.MonkeyPatch, seconds: str, killed: bool, error: type[Exception],
        why: str) -> None:
    """A night may be at work with them."""
    supervising.mlflow_s = seconds
    supervising.start(supervising.home)
    before = supervising.noted("given up" if seconds == "0.3" else "starting")
    if killed:
        supervising.started[0].kill()
        supervising.started[0].wait()
    else:
        monkeypatch.setattr(keeping, "UP_S", 2.0)
    with pytest.raises(error, match=why) as said:
        keeping.up(supervising.home)
    assert "services that were up go on (prefect, worker); mend the cause" in str(said.value)
    after = kept.read(supervising.home)
    assert after is not None and after.watched and (after.supervisor == before.supervisor) != killed
    for name in ("prefect", "worker"):
        assert after.services[name].alive and after.services[name].process == before.services[name].process


@pytest.mark.skipif(not keeper.PROC, reason="processes are not listed")
def test_a_first_start_that_cannot_have_all_three_leaves_none(supervising: Supervising) -> None:
    ready: list[str] = []
    with pytest.raises(DeadPart, match="mlflow: ended by itself") as said:
        keeping.up(supervising.home, on_ready=lambda name, seconds: ready.append(name))
    assert sorted(ready) == ["prefect", "worker"] and "go on" not in str(said.value)
    assert kept.read(supervising.home) is None
    assert [pid for pid in keeper.processes() if kept.is_of(supervising.home, pid)] == []


# -- parameters

def test_overrides_of_a_flow_are_written_as_with_set_or_as_a_tree() -> None:
    assert nested({"seed": 3, "learner.lr": 1e-5, "learner": {"threads": 1}, "data.size": 8}) == {
        "seed": 3, "learner": {"lr": 1e-5, "threads": 1}, "data": {"size": 8}}
