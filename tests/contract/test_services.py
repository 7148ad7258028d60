"""Private services against the real Prefect server and the real Ray: started, found again, watched, ended."""

from __future__ import annotations

import http.client
import json
import os
import signal
import stat
import subprocess
import sys
import textwrap
import time
from base64 import b64encode
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from rl_core.config import DeadlineConfig
from rl_core.errors import DeadlinePassed, DeadPart
from tasks import keeper, services
from tasks.services import Services

DEADLINES = DeadlineConfig()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def stages() -> dict[str, float]:
    return {}


@pytest.fixture(scope="module")
def running(home: Path, stages: dict[str, float]) -> Iterator[Services]:
    where = services.start(home / "services", home, isolated=True, deadlines=DEADLINES, on_stage=stages.__setitem__)
    yield where
    services.stop(where)


def ask(url: str, method: str, path: str, **headers: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(url.removeprefix("http://").removesuffix("/api"), timeout=10)
    connection.request(method, path, headers=headers)
    return connection.getresponse()


def members(where: Services) -> list[int]:
    return [pid for p in where.pids.values() for pid, _ in keeper.session_members(*p)]


def watchdog(state_dir: Path) -> tuple[int, int]:
    state = keeper.read_state(state_dir)
    assert state is not None
    return state["keeper"]["pid"], state["keeper"]["started"]


def test_both_start_at_once_and_say_where_they_are(running: Services, stages: dict[str, float]) -> None:
    assert set(stages) == set(running.pids) == {"prefect", "ray"}
    assert running.where["prefect"] == f"{running.prefect_api_url} (private, for this run alone)"
    assert running.where["ray"] == f"{running.ray_address} (private, for this run alone)"
    assert services.dead(running) == []
    assert all(os.getsid(p.pid) == p.pid != os.getsid(0) for p in running.pids.values())
    assert keeper.is_alive(*watchdog(running.state_dir))


def test_prefect_wants_its_password_and_has_no_word_for_other_origins(running: Services) -> None:
    assert running.prefect_auth is not None
    basic = "Basic " + b64encode(running.prefect_auth.encode()).decode()
    assert ask(running.prefect_api_url, "GET", "/api/admin/version").status == 401
    mine = ask(running.prefect_api_url, "GET", "/api/admin/version", Authorization=basic)
    assert (mine.status, json.loads(mine.read())) == (200, version("prefect"))
    foreign = ask(running.prefect_api_url, "GET", "/api/health", Authorization=basic, Origin="http://evil.example")
    assert foreign.getheader("Access-Control-Allow-Origin") is None
    page = running.prefect_api_url.removesuffix("/api")
    for name in (page, page.replace("127.0.0.1", "localhost")):
        own = ask(running.prefect_api_url, "GET", "/api/health", Authorization=basic, Origin=name)
        assert own.getheader("Access-Control-Allow-Origin") == name


def test_ray_wants_its_token(running: Services) -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")} | {
        "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "f" * 64}
    client = subprocess.Popen([sys.executable, "-c", f"import ray; ray.init(address={running.ray_address!r})"], env=env,
                              stderr=subprocess.PIPE, text=True)
    try:  # it would try for 40 s
        assert client.stderr is not None
        assert any("Unauthenticated" in line and "InvalidAuthToken" in line for line in client.stderr)
    finally:
        client.kill()
        client.wait()


def test_secrets_are_for_their_owner_alone(running: Services, home: Path) -> None:
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (home / "secrets").iterdir()}
    assert modes == {"prefect-auth": 0o600, "ray-token": 0o600}
    assert {stat.S_IMODE((home / name).stat().st_mode) for name in ("secrets", "prefect")} == {0o700}
    assert running.prefect_auth is not None and running.prefect_auth not in repr(running)
    commands = "".join(Path(f"/proc/{pid}/cmdline").read_text() for pid in members(running))
    assert running.prefect_auth not in commands
    assert (home / "secrets" / "ray-token").read_text() not in commands


