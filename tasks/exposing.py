"""The owner's Prometheus endpoint (docs/operations.md): `prometheus.port`, on loopback alone, off by default.

A thread of its own answers `GET /metrics` from the run directory and from the status view that the owner has written
last: no lock of the run is taken, nothing of a training step waits for it. The address stands in `prometheus.json` of
the run and in `prometheus/<run key>.json` under HEADWAY_HOME, in the form of Prometheus' file_sd_configs (whose
patterns name files of one directory). It stays there when the owner dies or fails, so that a scrape fails and an alert
is made of it; an owner that ends in order takes it away.
"""

from __future__ import annotations

import json
import math
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from rl_core.config import Config
from rl_core.looking.exposition import CONTENT_TYPE, Sample, exposition
from rl_core.looking.watching import LAST_STEPS, Sight, Watch
from rl_core.metrics import STATES
from rl_core.run_dir import RunDir, newest_attempt, replace_file
from rl_core.run_log import STORY
from tasks.paths import headway_home
from tasks.servers import HOST


class Gauges:
    """What the endpoint says of one run. `Gauges(run, config).samples(view)`; thread-safe."""

    def __init__(self, run: RunDir, config: Config, *, clock: Callable[[], float] = time.time,
                 free_bytes: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free) -> None:
        self._run, self._config, self._clock, self._free_bytes = run, config, clock, free_bytes
        # A few steps say what is true now: a scrape must not read the records of the whole run.
        self._watch = Watch(run, curve=2 * LAST_STEPS, ages=0)
        self._lock = threading.Lock()

    def samples(self, view: Mapping[str, Any]) -> list[Sample]:
        """`view`: the owner's status view (tasks/progress.py)."""
        with self._lock:
            seen = self._watch.look()
            recent = self._watch.recent(LAST_STEPS)
        now_s, live = self._clock(), view.get("live", {})
        state = view.get("state", "starting")
        since = [view.get("since_us", 0) / 1e6, seen.newest_s]
        age_s = now_s - max(time_s for time_s in since if math.isfinite(time_s)) if state == "training" else math.nan
        values = {
            "headway_attempt": newest_attempt(self._run), "headway_steps_total": seen.steps,
            "headway_steps_planned": self._config.total_steps, "headway_step_age_seconds": age_s,
            "headway_step_seconds": seen.step_s, "headway_reward_mean": seen.metrics.get("reward/mean"),
            "headway_validation_accuracy": seen.accuracy_V[-1] if seen.accuracy_V else None,
            "headway_staleness_max": seen.metrics.get("staleness/max"), **self._staleness(recent),
            "headway_dropped_ratio": _dropped(recent, self._config.groups_per_step),
            "headway_queue_groups": live.get("landed"), "headway_in_flight_groups": live.get("in_flight"),
            "headway_capacity_groups": live.get("capacity"),
            "headway_rollout_tokens_per_second": live.get("tokens_per_s"),
            "headway_trained_tokens_per_second": seen.metrics.get("system/tokens_per_s"),
            "headway_trained_answers_per_second": seen.metrics.get("system/samples_per_s"),
            "headway_workers_alive": sum(worker["alive"] for worker in live["workers"].values())
            if "workers" in live else None,
            "headway_deadline_left_seconds": _deadline_left_s(view, now_s),
            "headway_disk_free_bytes": self._free_bytes(self._run.root),
            "headway_quota_bytes": self._config.storage.bytes_quota}
        return [Sample("headway_run_state", 1.0, {"state": state}), *_plain(values), *_shares(seen),
                *_budgets(live.get("budgets", {}))]

    def _staleness(self, recent: list[dict[str, float]]) -> dict[str, float]:
        ages = [age for step in recent if math.isfinite(age := step.get("staleness/mean", math.nan))]
        mean = sum(ages) / len(ages) if ages else math.nan
        return {"headway_staleness_mean": mean,
                "headway_staleness_over_bound_ratio": mean / max(1.0, float(self._config.staleness.bound))}


def _plain(values: Mapping[str, float | None]) -> list[Sample]:
    return [Sample(name, float(value)) for name, value in values.items() if value is not None]


def _shares(seen: Sight) -> list[Sample]:
    return [Sample("headway_time_ratio", seen.shares[f"{side}_{state}"], {"side": side, "state": state})
            for side in ("learner", "rollout") for state in STATES]


