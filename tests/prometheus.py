"""A real Prometheus server of the system's packages, on loopback, with the configuration of deployments/prometheus."""

from __future__ import annotations

import http.client
import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from tasks import servers
from tests.kept import wait_until

ROOT = Path(__file__).resolve().parents[1]
OURS = ROOT / "deployments/prometheus"
PLACEHOLDER = "/home/me/.headway"
"""HEADWAY_HOME in our prometheus.yml."""


def program(name: str) -> str:
    """Path of `prometheus` or `promtool`; a skip where it is not there."""
    found = shutil.which(name)
    if found is None:
        pytest.skip("Prometheus is not installed: apt-get install prometheus")
    return found


def configuration(directory: Path, home: Path, *, every: str = "15s") -> Path:
    """Our prometheus.yml in `directory`, beside the rules: for the runs of `home`, looking `every` so often."""
    text = (OURS / "prometheus.yml").read_text()
    assert (text.count(PLACEHOLDER), text.count("15s")) == (1, 3), text
    shutil.copy(OURS / "alerts.yml", directory)
    place = directory / "prometheus.yml"
    place.write_text(text.replace(PLACEHOLDER, str(home)).replace("15s", every))
    return place


@dataclass(frozen=True)
class Server:
    """One that listens at `port`."""

    port: int

    def get(self, path: str, **query: Any) -> tuple[int, str]:
        with closing(http.client.HTTPConnection(servers.HOST, self.port, timeout=10)) as connection:
            connection.request("GET", f"{path}?{urlencode(query)}")
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

    def ask(self, path: str, **query: Any) -> Any:
        """What `api/v1/<path>` answers; an error of Prometheus fails the test with its words."""
        code, text = self.get(f"/api/v1/{path}", **query)
        answer = json.loads(text)
        assert (code, answer["status"]) == (200, "success"), (query, text)
        return answer["data"]

    def query(self, expr: str) -> list[dict[str, Any]]:
        """Series that an expression has now: each with its labels in `metric`, and `value`: (seconds, text)."""
        data = self.ask("query", query=expr)
        assert data["resultType"] == "vector", expr
        return data["result"]

    def up(self) -> dict[str, float]:
        """By run key: whether its endpoint answered the last scrape."""
        return {each["metric"]["run_key"]: float(each["value"][1]) for each in self.query('up{job="headway"}')}

    def troubles(self) -> dict[str, str]:
        """By run key: why its last scrape failed, in the words of Prometheus; empty where it did not."""
        return {each["labels"]["run_key"]: each["lastError"] for each in self.ask("targets")["activeTargets"]}

    def ready(self) -> bool:
        try:
            return self.get("/-/ready")[0] == 200
        except OSError:
            return False


@contextmanager
def served(directory: Path, home: Path) -> Iterator[Server]:
    """A server that looks every second at the runs of `home`; its data and its log lie in `directory`."""
    port, said = servers.free_port(), directory / "prometheus.log"
    with said.open("w") as log:
        process = subprocess.Popen(
            [program("prometheus"), f"--config.file={configuration(directory, home, every='1s')}",
             f"--storage.tsdb.path={directory / 'data'}", f"--web.listen-address={servers.HOST}:{port}"],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=directory)
    try:
        server = Server(port)
        wait_until(lambda: process.poll() is not None or server.ready(), 60, f"Prometheus is ready ({said})")
        assert process.poll() is None, said.read_text()
        yield server
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(20)
