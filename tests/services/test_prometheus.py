"""A real Prometheus takes our configuration, rules, exposition and every query of the board; what unit tests compute by
hand (tests/unit/test_alerts.py) is said here by its own programs."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from rl_core.config import Config
from rl_core.looking.exposition import BY_NAME, FAMILIES, exposition
from tasks.exposing import Endpoint, Gauges, expose, targets
from tasks.paths import headway_home, run_dir
from tests.kept import wait_until
from tests.looking import small_run
from tests.prometheus import OURS, ROOT, Server, configuration, program, served

pytestmark = pytest.mark.services

ALERTS = {rule["alert"]: rule for group in yaml.safe_load((OURS / "alerts.yml").read_text())["groups"]
          for rule in group["rules"]}
BOARD = json.loads((ROOT / "deployments/grafana/headway.json").read_text())
QUERIES = {f"{panel['title']} {target['refId']}": target for panel in BOARD["panels"] for target in panel["targets"]}
KEYS = ("sort-2", "sort.2")
"""Of the runs that are looked at. The point of the second one, unless it is escaped, matches the first one too."""
SOON_S = 60.0
"""Prometheus hands a change of its targets on every 5 s."""


def promtool(*words: str, said: str | None = None) -> str:
    """What it prints; it must succeed."""
    done = subprocess.run([program("promtool"), *words], input=said, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def view(state: str = "training") -> dict[str, Any]:
    """A status view of an owner that has a value for each metric, and has lost six of eight workers."""
    now_us = time.time_ns() // 1000
    return {"state": state, "since_us": now_us - 60_000_000, "waits": [{"since_us": now_us, "deadline_s": 600.0}],
            "live": {"landed": 5, "in_flight": 7, "capacity": 3, "tokens_per_s": 1200.5,
                     "workers": {"rollout-0": {"alive": True}, "rollout-1": {"alive": False}},
                     "budgets": {"worker_restarts": [6, 8], "learner_restarts": [0, 3], "reward_failures": [16, 64]}}}


# -- promtool: what is written

def test_the_rules_are_rules_and_the_configuration_is_one_that_finds_a_run(tmp_path: Path) -> None:
    home = tmp_path / "home"
    assert f"SUCCESS: {len(ALERTS)} rules found" in promtool("check", "rules", str(OURS / "alerts.yml"))
    place = str(configuration(tmp_path, home))
    nothing = f'WARNING: file "{targets(home)}/*.json" for file_sd in scrape job "headway" does not exist'
    assert nothing in promtool("check", "config", place)
    targets(home).mkdir(parents=True)
    endpoint = Endpoint([targets(home) / "sort-2.json"], port=0, run_key="sort-2", text=lambda: "")
    said = promtool("check", "config", place)
    endpoint.close(forget=True)
    assert "is valid prometheus config file syntax" in said and "WARNING" not in said


def test_names_and_words_of_the_metrics_are_as_prometheus_wants_them(tmp_path: Path) -> None:
    text = exposition(Gauges(small_run(tmp_path / "run"), Config()).samples(view()))
    assert len(re.findall("^# HELP ", text, re.MULTILINE)) == len(FAMILIES)
    assert promtool("check", "metrics", said=text) == ""


# -- promtool: each rule over time

EVERY_S = 15
"""Prometheus looks at runs and rules so often (deployments/prometheus/prometheus.yml)."""


@dataclass(frozen=True)
class Told:
    """An alert: a value that is bad for it after so many seconds, one that is just well, and what it says then."""

    series: str
    bad: float
    well: float
    after_s: int
    summary: str
    labels: dict[str, str] = field(default_factory=dict[str, str])


TOLD = {
    "HeadwayNoStep": Told("headway_step_age_seconds", 3600, 900, 60, "no training step for 1h 0m 0s"),
    "HeadwayRunDead": Told("up", 0, 1, 120, "the owner of the run failed, or died without a word"),
    "HeadwayTooOld": Told("headway_staleness_over_bound_ratio", 4 / 3, 1, 600,
                          "trained groups are older than staleness.bound, 1.333 times"),
    "HeadwayDropped": Told("headway_dropped_ratio", 1 / 3, 0.25, 600, "33.33% of the groups are thrown away"),
    "HeadwayDiskNearlyFull": Told("headway_disk_free_bytes", 1.5 * 2**30, 2**31, 60,
                                  "1.5GiB are free on its file system"),
    "HeadwayFailureBudget": Told("headway_failure_budget_used_ratio", 0.75, 0.625, 0,
                                 "75% of failure.worker_restarts are spent", {"budget": "worker_restarts"}),
}


@dataclass(frozen=True)
class Case:
    """Values of a series, and whether its alert fires when the last one was seen."""

    alert: str
    values: list[float | None]
    """One each 15 seconds; None is a series that ended."""
    fires: bool
    job: str = "headway"


def cases() -> Iterator[tuple[str, Case]]:
    """For each alert, all ways to fire and not to."""
    for alert, told in TOLD.items():
        long_enough: list[float | None] = [told.bad] * (told.after_s // EVERY_S + 1)
        yield f"{alert} after its time", Case(alert, long_enough, True)
        yield f"{alert} an hour later", Case(alert, [told.bad] * 240, True)
        yield f"{alert} again", Case(alert, [*long_enough, told.well, *long_enough], True)
        yield f"{alert} never, where all is just well", Case(alert, [told.well] * 240, False)
        yield f"{alert} no more, where it is well again", Case(alert, [*long_enough, told.well], False)
        yield f"{alert} no more, where the run ended", Case(alert, [*long_enough, None], False)
        if told.after_s:
            yield f"{alert} not before its time", Case(alert, long_enough[1:], False)
            yield f"{alert} not yet, where it was well between", Case(
                alert, [*long_enough[1:], told.well, *long_enough[1:]], False)
    yield "HeadwayRunDead not by what else is looked at", Case("HeadwayRunDead", [0.0] * 240, False, job="node")


CASES = dict(cases())


def test_the_alerts_of_the_table_are_those_of_the_file() -> None:
    assert set(TOLD) == set(ALERTS) == {case.alert for case in CASES.values()}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_an_alert_fires_after_its_time_and_no_other_does(tmp_path: Path, case: Case) -> None:
    told = TOLD[case.alert]
    labels = {"instance": "127.0.0.1:9", "job": case.job, "run_key": "sort-2", **told.labels}
    written = ",".join(f'{name}="{value}"' for name, value in labels.items())
    description = ALERTS[case.alert]["annotations"]["description"].replace("{{ $labels.run_key }}", "sort-2")
    fired = {"exp_labels": labels | {"severity": "page"},
             "exp_annotations": {"summary": f"sort-2: {told.summary}", "description": description}}
    place = tmp_path / "case.yml"
    place.write_text(yaml.safe_dump({
        "rule_files": [str(OURS / "alerts.yml")], "evaluation_interval": f"{EVERY_S}s",
        "tests": [{
            "interval": f"{EVERY_S}s",
            "input_series": [{"series": f"{told.series}{{{written}}}",
                              "values": " ".join("stale" if each is None else repr(each) for each in case.values)}],
            "alert_rule_test": [{"eval_time": f"{EVERY_S * (len(case.values) - 1)}s", "alertname": alert,
                                 "exp_alerts": [fired] if case.fires and alert == case.alert else []}
                                for alert in ALERTS]}]}))
    assert "SUCCESS" in promtool("test", "rules", str(place))


# -- the server: real endpoints, the rules, the board

@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that looks at the endpoints of two runs of a home."""
    directory = tmp_path_factory.mktemp("prometheus")
    home = directory / "home"
    with pytest.MonkeyPatch.context() as patch, served(directory, home) as server:
        patch.setenv("HEADWAY_HOME", str(home))
        endpoints = [exposed(key) for key in KEYS]
        wait_until(lambda: server.up() == dict.fromkeys(KEYS, 1.0), SOON_S, "both endpoints are looked at")
        yield server
        for endpoint in endpoints:
            endpoint.close(forget=True)


