"""Alert rules and the board: every metric exists, and each rule is true of a run in that state and of no other.

The rules are as simple as `metric op number`, so that they can be checked exactly, on what a scrape of a run says.
"""

from __future__ import annotations

import http.client
import json
import operator
import re
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from rl_core.config import Config
from rl_core.looking.exposition import BY_NAME, exposition
from rl_core.records import put_record
from rl_core.run_dir import RunDir
from tasks.exposing import Endpoint, Gauges
from tests.looking import record, small_run

ROOT = Path(__file__).resolve().parents[2]
RULES = [rule for group in yaml.safe_load((ROOT / "deployments/prometheus/alerts.yml").read_text())["groups"]
         for rule in group["rules"]]
COMPARE: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le, "==": operator.eq}
EXPR = re.compile(r"(\w+)(?:\{job=\"headway\"\})? (>|>=|<|<=|==) (\d+(?:\.\d+)?)")
LIVE: dict[str, Any] = {"landed": 5, "in_flight": 7, "capacity": 3, "tokens_per_s": 1200.5, "workers": {},
                        "budgets": {"worker_restarts": [2, 8], "learner_restarts": [0, 0]}}


@dataclass
class State:
    """A run in some state, and which alerts it raises."""

    fires: set[str]
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    """Of its newest step."""
    ago_s: float = 5.0
    """When that was."""
    budgets: dict[str, Any] = field(default_factory=dict[str, Any])
    free_bytes: int = 50 * 2**30
    state: str = "training"
    dead: bool = False


STATES = {
    "well": State(set()),
    "no step for ten minutes": State(set(), ago_s=600.0),
    "no step for an hour": State({"HeadwayNoStep"}, ago_s=3600.0),
    "an hour old, at its end": State(set(), ago_s=3600.0, state="completed"),
    "dead": State({"HeadwayRunDead"}, dead=True),
    "too old": State({"HeadwayTooOld"}, {"staleness/mean": 9.0}),
    "as old as the bound lets it be": State(set(), {"staleness/mean": 5.0}),
    "much is dropped": State({"HeadwayDropped"}, {"staleness/dropped_groups": 40.0}),
    "little is dropped": State(set(), {"staleness/dropped_groups": 1.0}),
    "no room": State({"HeadwayDiskNearlyFull"}, free_bytes=2**30),
    "workers die": State({"HeadwayFailureBudget"}, budgets={"worker_restarts": [6, 8]}),
    "a death without a budget": State({"HeadwayFailureBudget"}, budgets={"learner_restarts": [1, 0]}),
    "rewards fail": State({"HeadwayFailureBudget"}, budgets={"reward_failures": [60, 64]}),
}


def scraped(run: RunDir, state: State) -> list[tuple[str, float]]:
    """Samples that Prometheus has of this run: those of its endpoint, and its own `up`."""
    now = time.time()
    put_record(run, record(3, **{"staleness/mean": 0.5, "staleness/dropped_groups": 0.0} | state.metrics))
    stored = json.loads(run.record(3).read_text())
    run.record(3).write_text(json.dumps(stored | {"ts_us": int((now - state.ago_s) * 1e6)}))
    view = {"state": state.state, "since_us": int((now - 7200) * 1e6), "waits": [],
            "live": {**LIVE, "budgets": {**LIVE["budgets"], **state.budgets}}}
    gauges = Gauges(run, Config(groups_per_step=2), free_bytes=lambda path: state.free_bytes)
    endpoint = Endpoint([run.prometheus], port=0, run_key="k", text=lambda: exposition(gauges.samples(view)))
    if state.dead:
        endpoint.close(forget=False)
    try:
        [address] = json.loads(run.prometheus.read_text())[0]["targets"]
        with closing(http.client.HTTPConnection(address, timeout=10)) as connection:
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode()
    except ConnectionRefusedError:
        return [("up", 0.0)]
    endpoint.close(forget=True)
    parser = pytest.importorskip("prometheus_client.parser")
    return [("up", 1.0), *((sample.name, sample.value) for family in parser.text_string_to_metric_families(text)
                           for sample in family.samples)]


def fires(rule: dict[str, Any], samples: list[tuple[str, float]]) -> bool:
    """Whether one of the samples meets the rule's expression."""
    parts = EXPR.fullmatch(rule["expr"])
    assert parts is not None, f"{rule['alert']}: {rule['expr']!r} is not `metric op number`"
    name, comparison, number = parts.groups()
    return any(COMPARE[comparison](value, float(number)) for found, value in samples if found == name)


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_each_alert_is_raised_by_a_run_in_its_state_and_by_no_other(tmp_path: Path, state: State) -> None:
    samples = scraped(small_run(tmp_path / "run"), state)
    assert {rule["alert"] for rule in RULES if fires(rule, samples)} == state.fires


def test_each_alert_has_a_state_that_raises_it_a_page_and_words() -> None:
    assert {rule["alert"] for rule in RULES} == set().union(*(state.fires for state in STATES.values()))
    operations = (ROOT / "docs" / "operations.md").read_text()
    for rule in RULES:
        assert f"`{rule['alert']}`" in operations, rule["alert"]
        assert rule["labels"] == {"severity": "page"}
        assert "run_key" in rule["annotations"]["summary"] and rule["annotations"]["description"]
        assert re.fullmatch(r"\d+m", rule.get("for", "0m"))


def test_every_query_of_the_board_names_metrics_and_labels_that_exist() -> None:
    board = json.loads((ROOT / "deployments/grafana/headway.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    queries += [variable["query"]["query"] for variable in board["templating"]["list"] if variable["type"] == "query"]
    assert len(queries) > 20
    for query in queries:
        names = re.findall(r"\bheadway_\w+|\bup\b", query)
        assert names and set(names) <= {*BY_NAME, "up"}, query
        labels = set(re.findall(r"(\w+)=", query))
        assert labels <= {"run_key", "job", *BY_NAME[names[0]].labels} if names[0] != "up" else labels, query
    shown = {name for query in queries for name in re.findall(r"\bheadway_\w+", query)}
    assert shown == set(BY_NAME), "every metric is on the board"


def test_the_example_of_a_server_reads_the_rules_and_the_targets() -> None:
    server = yaml.safe_load((ROOT / "deployments/prometheus/prometheus.yml").read_text())
    assert server["rule_files"] == ["alerts.yml"]
    [job] = server["scrape_configs"]
    [files] = job["file_sd_configs"][0]["files"]
    assert job["job_name"] == "headway" and files.endswith("/prometheus/*.json")
