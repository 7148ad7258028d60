"""The owner's Prometheus endpoint: what it says of a run, that Prometheus can read it, who may ask, and taken ports."""

from __future__ import annotations

import http.client
import json
import math
import socket
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rl_core.config import Config
from rl_core.looking.exposition import BY_NAME, FAMILIES, Sample, exposition
from rl_core.run_dir import RunDir
from tasks.exposing import Endpoint, Gauges, expose
from tasks.paths import run_dir
from tests.looking import T0, small_run

NOW_S = T0 + 62.0
VIEW: dict[str, Any] = {
    "run_key": "small", "state": "training", "since_us": T0 * 1_000_000,
    "live": {"landed": 5, "in_flight": 7, "capacity": 3, "tokens_per_s": 1200.5,
             "workers": {"rollout-0": {"alive": True}, "rollout-1": {"alive": False}},
             "budgets": {"worker_restarts": [2, 8], "learner_restarts": [0, 3], "reward_failures": [16, 64]}},
    "waits": [{"since_us": (T0 + 50) * 1_000_000, "deadline_s": 3600.0},
              {"since_us": (T0 + 60) * 1_000_000, "deadline_s": 30.0},
              {"since_us": (T0 + 1) * 1_000_000, "deadline_s": None}]}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path))
    return small_run(run_dir("small").root)


def rendered(run: RunDir, view: dict[str, Any] = VIEW, **settings: Any) -> str:
    gauges = Gauges(run, Config.model_validate(settings), clock=lambda: NOW_S, free_bytes=lambda path: 5 * 2**30)
    return exposition(gauges.samples(view))


def read(text: str) -> dict[str, float]:
    """Samples by `name{label="value",...}`, as Prometheus' own parser reads them."""
    parser = pytest.importorskip("prometheus_client.parser")
    return {sample.name + (json.dumps(sample.labels) if sample.labels else ""): sample.value
            for family in parser.text_string_to_metric_families(text) for sample in family.samples}


def test_a_run_that_trains_is_told_in_numbers(run: RunDir) -> None:
    found = read(rendered(run, groups_per_step=2))
    assert {name: found[f"headway_{name}"] for name in (
        "attempt", "steps_total", "steps_planned", "step_age_seconds", "step_seconds", "reward_mean",
        "validation_accuracy", "staleness_mean", "staleness_max", "staleness_over_bound_ratio", "queue_groups",
        "in_flight_groups", "capacity_groups", "rollout_tokens_per_second", "workers_alive", "deadline_left_seconds",
        "disk_free_bytes", "dropped_ratio")} == {
        "attempt": 1, "steps_total": 3, "steps_planned": 180, "step_age_seconds": 60.0, "step_seconds": 1.0,
        "reward_mean": 0.5, "validation_accuracy": 0.5, "staleness_mean": 0.5, "staleness_max": 2.0,
        "staleness_over_bound_ratio": 0.25, "queue_groups": 5, "in_flight_groups": 7, "capacity_groups": 3,
        "rollout_tokens_per_second": 1200.5, "workers_alive": 1, "deadline_left_seconds": 28.0,
        "disk_free_bytes": 5 * 2**30, "dropped_ratio": 0.0}
    assert found['headway_run_state{"state": "training"}'] == 1
    assert found['headway_time_ratio{"side": "rollout", "state": "waiting"}'] == 0.5
    assert found['headway_restarts_total{"part": "worker"}'] == 2
    assert found['headway_failure_budget_used_ratio{"budget": "reward_failures"}'] == 0.25


def test_what_does_not_exist_is_left_out(run: RunDir) -> None:
    for path in [*run.records.iterdir(), *run.validations.iterdir(), *run.observations.iterdir()]:
        path.unlink()
    found = read(rendered(run, {"state": "starting", "since_us": T0 * 1_000_000}))
    assert set(found) == {'headway_run_state{"state": "starting"}', "headway_attempt", "headway_steps_total",
                          "headway_steps_planned", "headway_disk_free_bytes", "headway_quota_bytes"}
    assert "nan" not in rendered(run).lower()


