"""A flow run that a process worker of Prefect started is cancelled through the API, while its actors answer nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from rl_core.records import recorded_steps
from rl_core.run_dir import RunDir, owner_is_alive
from tests.chaos.stack import pid_of_actor
from tests.runs import Home, prefect_server, processes_of

pytestmark = pytest.mark.slow
"""`make chaos` runs it."""

ROOT = Path(__file__).resolve().parents[2]
KEY, POOL = "deployed", "tests"
GONE_S = 20.0
"""From the call that cancels until the last process is gone."""
DEPLOY = """
import json, sys
from prefect.deployments import run_deployment
from flows.train import train

root, pool, parameters = sys.argv[1:]
train.from_source(source=root, entrypoint="flows/train.py:train").deploy(
    name=pool, work_pool_name=pool, print_next_steps=False)
print(run_deployment(f"train/{pool}", parameters=json.loads(parameters), timeout=0).id)
"""
PARAMETERS = {
    "preset": "tiny-cpu", "run_key": KEY,
    "overrides": {"total_steps": 100_000, "data": {"validation": None}, "model": {"warmup_steps": 0}}}


def prefect(env: dict[str, str], *words: str) -> str:
    done = subprocess.run([sys.executable, "-m", "prefect", *words], env=env, cwd=ROOT, capture_output=True, text=True,
                          timeout=120, check=False)
    assert done.returncode == 0, (done.stdout, done.stderr)
    return done.stdout


@contextmanager
def worker(env: dict[str, str], log: Path) -> Iterator[None]:
    """`prefect worker start --type process`, as a person starts it in a terminal."""
    with open(log, "w") as out:
        process = subprocess.Popen([sys.executable, "-m", "prefect", "worker", "start", "--type", "process", "--pool",
                                    POOL], env=env | {"PREFECT_WORKER_QUERY_SECONDS": "1"}, cwd=ROOT, stdout=out,
                                   stderr=subprocess.STDOUT, start_new_session=True)
    try:
        yield
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
        process.kill()  # nothing where it has ended
        process.wait()


def wait_for_step(run: RunDir, step: int, log: Path) -> None:
    until = time.monotonic() + 180
    while not run.record(step).exists():
        assert time.monotonic() < until, log.read_text()[-4000:]
        time.sleep(0.05)


def test_the_whole_tree_is_gone_20_s_after_a_cancel_though_no_actor_answers(home: Home, tmp_path: Path) -> None:
    run, log = home.run(KEY), tmp_path / "worker.log"
    with prefect_server(home) as env:
        prefect(env, "work-pool", "create", POOL, "--type", "process")
        with worker(env, log):
            deployed = subprocess.run([sys.executable, "-c", DEPLOY, str(ROOT), POOL, json.dumps(PARAMETERS)], env=env,
                                      cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
            assert deployed.returncode == 0, (deployed.stdout, deployed.stderr)
            flow_run_id = deployed.stdout.split()[-1]
            wait_for_step(run, 8, log)
            while not run.mlflow_run.exists():
                time.sleep(0.05)
            assert owner_is_alive(run)
            tree = of_the_run(home, run)
            assert len(tree) >= 5, tree  # the flow, Ray's, two actors
            for role in ("learner", "rollout"):
                pid = pid_of_actor(home, run, role)
                assert pid is not None
                os.kill(pid, signal.SIGSTOP)
            begun = time.monotonic()
            prefect(env, "flow-run", "cancel", flow_run_id)
            while (left := of_the_run(home, run)) and time.monotonic() - begun < GONE_S + 10:
                time.sleep(0.1)
            took = time.monotonic() - begun
            print(f"{len(tree)} processes gone {took:.1f} s after the cancel")
            assert left == {} and took <= GONE_S, took
            assert not owner_is_alive(run)
            until = time.monotonic() + 15
            while home.states(KEY)[0] != ["CANCELLED"] and time.monotonic() < until:
                time.sleep(0.2)
            assert home.states(KEY) == (["CANCELLED"], ["KILLED"]), log.read_text()[-4000:]
    result = json.loads(run.result.read_text())
    assert (result["status"], result["signal"]) == ("cancelled", "SIGTERM")
    again = home.start("train", "--run-key", KEY, "--json", key=KEY)
    again.wait_for_step(recorded_steps(run)[-1] + 3)
    again.process.terminate()
    assert again.wait(30) == 143, again.said


def of_the_run(home: Home, run: RunDir) -> dict[int, str]:
    """The flow's process with all that it has started, by pid: command lines. Of its services those that carry the
    mark of the run, or write its logs."""
    found: dict[int, str] = {}
    for pid, command in processes_of(home).items():
        try:
            environ = Path(f"/proc/{pid}/environ").read_bytes()
            out = os.readlink(f"/proc/{pid}/fd/1")
        except OSError:
            continue
        if str(run.root).encode() in environ or out.startswith(str(run.root)) or b"PREFECT__FLOW_RUN_ID" in environ:
            found[pid] = command
    return found