def exposed(key: str, now: Callable[[], dict[str, Any]] = view, *, port: int = 0) -> Endpoint:
    """As the owner of a run does it: the file of its address stands under HEADWAY_HOME."""
    said: list[str] = []
    config = Config.model_validate({"groups_per_step": 2, "prometheus": {"port": port}})
    endpoint = expose(small_run(run_dir(key).root, key), config, key, now, said.append)
    assert endpoint is not None and said == []
    return endpoint


def as_grafana_asks(expr: str, keys: tuple[str, ...]) -> str:
    """With its variable replaced: values are escaped for a pattern within a string, several are alternatives."""
    escaped = [key.replace(".", r"\\.") for key in keys]
    asked = expr.replace("$run_key", escaped[0] if len(keys) == 1 else f"({'|'.join(escaped)})")
    assert "$" not in asked, asked
    return asked


def test_endpoints_are_up_and_their_series_are_those_of_the_table(watched: Server) -> None:
    assert watched.troubles() == dict.fromkeys(KEYS, "")
    for key in KEYS:
        found = {each["metric"]["__name__"]: set(each["metric"]) - {"__name__", "instance", "job", "run_key"}
                 for each in watched.query(f'{{__name__=~"headway_.+",run_key="{key}"}}')}
        assert found == {family.name: set(family.labels) for family in FAMILIES}
    told = {name: (each["type"], each["help"]) for [name, [each]] in watched.ask("metadata").items()}
    assert told == {family.name: (family.kind, family.help) for family in FAMILIES}


