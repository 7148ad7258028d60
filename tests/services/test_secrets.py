"""Secrets that are planted in every way in which they are given, and looked for in everything that is left behind:
databases, logs, run directories, pages, command lines. And what a stranger may ask of the servers."""

from __future__ import annotations

import asyncio
import http.server
import json
import secrets
import threading
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rl_core.run_dir import RunDir, read_json
from tasks import keeper, kept, servers
from tests.judging import Judge, says, sends
from tests.kept import SMALL, KeptHome
from tests.runs import processes_of

pytestmark = pytest.mark.services

MAKE_BLOCKS = """
import sys
from prefect.blocks.system import Secret
from prefect.blocks.webhook import Webhook
Webhook(url=sys.argv[1]).save("morning")
Secret(value=sys.argv[2]).save("api-key")
"""


@dataclass
class PlantedHome(KeptHome):
    """A home whose services, and all that they start, have these variables."""

    planted: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def environ(self) -> dict[str, str]:
        return super().environ | self.planted


class Hook(http.server.BaseHTTPRequestHandler):
    """Takes words, and is of no use: its answer is an error, so that somebody logs it."""

    asked: list[str] = []  # noqa: RUF012

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.asked.append(self.path)
        self.send_response(500)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def hook() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hook)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    """A reward that wants a key; it is out of order at first, so that somebody has a reason to log what he asked."""
    one = Judge([sends({"error": "busy"}, 503), says("Score: 5")])
    yield one
    one.close()


@pytest.fixture(scope="module")
def words() -> dict[str, str]:
    """Each secret by where it is planted: letters and digits alone, which nobody escapes."""
    return {name: f"planted{secrets.token_hex(12)}" for name in (
        "a variable for the webhook", "a webhook block", "a Secret block", "the password of a database",
        "a key of the environment", "the password of a tracking URI")}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, hook: str, words: dict[str, str]) -> Iterator[PlantedHome]:
    path = tmp_path_factory.mktemp("planted")
    mlflow_port = servers.free_port()
    home = PlantedHome(path, prefect_port=servers.free_port(), mlflow_port=mlflow_port, planted={
        "NIGHT_HOOK": f"{hook}/{words['a variable for the webhook']}",
        "HEADWAY_JUDGE_KEY": words["a key of the environment"],
        "HEADWAY_TRACKING": f"http://me:{words['the password of a tracking URI']}@{servers.HOST}:{mlflow_port}",
        "LOST_DB": f"postgresql://me:{words['the password of a database']}@127.0.0.1:9/prefect"})
    home.up()
    deployed = home.call("deploy", "--json")
    assert deployed.process.returncode == 0, deployed.said
    yield home
    home.down()


def found_in(root: Path, needles: dict[str, str]) -> list[str]:
    """Which secrets are in the files under `root`, as they are or in base64; `secrets/` is the place for them."""
    spelled = {name: (word.encode(), *(b64encode(b"x" * shift + word.encode())[4:-4] for shift in range(3)))
               for name, word in needles.items()}
    found: list[str] = []
    for path in sorted(root.rglob("*")):
        if path.is_file() and not path.is_symlink() and root / "secrets" not in path.parents:
            data = path.read_bytes()
            found += [f"{name}: {path.relative_to(root)}" for name, forms in spelled.items()
                      if any(form in data for form in forms)]
    return found


def test_a_planted_word_would_be_found(tmp_path: Path, words: dict[str, str]) -> None:
    (tmp_path / "a.db").write_bytes(b"\0\1" + words["a Secret block"].encode() + b"\2")
    (tmp_path / "b.log").write_bytes(b"Basic " + b64encode(b"headway:" + words["a webhook block"].encode()))
    assert found_in(tmp_path, words) == ["a Secret block: a.db", "a webhook block: b.log"]


