"""`headway services up` with the real servers: what they answer to whom, deployments and their runs, and what becomes
of a run when a server, the worker, or the run itself is killed.

The tests stand in the order in which one set-up goes through them.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import sqlite3
import stat
import time
from base64 import b64encode
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from rl_core.experience.audit import audit
from rl_core.records import recorded_steps
from rl_core.revisions import config_of
from rl_core.run_dir import newest_attempt
from rl_core.run_identity import prompt_rows, read_identity
from tasks import databases, keeper, kept, servers, silent_runs
from tests.failing import written
from tests.kept import SMALL, KeptHome, wait_until
from tests.runs import Command, wait_until_gone

pytestmark = pytest.mark.services

ROOT = Path(__file__).resolve().parents[2]
READY_S = 45.0
MEMORY_BYTES = 1.2e9
CRASHED_S = 120.0
LONG = 500
"""Steps: enough that two servers are restarted before they end."""
LASTING = {**SMALL, "checkpoint.every": 100, "checkpoint.keep": 2}


def ask(page: str, method: str, path: str, body: str | None = None, **headers: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(page.removeprefix("http://"), timeout=10)
    connection.putrequest(method, path, skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name.replace("_", "-"), value)
    if body is not None:
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Content-Length", str(len(body)))
    connection.endheaders(None if body is None else body.encode())
    return connection.getresponse()


def pid_of(home: KeptHome, name: str) -> int:
    pid = home.report()["services"][name]["pid"]
    assert pid is not None
    return int(pid)


def memory_of(report: dict[str, Any]) -> int:
    """Bytes of all that is kept, and of who keeps it."""
    return sum(one["memory_bytes"] for one in report["services"].values()) + report["supervisor_memory_bytes"]


# -- up

def test_services_are_ready_in_time_and_in_little_memory(bare_home: KeptHome) -> None:
    """On an empty home, as on a fresh machine."""
    begun = time.monotonic()
    report = bare_home.up()
    took = time.monotonic() - begun
    memory = memory_of(report)
    print(f"services up in {took:.1f} s, {memory / 2**20:.0f} MB")
    assert report["up"] and set(report["services"]) == set(kept.NAMES)
    assert memory <= MEMORY_BYTES and took <= READY_S
    again = time.monotonic()
    assert bare_home.up()["services"]["prefect"]["pid"] == report["services"]["prefect"]["pid"]
    assert time.monotonic() - again < 5.0, "what is up is not started again"
    bare_home.down()
    assert not bare_home.report()["up"]
    assert servers.is_free(bare_home.prefect_port) and servers.is_free(bare_home.mlflow_port)


def test_a_set_up_that_is_whole_is_found_healthy(kept_home: KeptHome) -> None:
    report = kept_home.call("services", "doctor", "--json")
    assert (report.json["findings"], report.json["notes"], report.process.returncode) == ([], [], 0)


def test_the_pages_are_named_by_ui(kept_home: KeptHome) -> None:
    ui = kept_home.call("ui")
    assert ui.process.returncode == 0, ui.said
    assert all(word in ui.out for word in (f"MLflow   {kept_home.mlflow_page}", f"Prefect  {kept_home.prefect_page}",
                                           str(kept_home.path / "secrets" / "prefect-auth"))), ui.out


def test_what_is_wrong_with_a_set_up_is_named_with_what_to_do(kept_home: KeptHome) -> None:
    secret = kept_home.path / "secrets" / "prefect-auth"
    secret.chmod(0o644)
    kept_home.ask("PATCH", f"/work_pools/{kept.POOL}", {"is_paused": True})
    for made in kept_home.ask("POST", "/automations/filter", {}):
        kept_home.ask("DELETE", f"/automations/{made['id']}")
    found = kept_home.call("services", "doctor", "--json")
    assert found.process.returncode == 1
    said = "\n".join(found.json["findings"])
    assert f"chmod 600 {secret}" in said and "prefect work-pool resume headway" in said
    assert said.count("the automation") == said.count("`headway services up` makes it") == len(silent_runs.NAMES) == 2
    assert len(found.json["findings"]) == 4
    secret.chmod(0o600)
    kept_home.ask("PATCH", f"/work_pools/{kept.POOL}", {"is_paused": False})
    kept_home.up()
    assert kept_home.call("services", "doctor").process.returncode == 0


def test_secrets_are_for_their_owner_alone(kept_home: KeptHome) -> None:
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (kept_home.path / "secrets").iterdir()}
    assert modes["prefect-auth"] == 0o600 and set(modes.values()) == {0o600}
    for place in (kept_home.path / "secrets", *kept.directories(kept_home.path)):
        assert stat.S_IMODE(place.stat().st_mode) == 0o700, place
    secret = servers.prefect_auth(kept_home.path)
    for name in kept.NAMES:
        pid = pid_of(kept_home, name)
        for member, _ in keeper.session_members(pid, keeper.start_time(pid) or 0):
            assert secret not in Path(f"/proc/{member}/cmdline").read_text()
    for log in kept.directory(kept_home.path).glob("*.log"):
        assert secret not in log.read_text()


def test_a_missing_password_is_refused_by_prefect(kept_home: KeptHome) -> None:
    page = kept_home.prefect_page
    assert ask(page, "GET", "/api/admin/version").status == 401
    assert ask(page, "POST", "/api/flow_runs/filter", "{}").status == 401
    wrong = b64encode(b"headway:wrong").decode()
    assert ask(page, "POST", "/api/flow_runs/filter", "{}", Authorization=f"Basic {wrong}").status == 401
    right = b64encode(servers.prefect_auth(kept_home.path).encode()).decode()
    assert ask(page, "POST", "/api/flow_runs/filter", "{}", Authorization=f"Basic {right}").status == 200


def test_a_page_of_another_origin_is_refused(kept_home: KeptHome) -> None:
    """A browser asks first whether it may; without a word for the origin it does not send, and shows nothing."""
    prefect, mlflow, foreign = kept_home.prefect_page, kept_home.mlflow_page, "http://evil.example"
    before = ask(prefect, "OPTIONS", "/api/flow_runs/filter", Origin=foreign, Access_Control_Request_Method="POST",
                 Access_Control_Request_Headers="authorization,content-type")
    assert before.status == 400 and before.getheader("Access-Control-Allow-Origin") is None
    for name in (prefect, prefect.replace("127.0.0.1", "localhost")):  # through a tunnel people use either
        own = ask(prefect, "OPTIONS", "/api/flow_runs/filter", Origin=name, Access_Control_Request_Method="POST",
                  Access_Control_Request_Headers="authorization,content-type")
        assert own.status == 200 and own.getheader("Access-Control-Allow-Origin") == name
    search = "/api/2.0/mlflow/experiments/search"
    assert ask(mlflow, "POST", search, '{"max_results": 1}', Origin=mlflow).status == 200
    for origin in (foreign, "null", prefect):
        for method, path in (("POST", search), ("POST", "/v1/traces"), ("POST", "/graphql"), ("GET", "/graphql"),
                             ("POST", "/gateway/mlflow/v1/chat/completions"), ("OPTIONS", search),
                             ("GET", "/api/2.0/mlflow/runs/get?run_id=0"), ("GET", "/get-artifact?run_uuid=0&path=x")):
            refused = ask(mlflow, method, path, "{}" if method == "POST" else None, Origin=origin)
            said = refused.status, refused.getheader("Access-Control-Allow-Origin")
            assert said == (403, None), (method, path, origin)
    assert ask(mlflow, "GET", "/api/2.0/mlflow/runs/get?run_id=0", Origin=mlflow).status == 404, "it reaches MLflow"
    assert ask(mlflow, "POST", search, '{"max_results": 1}', Host="evil.example").status == 403, "DNS rebinding"


def test_a_plain_shell_finds_the_same_servers(kept_home: KeptHome) -> None:
    done = kept_home.shell("prefect work-pool inspect headway --output json && mlflow experiments search")
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert '"type": "process"' in done.stdout and "Default" in done.stdout


# -- deployments

def test_prefects_own_command_deploys_the_same_but_for_the_parameters_of_the_nightly(kept_home: KeptHome) -> None:
    given = kept_home.call("deploy", "--cron", "0 2 * * *", "--param", 'overrides={"seed": 3}', "--json")
    assert nightly(given)["parameters"] == {"overrides": {"seed": 3}}, given.said
    assert nightly(kept_home.call("deploy", "--json")) == nightly(given), "what is not given again stays"
    before = kept_home.ask("GET", "/deployments/name/train/adhoc")
    done = kept_home.shell("prefect --no-prompt deploy --all --prefect-file deployments/prefect.yaml", cwd=ROOT)
    assert done.returncode == 0, (done.stdout, done.stderr)
    after = kept_home.ask("GET", "/deployments/name/train/adhoc")
    assert (after["id"], after["entrypoint"]) == (before["id"], "flows.train.train")
    assert after["updated"] != before["updated"]
    night = kept_home.ask("GET", "/deployments/name/nightly/nightly")
    assert night["parameters"] == {} and [one["schedule"]["cron"] for one in night["schedules"]] == ["0 2 * * *"]
    without = kept_home.call("deploy", "--cron", "none", "--json")
    assert nightly(without)["schedules"] == [], without.said


def nightly(command: Command) -> dict[str, Any]:
    [found] = [one for one in command.json["deployments"] if one["name"] == "nightly/nightly"]
    return found


def test_a_server_of_somebody_else_is_deployed_to_by_its_address(kept_home: KeptHome, bare_home: KeptHome) -> None:
    """From a home in which no server is kept; Prefect has one work pool named headway for both."""
    secret = servers.prefect_auth(kept_home.path)
    for auth, code in ((secret, 0), ("headway:wrong", 1), ("", 1)):
        said = bare_home.call("deploy", "--cron", "30 1 * * *", "--timezone", "Europe/Berlin", "--json",
                              PREFECT_API_URL=f"{kept_home.prefect_page}/api", PREFECT_API_AUTH_STRING=auth)
        assert said.process.returncode == code, said.said
        if code:
            assert "PREFECT_API_AUTH_STRING" in said.err and secret not in said.err
            continue
        assert nightly(said)["schedules"] == ["30 1 * * * Europe/Berlin"]
        assert nightly(said)["url"].startswith(f"{kept_home.prefect_page}/deployments/deployment/")
    kept_home.call("deploy", "--cron", "none")


def test_an_address_that_is_none_is_refused_before_anything_is_asked(bare_home: KeptHome) -> None:
    said = bare_home.call("deploy", PREFECT_API_URL="http://127.0.0.1:4200")
    assert said.process.returncode == 2 and "write http://host:4200/api" in said.err


def test_deployments_have_typed_and_described_parameters(kept_home: KeptHome) -> None:
    for name, parameters in {"train/adhoc": {"preset", "overrides", "run_key", "amend", "groups"},
                             "nightly/nightly": {"preset", "overrides", "baseline", "seeds", "matrix", "notify"},
                             "rerun/from-step": {"run_key", "from_step", "overrides"},
                             "replay/step": {"run_key", "step", "steps", "overrides"}}.items():
        schema = kept_home.ask("GET", f"/deployments/name/{name}")["parameter_openapi_schema"]["properties"]
        assert parameters <= set(schema), name
        bare = [parameter for parameter, field in schema.items() if not field.get("description")]
        assert not bare, (name, bare)


def test_a_deployment_run_completes_and_is_tracked(kept_home: KeptHome) -> None:
    overrides = json.dumps({**SMALL, "seed": 3, "total_steps": 12})
    done = kept_home.shell("prefect deployment run 'train/adhoc' --param preset=tiny-cpu --param run_key=adhoc "
                           f"--param 'overrides={overrides}' --watch")
    assert done.returncode == 0, (done.stdout, done.stderr)
    run = kept_home.run("adhoc")
    assert recorded_steps(run) == list(range(12)) and config_of(run, 0).seed == 3
    assert audit(run, n_prompts=prompt_rows(run)).violations == []
    stored = json.loads(run.mlflow_run.read_text())
    status, points = kept_home.tracked(stored["run_id"])
    assert status == "FINISHED" and set(points.values()) == {1}
    shown = json.loads(ask(kept_home.mlflow_page, "GET", f"/api/2.0/mlflow/runs/get?run_id={stored['run_id']}").read())
    assert shown["run"]["info"]["run_name"] == "adhoc", "MLflow's server shows what the run wrote into its database"


def test_recorded_steps_replay_as_a_deployment(kept_home: KeptHome) -> None:
    flow_run = kept_home.submit("replay/step", run_key="adhoc", step=5, steps=3)
    run = kept_home.wait_for_state(flow_run, "COMPLETED")
    found = kept_home.ask("POST", "/artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [run["id"]]}}})
    assert len(found) == 1 and found[0]["data"].count("bit-identical") == 3


def test_a_parameter_that_cannot_work_is_refused(kept_home: KeptHome) -> None:
    """By the server where its type is wrong, by the run where its value is, and by its name."""
    deployment = kept_home.ask("GET", "/deployments/name/replay/step")["id"]
    secret = b64encode(servers.prefect_auth(kept_home.path).encode()).decode()
    wrong = ask(kept_home.prefect_page, "POST", f"/api/deployments/{deployment}/create_flow_run",
                json.dumps({"parameters": {"run_key": "adhoc", "step": "five"}}), Authorization=f"Basic {secret}")
    assert wrong.status in (409, 422) and b"step" in wrong.read()
    unknown = kept_home.wait_for_state(kept_home.submit("train/adhoc", preset="tiny-gpu"), "FAILED")
    assert "tiny-gpu" in unknown["state"]["message"] and "tiny-cpu" in unknown["state"]["message"]


# -- what is killed

@pytest.fixture(scope="module")
def silent(kept_home: KeptHome) -> str:
    """A flow run that is under way, has said so, and has no process."""
    made = kept_home.planted("train", "RUNNING")
    kept_home.beat(made, datetime.now(UTC))
    return made


def test_a_run_from_a_terminal_survives_that_both_servers_are_killed(kept_home: KeptHome, silent: str) -> None:
    """It uses the kept Prefect server though its preset is isolated, and is told to send its points to MLflow's server
    instead of its database; the supervisor starts both again at their ports."""
    sets = [f"{name}={json.dumps(value)}" for name, value in {
        **LASTING, "total_steps": LONG, "tracking.uri": kept_home.mlflow_page}.items()]
    command = kept_home.train("terminal", *sets)
    command.wait_for_tracking()
    command.wait_for_step(10)
    kept_home.kill("prefect", "mlflow")
    at = recorded_steps(command.run)[-1]
    assert at < LONG - 20 and command.process.poll() is None, "the servers were back before the run ended"
    assert command.wait(300) == 0, (command.out[-2000:], command.err)
    attempt = json.loads(command.run.attempt(1).read_text())
    assert kept_home.flow_run(attempt["prefect_run_id"])["state_type"] == "COMPLETED"
    assert recorded_steps(command.run) == list(range(LONG))
    noted = command.run.component_log("owner").read_text()
    assert "training goes on, the records are replayed when it is back" in noted and "is back and up to date" in noted
    status, points = kept_home.tracked(command.json["mlflow_run_id"])
    assert status == "FINISHED" and set(points.values()) == {1}
    assert [step for name, step in sorted(points) if name == "reward/mean"] == list(range(LONG))


def test_a_run_survives_that_its_worker_is_killed(kept_home: KeptHome) -> None:
    """The worker is started again, and takes the next run."""
    flow_run = kept_home.submit("train/adhoc", preset="tiny-cpu", run_key="orphan",
                                overrides={**LASTING, "total_steps": 300})
    run = kept_home.run("orphan")
    wait_until(lambda: run.record(5).exists(), 120, "step 5")
    refused = kept_home.call("services", "down")
    assert refused.process.returncode == 2 and "1 flow runs of the worker go on" in refused.err
    worker = pid_of(kept_home, "worker")
    os.kill(worker, signal.SIGKILL)
    wait_until(lambda: kept_home.report()["up"] and pid_of(kept_home, "worker") != worker, 60, "another worker")
    assert kept_home.wait_for_state(flow_run, "COMPLETED")["run_count"] == 1
    assert recorded_steps(run) == list(range(300)) and newest_attempt(run) == 1
    memory = memory_of(kept_home.report())
    print(f"after runs and kills {memory / 2**20:.0f} MB")
    assert memory <= MEMORY_BYTES


def test_a_run_whose_process_is_killed_with_its_worker_is_crashed_in_time_and_can_be_finished(
        kept_home: KeptHome) -> None:
    flow_run = kept_home.submit("train/adhoc", preset="tiny-cpu", run_key="killed",
                                overrides={**LASTING, "total_steps": 40000, "checkpoint.every": 4})
    run = kept_home.run("killed")
    wait_until(lambda: run.record(5).exists(), 120, "step 5")
    worker, [flow] = pid_of(kept_home, "worker"), list(kept.flow_runs(kept_home.path))
    for pid in (worker, flow):
        os.kill(pid, signal.SIGKILL)
    begun = time.monotonic()
    crashed = kept_home.wait_for_state(flow_run, "CRASHED", deadline_s=CRASHED_S)
    print(f"Crashed {time.monotonic() - begun:.0f} s after the kill: {crashed['state']['message']}")
    assert "heartbeat" in crashed["state"]["message"]
    before = written(run)
    again = kept_home.submit("rerun/from-step", run_key="killed", from_step=4, overrides={"total_steps": 8})
    kept_home.wait_for_state(again, "COMPLETED")
    assert recorded_steps(kept_home.run("killed~1")) == list(range(8))
    forked = read_identity(kept_home.run("killed~1")).forked_from
    assert forked is not None and (forked.run_key, forked.step) == ("killed", 4)
    assert written(run) == before, "the run itself is as it was"


def test_what_died_while_the_server_was_away_is_crashed_as_well(kept_home: KeptHome, silent: str) -> None:
    """The tests before this one have taken most of the time that those who live have to say so."""
    state = kept_home.wait_for_state(silent, "CRASHED", deadline_s=silent_runs.HEARD_AGAIN_S + 60)["state"]
    assert "nothing heard since" in state["message"]


def test_a_killed_supervisor_is_found_by_the_doctor_and_its_services_are_taken_over(kept_home: KeptHome) -> None:
    before = kept_home.report()
    os.kill(before["supervisor"], signal.SIGKILL)
    wait_until(lambda: not keeper.processes().get(before["supervisor"]), 10, "the supervisor is gone")
    doctor = kept_home.call("services", "doctor", "--json")
    assert doctor.process.returncode == 1 and any("supervisor is gone" in text for text in doctor.json["findings"])
    after = kept_home.up()
    assert after["supervisor"] != before["supervisor"]
    pids = [{name: one["pid"] for name, one in report["services"].items()} for report in (before, after)]
    assert pids[0] == pids[1]
    os.kill(pids[1]["mlflow"], signal.SIGKILL)
    wait_until(lambda: kept_home.report()["up"] and pid_of(kept_home, "mlflow") != pids[1]["mlflow"], 60,
               "MLflow is up again")


def test_down_by_force_stops_flow_runs_in_order_and_leaves_no_process(kept_home: KeptHome) -> None:
    flow_run = kept_home.submit("train/adhoc", preset="tiny-cpu", run_key="stopped",
                                overrides={**LASTING, "total_steps": 40000})
    run = kept_home.run("stopped")
    wait_until(lambda: run.record(5).exists(), 120, "step 5")
    kept_home.down()
    result = json.loads(run.result.read_text())
    assert (result["status"], result["signal"]) == ("cancelled", "SIGTERM")
    assert wait_until_gone(kept_home, 15) == {}
    with closing(sqlite3.connect(databases.file(kept_home.path, "prefect"))) as database:
        assert database.execute("select state_type from flow_run where id = ?", (flow_run,)).fetchall() == [
            ("CANCELLED",)]


def test_with_the_servers_down_nothing_is_submitted_and_a_run_from_a_terminal_brings_its_own(kept_home: KeptHome
                                                                                              ) -> None:
    """What the run leaves is in the databases that the services have when they are up again."""
    assert not kept_home.report()["up"]
    sets = [f"{name}={json.dumps(value)}" for name, value in {**SMALL, "total_steps": 4}.items()]
    command = kept_home.train("alone", *sets)
    refused = kept_home.call("deploy")
    assert (refused.process.returncode, refused.out) == (2, "") and "headway services up" in refused.err
    assert command.wait() == 0, command.said
    assert recorded_steps(command.run) == list(range(4))
    assert kept_home.states("alone") == (["COMPLETED"], ["FINISHED"])
    assert kept_home.up()["up"]
    attempt = json.loads(command.run.attempt(1).read_text())
    assert kept_home.flow_run(attempt["prefect_run_id"])["state_type"] == "COMPLETED"