def test_every_family_is_written_by_its_table_and_no_other(run: RunDir) -> None:
    text = rendered(run)
    kinds = dict(line.split()[2:4] for line in text.splitlines() if line.startswith("# TYPE"))
    assert kinds == {family.name: family.kind for family in FAMILIES}, "the run above has all of them"
    assert all(name.startswith("headway_") for name in BY_NAME)
    for wrong in (Sample("headway_nope", 1.0), Sample("headway_attempt", 1.0, {"run_key": "k"}),
                  Sample("headway_run_state", 1.0)):
        with pytest.raises(ValueError, match="not in the table"):
            exposition([wrong])


def test_labels_and_odd_numbers_are_escaped() -> None:
    odd = 'a "b" \\ c\nd'
    found = read(exposition([Sample("headway_run_state", 1.0, {"state": odd}), Sample("headway_reward_mean", 1e300),
                             Sample("headway_staleness_mean", math.inf), Sample("headway_step_seconds", math.nan)]))
    assert found == {f"headway_run_state{json.dumps({'state': odd})}": 1.0, "headway_reward_mean": 1e300,
                     "headway_staleness_mean": math.inf}


def asked(address: str, path: str = "/metrics", **headers: str) -> tuple[int, str, str]:
    host, _, port = address.partition(":")
    with closing(http.client.HTTPConnection(host, int(port), timeout=10)) as connection:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.getheader("Content-Type", ""), answer.read().decode()


def test_a_free_port_is_served_named_in_the_run_and_forgotten_at_a_good_end(run: RunDir) -> None:
    said: list[str] = []
    endpoint = expose(run, Config.model_validate({"prometheus": {"port": 0}}), "small", lambda: VIEW, said.append)
    assert endpoint is not None and said == []
    [target] = json.loads(run.prometheus.read_text())
    assert target == {"targets": [endpoint.address], "labels": {"run_key": "small", "__param_run_key": "small"}}
    everywhere = run.root.parent.parent / "prometheus" / "small.json"
    assert json.loads(everywhere.read_text()) == [target]
    code, kind, text = asked(endpoint.address)
    assert (code, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert read(text)["headway_steps_total"] == 3
    assert asked(endpoint.address, "/")[0] == 404
    assert asked(endpoint.address, "/metrics?run_key=small")[0] == 200
    assert asked(endpoint.address, "/metrics?run_key=another")[::2] == (404, "this is run small, not another\n")
    assert asked(endpoint.address, Host="evil.example")[0] == 403, "a name of somebody else that leads here"
    endpoint.close(forget=True)
    assert not run.prometheus.exists() and not everywhere.exists()
    with pytest.raises(ConnectionRefusedError):
        asked(endpoint.address)


def test_a_scrape_that_fails_is_told_and_does_not_end_the_endpoint(run: RunDir) -> None:
    texts = iter([ZeroDivisionError("of a gauge"), "headway_attempt 1\n"])

    def text() -> str:
        found = next(texts)
        if isinstance(found, Exception):
            raise found
        return found

    endpoint = Endpoint([run.prometheus], port=0, run_key="small", text=text)
    assert asked(endpoint.address)[0] == 500
    assert asked(endpoint.address)[::2] == (200, "headway_attempt 1\n")
    endpoint.close(forget=True)


def test_only_this_machine_is_answered(run: RunDir) -> None:
    endpoint = Endpoint([run.prometheus], port=0, run_key="small", text=str)
    assert endpoint.address.startswith("127.0.0.1:")
    endpoint.close(forget=False)
    assert run.prometheus.exists(), "an owner that failed is missed"


def test_without_the_setting_nothing_is_served(run: RunDir) -> None:
    assert expose(run, Config(), "small", lambda: VIEW, pytest.fail) is None
    assert not run.prometheus.exists()


def test_a_port_that_is_taken_is_a_warning_and_no_more(run: RunDir) -> None:
    said: list[str] = []
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        settings = Config.model_validate({"prometheus": {"port": port}})
        assert expose(run, settings, "small", lambda: VIEW, said.append) is None
    assert said == [f"prometheus.port {port}: Address already in use; the run goes on without its endpoint: choose "
                    "another port, or 0 for a free one"]
    assert not run.prometheus.exists()