def test_a_second_start_finds_them_alive(running: Services, home: Path) -> None:
    begun = time.monotonic()
    again = services.start(running.state_dir, home, isolated=True, deadlines=DEADLINES)
    assert time.monotonic() - begun < 1.0
    assert again.adopted and again.pids == running.pids
    assert again.where["ray"] == f"{running.ray_address} (private, of the start before this one)"


def test_a_flow_runs_on_them_and_says_nothing(running: Services, home: Path) -> None:
    program = textwrap.dedent(f"""
        from pathlib import Path
        from rl_core.config import DeadlineConfig
        from tasks import services
        where = services.start(Path({str(running.state_dir)!r}), Path({str(home)!r}), isolated=True,
                               deadlines=DeadlineConfig())
        services.export(where)
        from prefect import flow, task
        from prefect.client.orchestration import get_client
        @task
        def double(n):
            return 2 * n
        @flow
        def doubled(n):
            return double(n)
        assert doubled(21) == 42
        with get_client(sync_client=True) as client:
            assert str(client.api_url).startswith(where.prefect_api_url)
            print([run.state_name for run in client.read_flow_runs()])
    """)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "HEADWAY_"))} | {
        "PREFECT_API_URL": "http://other/api"}
    done = subprocess.run([sys.executable, "-c", program], env=env, cwd=home, capture_output=True, text=True,
                          timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "['Completed']\n", "")


def test_a_dead_server_is_replaced_and_the_live_head_kept(running: Services, home: Path) -> None:
    os.kill(running.pids["prefect"].pid, signal.SIGKILL)
    again = services.start(running.state_dir, home, isolated=True, deadlines=DEADLINES)
    assert again.pids["ray"] == running.pids["ray"]
    assert again.pids["prefect"] != running.pids["prefect"]
    assert services.dead(running) == ["prefect"] and services.dead(again) == []


def test_services_outlive_a_killed_owner_and_stop_leaves_nothing(home: Path, tmp_path: Path) -> None:
    owner = textwrap.dedent(f"""
        import json, os, signal
        from pathlib import Path
        from rl_core.config import DeadlineConfig
        from tasks import services
        s = services.start(Path({str(tmp_path)!r}), Path({str(home)!r}), isolated=True, deadlines=DeadlineConfig())
        print(json.dumps(s.pids), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    done = subprocess.run([sys.executable, "-c", owner], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (-signal.SIGKILL, "")
    where = services.start(tmp_path, home, isolated=True, deadlines=DEADLINES)
    assert where.adopted and where.pids == {k: tuple(v) for k, v in json.loads(done.stdout).items()}
    state, dog = keeper.read_state(tmp_path), watchdog(tmp_path)
    assert state is not None and Path(state["scratch"]).is_dir()
    begun = time.monotonic()
    services.stop(where)
    assert time.monotonic() - begun < 8.0
    assert members(where) == []
    assert not keeper.is_alive(*dog)
    assert not Path(state["scratch"]).exists() and keeper.read_state(tmp_path) is None
    assert (tmp_path / "ray-logs" / "raylet.out").is_file()
    services.stop(where)  # again: nothing to do


def test_silence_ends_services(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray alone, to be quick; test_cluster.py has it with actors and a killed owner."""
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    where = services.start(tmp_path, home, isolated=False, deadlines=DeadlineConfig(owner_timeout_s=3))
    assert where.where["prefect"] == "http://127.0.0.1:9/api (PREFECT_API_URL)" and set(where.pids) == {"ray"}
    time.sleep(4.0)
    assert services.dead(where) == [], "an owner that lives is heard"
    services._Beat.stop(tmp_path)
    silent, dog = time.monotonic(), watchdog(tmp_path)
    while members(where) or keeper.is_alive(*dog):
        assert time.monotonic() - silent < 3 + keeper.GRACE_S + 3
        time.sleep(0.1)
    assert keeper.read_state(tmp_path) is None


def test_a_service_that_cannot_start_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "prefect" / "prefect.db").mkdir(parents=True)
    before = leaders_started_here()
    with pytest.raises(DeadPart, match=r"(?s)Prefect server ended while it started.*unable to open database file"):
        services.start(tmp_path / "services", tmp_path, isolated=True, deadlines=DEADLINES)
    assert keeper.read_state(tmp_path / "services") is None
    assert leaders_started_here() == before