def _budgets(budgets: Mapping[str, tuple[int, int]]) -> Iterable[Sample]:
    """Used and allowed, by the name of the setting. A budget of 0 is spent by the first failure."""
    for name, (used, allowed) in budgets.items():
        share = used / allowed if allowed else float(used > 0)
        yield Sample("headway_failure_budget_used_ratio", share, {"budget": name})
        if name.endswith("_restarts"):
            yield Sample("headway_restarts_total", float(used), {"part": name.removesuffix("_restarts")})


def _dropped(recent: list[dict[str, float]], per_step: int) -> float:
    dropped = sum(n for step in recent if math.isfinite(n := step.get("staleness/dropped_groups", math.nan)))
    trained = per_step * len(recent)
    return dropped / (dropped + trained) if recent else math.nan


def _deadline_left_s(view: Mapping[str, Any], now_s: float) -> float | None:
    left = [wait["since_us"] / 1e6 + wait["deadline_s"] - now_s for wait in view.get("waits", ())
            if wait["deadline_s"] is not None]
    return min(left, default=None)


def targets(home: Path) -> Path:
    """Where a Prometheus server finds the endpoints of all runs of a home."""
    return home / "prometheus"


class Endpoint:
    """Serves `/metrics` from now on, until `close`. Raises OSError where the port cannot be had.

        endpoint = Endpoint([run.prometheus], port=0, run_key="k", text=lambda: exposition(gauges.samples(view)))
        endpoint.address       # "127.0.0.1:43210"
        endpoint.close(forget=True)
    """

    def __init__(self, places: Sequence[Path], *, port: int, run_key: str, text: Callable[[], str]) -> None:
        """`places`: files that say where it is."""
        self._places = places
        self._server = _Server((HOST, port), _Handler)
        self._server.text = text
        self.address = f"{HOST}:{self._server.server_address[1]}"
        self._server.hosts = {self.address, f"localhost:{self._server.server_address[1]}"}
        self._server.run_key = run_key
        self._thread = threading.Thread(target=self._server.serve_forever, name="prometheus", daemon=True)
        self._thread.start()
        # The parameter is asked for with each scrape: a port that was a dead run's may be another one's by now.
        found = [{"targets": [self.address], "labels": {"run_key": run_key, "__param_run_key": run_key}}]
        for place in places:
            replace_file(place, (json.dumps(found) + "\n").encode())

    def close(self, *, forget: bool) -> None:
        """Stop serving. `forget`: the run ended in order, and nobody shall miss this endpoint."""
        if forget:
            for place in self._places:
                place.unlink(missing_ok=True)
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    text: Callable[[], str]
    hosts: set[str]
    run_key: str

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A scraper that goes away is no news."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version = "headway"
    sys_version = ""

    def do_GET(self) -> None:
        own = self.server.run_key
        if self.headers.get("Host") not in self.server.hosts:  # a page of another origin, by a name that leads here
            self._answer(403, "text/plain", "this endpoint answers to its own address only\n")
        elif self.path.partition("?")[0] != "/metrics":
            self._answer(404, "text/plain", "there is /metrics\n")
        elif (asked := parse_qs(self.path.partition("?")[2]).get("run_key", [own])) != [own]:
            self._answer(404, "text/plain", f"this is run {own}, not {asked[0]}\n")
        else:
            self._tell()

    def _tell(self) -> None:
        try:
            text = self.server.text()
        except Exception as error:  # Prometheus sees that the scrape failed; the run goes on
            STORY.warning("prometheus: %s: %s", type(error).__name__, error)
            self._answer(500, "text/plain", "see logs/owner.jsonl of the run\n")
        else:
            self._answer(200, CONTENT_TYPE, text)

    def _answer(self, code: int, kind: str, text: str) -> None:
        data = text.encode()
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """A scrape is no news."""


def expose(run: RunDir, config: Config, run_key: str, view: Callable[[], Mapping[str, Any]],
           warn: Callable[[str], None]) -> Endpoint | None:
    """The endpoint of this owner, if the settings ask for one. A port that cannot be had is a warning, no more."""
    port = config.prometheus.port
    if port is None:
        return None
    gauges = Gauges(run, config)
    try:
        endpoint = Endpoint([run.prometheus, targets(headway_home()) / f"{run_key}.json"], port=port, run_key=run_key,
                            text=lambda: exposition(gauges.samples(view())))
    except OSError as error:
        warn(f"prometheus.port {port}: {error.strerror or error}; the run goes on without its endpoint: choose another "
             "port, or 0 for a free one")
        return None
    STORY.info("prometheus: http://%s/metrics", endpoint.address)
    return endpoint