def test_rules_are_healthy_and_one_that_is_true_fires(watched: Server) -> None:
    def rules() -> dict[str, dict[str, Any]]:
        return {rule["name"]: rule for group in watched.ask("rules")["groups"] for rule in group["rules"]}

    wait_until(lambda: all(rule["health"] != "unknown" for rule in rules().values()), SOON_S, "all rules are evaluated")
    assert {name: (rule["health"], rule.get("lastError")) for name, rule in rules().items()} == dict.fromkeys(
        ALERTS, ("ok", None))
    assert {name: rule["duration"] for name, rule in rules().items()} == {
        name: told.after_s for name, told in TOLD.items()}
    wait_until(lambda: len(rules()["HeadwayFailureBudget"]["alerts"]) == len(KEYS), SOON_S, "both runs raise it")
    assert {(each["state"], each["annotations"]["summary"]) for each in rules()["HeadwayFailureBudget"]["alerts"]} == {
        ("firing", f"{key}: 75% of failure.worker_restarts are spent") for key in KEYS}


@pytest.mark.parametrize("target", QUERIES.values(), ids=QUERIES)
def test_a_query_of_the_board_has_data_of_the_runs_that_are_chosen_and_the_labels_it_is_named_by(
        watched: Server, target: dict[str, Any]) -> None:
    for keys in ((KEYS[0],), (KEYS[1],), KEYS):
        found = watched.query(as_grafana_asks(target["expr"], keys))
        assert {each["metric"]["run_key"] for each in found} == set(keys), target["expr"]
        names = [tuple(each["metric"][label] for label in re.findall(r"{{(\w+)}}", target["legendFormat"]))
                 for each in found]
        assert len(set(names)) == len(names), "two lines have one name"


def test_the_board_lists_the_runs(watched: Server) -> None:
    [variable] = [each for each in BOARD["templating"]["list"] if each["type"] == "query"]
    [(metric, label)] = re.findall(r"label_values\((\w+), (\w+)\)", variable["query"]["query"])
    assert metric in BY_NAME
    assert watched.ask(f"label/{label}/values", **{"match[]": metric}) == sorted(KEYS)


def test_the_board_shows_the_state_of_a_run_that_is_and_none_that_was(watched: Server) -> None:
    """Over a span of time Prometheus has both."""
    [target] = [panel["targets"][0] for panel in BOARD["panels"] if panel["title"] == "State"]
    expr, now = as_grafana_asks(target["expr"], ("changing",)), view("training")

    def states() -> set[str]:
        if target.get("instant") and not target.get("range", True):
            found = watched.query(expr)
        else:
            now_s = time.time()
            found = watched.ask("query_range", query=expr, start=now_s - 60, end=now_s, step=1)["result"]
        return {each["metric"]["state"] for each in found}

    endpoint = exposed("changing", lambda: now)
    wait_until(lambda: states() == {"training"}, SOON_S, "the run is found")
    now = view("stopping")
    wait_until(lambda: "stopping" in states(), SOON_S, "its new state is seen")
    assert states() == {"stopping"}
    endpoint.close(forget=True)
    wait_until(lambda: "changing" not in watched.up(), SOON_S, "it is forgotten")


def test_a_dead_run_is_missed_also_where_another_one_has_its_port_and_one_that_ended_in_order_is_not(
        watched: Server) -> None:
    others = dict.fromkeys(KEYS, 1.0)

    def missed() -> list[str]:
        return [each["labels"]["run_key"] for each in watched.ask("alerts")["alerts"]
                if each["labels"]["alertname"] == "HeadwayRunDead"]

    dead = exposed("dead")
    wait_until(lambda: watched.up() == others | {"dead": 1.0}, SOON_S, "a third run is found")
    dead.close(forget=False)
    wait_until(lambda: watched.up() == others | {"dead": 0.0}, SOON_S, "its end is seen")
    wait_until(lambda: missed() == ["dead"], SOON_S, "the alert is pending")
    heir = exposed("heir", port=int(dead.address.partition(":")[2]))
    wait_until(lambda: watched.up() == others | {"dead": 0.0, "heir": 1.0}, SOON_S, "the port is the newer run's alone")
    wait_until(lambda: "404" in watched.troubles()["dead"], SOON_S, "the newer run says that it is another one")
    heir.close(forget=True)
    (targets(headway_home()) / "dead.json").unlink()
    wait_until(lambda: watched.up() == others and missed() == [], SOON_S, "nobody misses them")