def test_a_start_has_a_deadline(home: Path, tmp_path: Path) -> None:
    begun = time.monotonic()
    with pytest.raises(DeadlinePassed, match=r"did not answer in 1 s \(deadlines.service_start_s\)"):
        services.start(tmp_path, home, isolated=True, deadlines=DeadlineConfig(service_start_s=0.5))
    assert time.monotonic() - begun < 15.0
    assert keeper.read_state(tmp_path) is None


def leaders_started_here() -> set[int]:
    """Live processes that this one started and that lead a session."""
    return {pid for pid, p in keeper.processes().items() if p.parent == os.getpid() and p.session == pid}


PROFILE = 'active = "work"\n[profiles.work]\nPREFECT_API_URL = "http://profile/api"\n'


@pytest.mark.parametrize(("isolated", "environ", "want"), [
    (False, {}, {}),
    (False, {"PREFECT_API_URL": "http://p/api", "RAY_ADDRESS": "r:1"},
     {"prefect": ("http://p/api", "PREFECT_API_URL"), "ray": ("r:1", "RAY_ADDRESS")}),
    (True, {"PREFECT_API_URL": "http://p/api", "RAY_ADDRESS": "r:1"}, {}),
    (True, {"PREFECT_API_URL": "http://p/api", "PREFECT__FLOW_RUN_ID": "1"},
     {"prefect": ("http://p/api", "the server that started this flow run")}),
    (False, {"PREFECT_API_URL": "http://p/api", "RAY_ADDRESS": "r:1", "HEADWAY_PRIVATE_SERVICES": "prefect,ray"}, {}),
    (False, {"PREFECT_API_URL": "http://p/api", "RAY_ADDRESS": "r:1", "HEADWAY_PRIVATE_SERVICES": "ray"},
     {"prefect": ("http://p/api", "PREFECT_API_URL")}),
    (False, {"PREFECT_PROFILES_PATH": "PROFILE"}, {"prefect": ("http://profile/api", "Prefect profile 'work'")}),
    (False, {"PREFECT_PROFILES_PATH": "PROFILE", "PREFECT_PROFILE": "other"}, {}),
], ids=["nothing", "given", "isolated", "started by prefect", "own private ones", "own private head", "profile",
        "profile without address"])
def test_ambient_services(tmp_path: Path, isolated: bool, environ: dict[str, str],
                          want: dict[str, tuple[str, str]]) -> None:
    (tmp_path / "profiles.toml").write_text(PROFILE)
    environ = {"PREFECT_HOME": str(tmp_path / "none")} | environ
    if environ.get("PREFECT_PROFILES_PATH"):
        environ["PREFECT_PROFILES_PATH"] = str(tmp_path / "profiles.toml")
    assert services.ambient(isolated=isolated, environ=environ) == want


def test_export_replaces_ambient_settings(running: Services, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.setattr(os, "environ", os.environ.copy())
    os.environ |= {"PREFECT_API_KEY": "k", "PREFECT_LOGGING_LEVEL": "DEBUG", "RAY_ADDRESS": "other:1"}
    where = services.start(running.state_dir, home, isolated=True, deadlines=DEADLINES)
    services.export(where)
    assert os.environ["PREFECT_API_URL"] == where.prefect_api_url
    assert os.environ["RAY_ADDRESS"] == where.ray_address
    assert "PREFECT_API_KEY" not in os.environ and "PREFECT_LOGGING_LEVEL" not in os.environ
    assert "127.0.0.1" in os.environ["NO_PROXY"].split(",")


def test_a_pid_with_another_start_time_is_never_signalled() -> None:
    child = subprocess.Popen(["sleep", "100"], start_new_session=True)
    started = keeper.start_time(child.pid)
    assert started is not None
    try:
        keeper.signal_process(child.pid, started + 1, signal.SIGKILL)
        assert keeper.end_sessions([(child.pid, started - 1)], 0.2) == []
        assert child.poll() is None
        assert keeper.end_sessions([(child.pid, started)], 2.0) == []
        assert not keeper.is_alive(child.pid, started)
    finally:
        child.kill()
        child.wait()
