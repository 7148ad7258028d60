"""A run that is watched, scraped and logged while it goes on, killed, and finished: what each of them says of it."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from rl_core.records import recorded_steps
from rl_core.run_dir import RunDir
from tests.kept import SMALL, wait_until
from tests.runs import Home

pytestmark = pytest.mark.slow

STEPS = 300
SETTINGS = [f"{name}={json.dumps(value)}" for name, value in {
    **SMALL, "total_steps": STEPS, "checkpoint.every": 20, "prometheus.port": 0}.items()]


def scraped(run: RunDir) -> dict[str, float]:
    """Samples of the endpoint by name and labels, as Prometheus reads them."""
    parser = pytest.importorskip("prometheus_client.parser")
    [address] = json.loads(run.prometheus.read_text())[0]["targets"]
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {sample.name + "".join(f" {label}" for label in sample.labels.values()): sample.value
            for family in parser.text_string_to_metric_families(text) for sample in family.samples}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def on_a_terminal(home: Home, *words: str) -> tuple[subprocess.Popen[bytes], int]:
    """A command in a terminal of 100 columns, and the end of it that a person reads."""
    parent, child = pty.openpty()
    process = subprocess.Popen([sys.executable, "-m", "flows.cli", *words], stdin=child, stdout=child, stderr=child,
                               env=home.environ | {"TERM": "xterm", "COLUMNS": "100", "LINES": "40"},
                               start_new_session=True)
    os.close(child)
    return process, parent


def read_all(parent: int) -> str:
    text = b""
    try:
        while more := os.read(parent, 65536):
            text += more
    except OSError:  # the other end is gone
        pass
    os.close(parent)
    return text.decode(errors="replace")


def test_a_run_is_watched_scraped_and_logged_through_a_kill_to_its_end(home: Home) -> None:
    command = home.train("operated", *SETTINGS)
    run = command.run
    command.wait_for_step(10)

    # Watched by a pipe and by a terminal.
    plain = home.start("status", "operated", "--watch", "--every", "0.5")
    process, terminal = on_a_terminal(home, "status", "operated", "--watch")

    # Scraped, and it moves.
    first = scraped(run)
    assert first["headway_run_state training"] == 1 and first["headway_steps_planned"] == STEPS
    wait_until(lambda: scraped(run)["headway_steps_total"] >= first["headway_steps_total"] + 10, 60, "ten more steps")
    now = scraped(run)
    assert now["headway_step_age_seconds"] < 30 and now["headway_workers_alive"] >= 1
    assert now["headway_rollout_tokens_per_second"] > 0 and now["headway_trained_tokens_per_second"] > 0
    assert now["headway_failure_budget_used_ratio worker_restarts"] == 0
    assert now["headway_failure_budget_used_ratio learner_restarts"] == 0
    assert sum(now[f"headway_time_ratio learner {state}"] for state in ("busy", "waiting", "syncing", "paused")) == \
        pytest.approx(1, abs=1e-6)

    # Killed: the watchers end with it, its endpoint is missed, no line of its logs is lost or torn.
    time.sleep(1.5)
    os.kill(command.process.pid, signal.SIGKILL)
    command.wait()
    assert plain.wait(30) == 0 and process.wait(30) == 0
    said = plain.out.splitlines()
    assert said[0].startswith("training  step ") and said[-1].startswith("stopped  step ") and len(said) >= 3
    assert all("reward " in line and "learner waits" in line for line in said) and plain.err == ""
    shown = read_all(terminal)
    words = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert "operated  training, attempt 1" in words and "operated  stopped, attempt 1" in words
    assert "\x1b[2J" not in shown and "Traceback" not in words
    assert run.prometheus.exists()
    with pytest.raises(urllib.error.URLError):
        scraped(run)
    told = lines(run.component_log("owner"))
    trained = [line["step"] for line in told if line["message"].startswith("trained in")]
    assert trained == list(range(len(trained))) and len(trained) >= recorded_steps(run)[-1] - 2
    assert {line["attempt"] for line in told if line["step"] is not None} == {1}

    # Finished: the endpoint is forgotten, the log has both attempts and how it ended.
    again = home.start("rerun", "operated", "--json", key="operated")
    assert again.wait() == 0, again.said
    assert not run.prometheus.exists() and not list((home.path / "prometheus").glob("operated*"))
    told = lines(run.component_log("owner"))
    assert told[-1]["message"] == "state: completed" and {line["attempt"] for line in told} >= {1, 2}
    assert [line["step"] for line in told if line["message"].startswith("trained in")][-1] == STEPS - 1
    learner = lines(run.component_log("learner-0"))
    assert {line["component"] for line in learner} == {"learner-0"} and {line["run_key"] for line in learner} == {
        "operated"}
    assert {line["step"] for line in learner if line["message"].startswith("train:")} >= set(range(STEPS))
    assert any(line["message"].startswith("swap v ") for line in lines(run.component_log("rollout-0")))
    assert not [line for log in run.logs.glob("*.jsonl") for line in lines(log) if line["level"] == "ERROR"]