def test_no_secret_is_left_anywhere_by_nights_that_use_them(home: PlantedHome, hook: str, judge: Judge,
                                                            words: dict[str, str]) -> None:
    """One night cannot begin and is told to the variable's webhook; another one to a block that is none, as by
    somebody who mistook its name; one trains by the word of a judge that has its key, is tracked at the URI of a
    variable, and is told to a block's webhook. Both webhooks refuse, so that what went wrong is logged as well."""
    block = f"{hook}/{words['a webhook block']}"
    made = home.shell(f"python -c '{MAKE_BLOCKS}' {block} {words['a Secret block']}")
    assert made.returncode == 0, (made.stdout, made.stderr)
    for address in ("env:NIGHT_HOOK", "block:secret/api-key"):
        failed = home.submit("nightly/nightly", preset="there-is-none", notify=address, name="bad")
        home.wait_for_state(failed, "FAILED")  # one night at a time
    settings = {name: value for name, value in SMALL.items() if name != "data.validation"} | {
        "total_steps": 6, "data.validation_size": 16, "prometheus.port": 0, "reward": "judge",
        "scoring.judge.url": judge.url, "scoring.judge.key": "env:HEADWAY_JUDGE_KEY", "scoring.judge.right": 0.5,
        "tracking.uri": "env:HEADWAY_TRACKING"}
    trained = home.submit("nightly/nightly", preset="tiny-cpu", notify="block:webhook/morning", name="good",
                          overrides=settings)
    home.wait_for_state(trained, "COMPLETED", deadline_s=480)
    lost = home.call("services", "up", "--prefect-database", "env:LOST_DB")
    assert lost.process.returncode == 2 and "error: --prefect-database" in lost.err

    assert sorted(path.strip("/") for path in set(Hook.asked)) == sorted(
        [words["a variable for the webhook"], words["a webhook block"]]), "both were used"
    assert {asked["Authorization"] for asked in judge.headers} == {f"Bearer {words['a key of the environment']}"}
    warned = [line["message"] for line in home.ask("POST", "/logs/filter", {"logs": {"level": {"ge_": 30}}})]
    assert any("block:secret/api-key: AttributeError" in line for line in warned), "it was read, and is no webhook"
    [run] = [RunDir(path) for path in (home.path / "runs").iterdir() if path.name.startswith("good")]
    logged = [json.loads(line) for line in run.component_log("owner").read_text().splitlines()]
    assert logged[-1]["message"] == "state: completed" and {"learner-0.jsonl", "rollout-0.jsonl"} <= {
        path.name for path in run.logs.iterdir()}
    assert read_json(run.mlflow_run)["uri"] == f"http://me:***@{servers.HOST}:{home.mlflow_port}"
    told = [home.call(*asked, "--json") for asked in (
        ("doctor",), ("services", "doctor"), ("status", run.root.name), ("plan", "--run-key", run.root.name))]
    assert all(one.json for one in told)
    pages = list(home.path.rglob("*.html"))
    assert pages, "there are pages to look at"
    needles = words | {"Prefect's password": servers.prefect_auth(home.path).partition(":")[2]}
    assert found_in(home.path, needles) == []
    shown = "\n".join([*processes_of(home).values(), *(one.out + one.err for one in (lost, *told))])
    assert [name for name, word in needles.items() if word in shown] == []
    for path, body in (("/logs/filter", {"limit": 200}), ("/artifacts/filter", {}), ("/flow_runs/filter", {})):
        said = json.dumps(home.ask("POST", path, body))
        assert [name for name, word in needles.items() if word in said] == [], path


def test_a_stranger_hears_nothing_of_the_blocks(home: PlantedHome) -> None:
    """Without the password not even their names; with it their secrets only where somebody asks for them."""
    request = urllib.request.Request(f"{home.prefect_page}/api/block_documents/filter", b"{}",
                                     {"Content-Type": "text/plain", "Origin": "http://evil.example"})
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(request, timeout=10)


@pytest.mark.parametrize("path", ["/api/events/in", "/api/events/out", "/api/logs/out"])
def test_a_web_socket_of_another_page_is_closed(home: PlantedHome, path: str) -> None:
    """A browser asks nobody before it opens one; the server wants the password as the first word."""
    from websockets.asyncio.client import connect
    from websockets.exceptions import ConnectionClosed, InvalidStatus

    address = f"ws://{servers.HOST}:{home.prefect_port}{path}"

    async def tried(**options: Any) -> str:
        try:
            async with connect(address, origin="http://evil.example", **options) as socket:
                await socket.send(json.dumps({"type": "auth", "token": "headway:wrong"}))
                answer = json.loads(await asyncio.wait_for(socket.recv(), 10))
                return "let in" if answer["type"] == "auth_success" else "refused"
        except (ConnectionClosed, InvalidStatus):
            return "refused"

    assert asyncio.run(tried()) == "refused"
    assert asyncio.run(tried(subprotocols=["prefect"])) == "refused"


def test_secrets_of_services_are_in_no_command_line(home: PlantedHome, words: dict[str, str]) -> None:
    report = home.report()
    for name in kept.NAMES:
        pid = int(report["services"][name]["pid"])
        for member, _ in keeper.session_members(pid, keeper.start_time(pid) or 0):
            line = Path(f"/proc/{member}/cmdline").read_text()
            assert not [which for which, word in words.items() if word in line]
