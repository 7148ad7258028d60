"""Nights on real servers: the ten commands of the document, a schedule that fires, verdicts, and what is named, killed
or missing.

The tests stand in the order in which one set-up goes through them, and share it: nights of several deployments run
beside each other, so that what waits for a clock (a schedule, a silent run) waits beside the rest.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml

from rl_core.nightly.nights import NightDir, Outcome, read_outcome
from rl_core.records import read_record, recorded_steps
from rl_core.run_dir import newest_attempt
from tasks import crash_notices, kept, servers, silent_runs
from tests.failing import Spoiled, written
from tests.kept import NIGHT as TINY
from tests.kept import KeptHome, wait_until
from tests.unit.test_notifying import SECRET, webhook

pytestmark = pytest.mark.services

ROOT = Path(__file__).resolve().parents[2]
CALM = {"throughput_loss": 1.0, "staleness_rise": 100.0, "waste_rise": 1.0}
"""Thresholds of a machine that does other things besides."""
BESIDE = ("gates", "faults", "silent")
"""Deployments of the same flow, each of which takes one run at a time."""
HOOK = "NIGHTLY_TEST_HOOK"


class Nights(KeptHome):
    """A home with kept services, a webhook, and the deployments BESIDE."""

    told: list[dict[str, Any]]

    def night(self, key: str) -> NightDir:
        return NightDir(self.path / "nights" / key)

    def outcome(self, key: str) -> Outcome:
        return read_outcome(self.night(key))

    def key_of(self, flow_run: str) -> str:
        """The night that a flow run has begun."""
        return next(place.name for place in (self.path / "nights").iterdir()
                    if json.loads((place / "night.json").read_text())["flow_run_id"] == flow_run)

    def ended(self, flow_run: str, state: str = "COMPLETED", deadline_s: float = 240) -> dict[str, Any]:
        return self.wait_for_state(flow_run, state, deadline_s=deadline_s)

    def version(self, name: str, alias: str = "champion") -> dict[str, Any] | None:
        """The version of a registered model with the alias, as MLflow's server shows it."""
        found = mlflow(self, f"registered-models/alias?name={name}&alias={alias}")
        return None if found is None else found["model_version"]

    def active(self, deployment: str) -> int:
        """How many places of a deployment are taken."""
        return self.ask("GET", f"/deployments/name/{deployment}")["global_concurrency_limit"]["active_slots"]

    def lease(self, flow_run: str) -> str:
        """Id of the lease by which a flow run has its place."""
        return self.flow_run(flow_run)["state"]["state_details"]["deployment_concurrency_lease_id"]

    def renew(self, lease: str) -> int:
        """As the flow run itself does it every few minutes, and is cancelled where it is refused: what the server
        answers, 204 where it knows the lease."""
        secret = b64encode(servers.prefect_auth(self.path).encode()).decode()
        request = urllib.request.Request(
            f"{self.prefect_page}/api/v2/concurrency_limits/leases/{lease}/renew", b'{"lease_duration": 300}',
            {"Content-Type": "application/json", "Authorization": f"Basic {secret}"})
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code

    def scheduled(self, deployment: str) -> list[tuple[str, str]]:
        """Flow runs that are scheduled ahead: id, and when each is due."""
        found = self.ask("GET", f"/deployments/name/{deployment}")["id"]
        return sorted((one["id"], one["expected_start_time"]) for one in self.ask("POST", "/flow_runs/filter", {
            "flow_runs": {"deployment_id": {"any_": [found]}, "state": {"type": {"any_": ["SCHEDULED"]}}}}))

    def crash_notice(self) -> dict[str, Any] | None:
        """The automation that tells of killed nights, as Prefect's server has it."""
        found = self.ask("POST", "/automations/filter", {"automations": {"name": {"any_": [crash_notices.NAME]}}})
        return found[0] if found else None

    def make_webhook(self, name: str) -> None:
        """A block `webhook/<name>` with the address of NIGHTLY_TEST_HOOK, as Prefect's page makes it."""
        kind = self.ask("GET", "/block_types/slug/webhook")["id"]
        schema = self.ask("POST", "/block_schemas/filter", {"block_schemas": {"block_type_id": {"any_": [kind]}}})[0]
        assert self.ask("POST", "/block_documents/", {
            "name": name, "data": {"url": os.environ[HOOK], "method": "POST"}, "block_type_id": kind,
            "block_schema_id": schema["id"]}) is not None

    def artifacts(self, flow_run: str) -> dict[str, str]:
        found = self.ask("POST", "/artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [flow_run]}}})
        return {one["key"]: one["data"] for one in found}


def mlflow(home: KeptHome, path: str) -> Any:
    try:
        with urllib.request.urlopen(f"{home.mlflow_page}/api/2.0/mlflow/{path}", timeout=10) as answer:
            return json.loads(answer.read())
    except urllib.error.HTTPError as error:
        assert error.code in (400, 404), error
        return None


def tags_of(version: dict[str, Any]) -> dict[str, str]:
    return {one["key"]: one["value"] for one in version["tags"]}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nights]:
    with webhook() as (url, told):
        os.environ[HOOK] = url
        one = KeptHome.at(tmp_path_factory.mktemp("nights"))
        nights = Nights(one.path, prefect_port=one.prefect_port, mlflow_port=one.mlflow_port)
        nights.told = told
        try:
            nights.up()
            yield nights
        finally:
            del os.environ[HOOK]
            nights.down()


def ten_commands() -> list[str]:
    [block] = re.findall(r"^```sh\n(.*?)^```", (ROOT / "docs" / "nightly.md").read_text(), re.M | re.S)
    return block.strip().splitlines()


# -- a night, and the next one

def test_a_cron_typo_is_said_before_anything_is_registered(home: Nights) -> None:
    done = home.call("deploy", "--cron", "0 25 * * *")
    assert done.process.returncode == 2 and "--cron '0 25 * * *': no schedule; write five fields" in done.err
    assert home.ask("POST", "/deployments/filter", {}) == []


def test_ten_commands_lead_from_nothing_to_a_scheduled_night(home: Nights) -> None:
    commands = ten_commands()
    assert len(commands) == 10
    begun = time.monotonic()
    done = shell(home, "set -e\n" + "\n".join(commands))
    print(f"ten commands in {time.monotonic() - begun:.0f} s\n{done.stdout[-3000:]}")
    assert done.returncode == 0, (done.stdout[-3000:], done.stderr[-3000:])
    first, second = sorted(path.name for path in (home.path / "nights").iterdir())
    assert re.fullmatch(r"nightly-\d{4}-\d\d-\d\d", first) and re.fullmatch(re.escape(first) + r"-\d{4}", second)
    assert home.outcome(first).verdict == "promote" and home.outcome(first).baseline is None
    compared = home.outcome(second)
    assert str(compared.baseline) == f"{first} (champion, version 1)"
    assert {each.name for each in compared.differences} >= {"held_out_accuracy", "samples_per_s", "staleness_mean",
                                                            "wasted_share"}
    assert compared.changed == {"learner.lr": (5e-4, 1e-4)}
    [schedule] = home.ask("GET", "/deployments/name/nightly/nightly")["schedules"]
    assert (schedule["schedule"]["cron"], schedule["schedule"]["timezone"]) == ("0 2 * * *", "Europe/Berlin")
    wait_until(lambda: len(home.scheduled("nightly/nightly")) >= 3, 90, "nights are scheduled ahead")


def shell(home: Nights, script: str) -> subprocess.CompletedProcess[str]:
    """As a person's: nothing but HEADWAY_HOME is set, and where it stands are no other files."""
    place = home.path / "elsewhere"
    place.mkdir(exist_ok=True)
    env = {**home.environ, "NO_COLOR": "1", "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(["bash", "-c", script], env=env, text=True, cwd=place, capture_output=True, timeout=400)


def test_the_model_is_registered_with_its_lineage_and_how_to_serve_it(home: Nights) -> None:
    [first, *_] = sorted(path.name for path in (home.path / "nights").iterdir())
    run = home.run(first)
    version = home.version("nightly")
    assert version is not None and version["source"] == (home.night(first).model).as_uri()
    tags, about = tags_of(version), json.loads((home.night(first).model / "headway.json").read_text())
    record = read_record(run, 11)
    assert tags["headway.run_key"] == tags["headway.night"] == first and tags["headway.step"] == "12"
    assert tags["headway.weights_digest"] == about["weights_digest"] == record.weights_digest
    assert tags["headway.config_digest"] == about["config_digest"] and tags["headway.verdict"] == "promoted"
    assert tags["headway.commit"] and json.loads(tags["headway.shards"])
    assert f"sglang.launch_server --model-path {home.night(first).model} --port" in tags["headway.serve"]
    stored = json.loads(run.mlflow_run.read_text())["run_id"]
    found = mlflow(home, f"artifacts/list?run_id={stored}&path=night")
    assert [one["path"] for one in found["files"]] == ["night/report.html"]
    shown = {one["key"]: one["value"] for one in mlflow(home, f"runs/get?run_id={stored}")["run"]["data"]["tags"]}
    assert (shown["headway.night"], shown["headway.verdict"]) == (first, "promote")


@pytest.fixture(scope="module")
def deployed(home: Nights, tmp_path_factory: pytest.TempPathFactory) -> float:
    """The nightly of every two minutes, and the deployments BESIDE; when that was."""
    tree = yaml.safe_load(files("deployments").joinpath("prefect.yaml").read_text())
    [nightly] = [one for one in tree["deployments"] if one["name"] == "nightly"]
    # Nights that fail have a schedule, too: none of them is due while this lasts, and all of them are once a month.
    far = (datetime.now(UTC) + timedelta(days=14)).day % 28 + 1
    tree["deployments"] = [nightly | {"name": name} | ({"schedules": [{"cron": f"0 2 {far} * *", "timezone": "UTC"}]}
                                                       if name == "faults" else {}) for name in BESIDE]
    source = tmp_path_factory.mktemp("beside") / "prefect.yaml"
    source.write_text(yaml.safe_dump(tree))
    done = home.call("deploy", "--prefect-file", str(source), "--json")
    assert done.process.returncode == 0, done.said
    done = home.call("deploy", "--cron", "*/2 * * * *", "--param", "name=clock", "--param",
                     f"overrides={json.dumps(TINY)}", "--json")
    assert done.process.returncode == 0, done.said
    one = next(one for one in done.json["deployments"] if one["name"] == "nightly/nightly")
    assert one["schedules"] == ["*/2 * * * * UTC"]
    assert one["parameters"] == {"preset": "tiny-cpu", "name": "clock", "overrides": TINY}, "what was set stays"
    return time.monotonic()


# -- what is missing, or silent

def test_a_night_that_cannot_work_says_why_before_it_trains(home: Nights, deployed: float) -> None:
    refused = {
        "an unknown preset": ({"preset": "tiny-gpu"}, ("tiny-gpu", "tiny-cpu")),
        "a baseline that is not there": ({"baseline": "nightly-1999-01-01", "overrides": TINY},
                                         ("baseline 'nightly-1999-01-01'", "no such run")),
        "a champion that is not there": ({"baseline": "champion", "name": "lonely", "overrides": TINY},
                                         ("baseline 'champion'", "registered model 'lonely'"))}
    runs = {what: home.submit(f"nightly/{name}", **parameters)
            for name, (what, (parameters, _)) in zip(BESIDE, refused.items(), strict=True)}
    for what, (_, words) in refused.items():
        message = home.ended(runs[what], "FAILED")["state"]["message"]
        assert all(word in message for word in words), message
    assert not home.run("nightly-1999-01-01").root.exists() and not (home.path / "nights").joinpath("lonely").exists()
    deployment = home.ask("GET", "/deployments/name/nightly/faults")["id"]
    for wrong in ({"accuracy_gain": 2}, {"notify": f"https://hooks.example/{SECRET}"}, {"seeds": ["one"]}):
        assert home.ask("POST", f"/deployments/{deployment}/create_flow_run", {"parameters": wrong}) is None, wrong


@pytest.fixture(scope="module")
def pending(home: Nights, deployed: float) -> tuple[str, float]:
    """A night that a worker has taken, and then nobody began: as when worker and process are killed at once."""
    deployment = home.ask("GET", "/deployments/name/nightly/silent")["id"]
    made = home.made(f"/deployments/{deployment}/create_flow_run", {"parameters": {}, "state": {
        "type": "SCHEDULED", "state_details": {"scheduled_time": "2030-01-01T00:00:00Z"}}})
    home.made(f"/flow_runs/{made['id']}/set_state", {"state": {"type": "PENDING", "name": "Pending"}})
    assert home.flow_run(made["id"])["state_type"] == "PENDING"
    refused = home.submit("nightly/silent", overrides=TINY)
    message = home.ended(refused, "CANCELLED")["state"]["message"]
    assert "concurrency limit" in message, "it holds the place"
    return made["id"], time.monotonic()


# -- verdicts

def test_a_night_made_worse_on_purpose_is_not_promoted_and_says_why(home: Nights, pending: tuple[str, float]) -> None:
    """The first night learns nothing; the second one unlearns. A third one, submitted meanwhile, is one too many."""
    flat = home.submit("nightly/gates", name="gate", overrides=TINY | {"learner.lr": 1e-9}, notify=f"env:{HOOK}")
    wait_until(lambda: home.flow_run(flat)["state_type"] == "RUNNING", 60, "the first one runs")
    second = home.submit("nightly/gates", name="gate", overrides=TINY)
    assert "concurrency limit" in home.ended(second, "CANCELLED")["state"]["message"], "two at once"
    home.ended(flat)
    first = home.key_of(flat)
    assert home.outcome(first).verdict == "promote" and "first night" in home.outcome(first).reasons[0]
    before = home.version("gate")
    worse = home.submit("nightly/gates", name="gate", overrides=TINY | {"learner.lr": 0.5, "total_steps": 8},
                        notify=f"env:{HOOK}", notify_on="trouble", **CALM)
    home.ended(worse)
    key = home.key_of(worse)
    found = home.outcome(key)
    accuracy = found.differences[0]
    print(f"worse: {accuracy}")
    assert found.verdict == "alarm" and found.reasons[0].startswith("held-out accuracy fell"), found
    assert accuracy.high < -0.02 and found.changed["learner.lr"] == (1e-9, 0.5)
    after = home.version("gate")
    assert before is not None and after is not None and after["version"] == before["version"] == "1"
    report = home.artifacts(worse)["night-report"]
    assert "alarm" in report and "held-out accuracy fell" in report and first in report
    assert [(note["night"], note["verdict"]) for note in home.told] == [(first, "promote"), (key, "alarm")]
    assert home.told[1]["text"].startswith(f"{key}: alarm"), home.told[1]


@pytest.fixture(scope="module")
def killed(home: Nights, pending: tuple[str, float]) -> tuple[str, str, float]:
    """A night in the middle of its training whose process and worker are killed: flow run, key, when. It has no
    `notify`: who is told of it is that of the deployed nightly."""
    wait_until(lambda: not 60 < time.time() % 120 < 105, 60, "it will be in its training while the clock has no night")
    flow_run = home.submit("nightly/faults", name="killed", overrides=TINY | {"total_steps": 400})
    home.make_webhook("crashes")
    done = home.call("deploy", "--param", "notify=block:webhook/crashes", "--param", "notify_on=trouble")
    assert done.process.returncode == 0 and home.crash_notice() is not None, done.said
    wait_until(lambda: "killed" in str(list((home.path / "nights").iterdir())), 90, "the night has begun")
    key = home.key_of(flow_run)
    run = home.run(key)
    wait_until(lambda: run.record(5).exists() and run.mlflow_run.exists(), 180, "step 5, and MLflow knows it")
    worker = home.report()["services"]["worker"]["pid"]
    [flow] = [pid for pid, one in kept.flow_runs(home.path).items() if one == flow_run]
    # Not while the worker takes the clock's next night: where a schedule is younger than five minutes, the server waits
    # 15 minutes for an event of it that never was, before it sees that such a night did not begin.
    wait_until(lambda: 30 < time.time() % 120 < 90, 90, "the clock's nights are out of the way")
    for pid in (worker, flow):
        os.kill(pid, signal.SIGKILL)
    return flow_run, key, time.monotonic()


def test_a_better_night_is_promoted_while_another_one_is_being_missed(home: Nights, killed: tuple[str, str, float]
                                                                       ) -> None:
    better = home.submit("nightly/gates", name="gate", overrides=TINY | {
        "total_steps": 24, "groups_per_step": 16, "group_size": 8}, baseline="champion",
        register_version="promoted", serve="serve {model} --now", **CALM)
    home.ended(better)
    key = home.key_of(better)
    found = home.outcome(key)
    print(f"better: {found.differences[0]}")
    assert found.verdict == "promote" and found.differences[0].low > 0, found
    version = home.version("gate")
    assert version is not None and tags_of(version)["headway.run_key"] == key
    assert tags_of(version)["headway.serve"] == f"serve {home.night(key).model} --now"


def test_a_killed_night_is_crashed_in_time_and_the_next_one_is_accepted(home: Nights, killed: tuple[str, str, float]
                                                                        ) -> None:
    flow_run, key, when = killed
    crashed = home.ended(flow_run, "CRASHED", deadline_s=120 - (time.monotonic() - when))
    print(f"Crashed at most {time.monotonic() - when:.0f} s after the kill")
    assert "heartbeat" in crashed["state"]["message"] and not home.night(key).verdict.exists()
    name, why = crashed["name"], crashed["state"]["message"]
    wait_until(lambda: name in [note["night"] for note in home.told], 30, "the killed night is told")
    assert [note for note in home.told if note["night"] == name] == [{
        "subject": f"{name}: crashed", "text": f"{name}: crashed: {why}", "night": name, "verdict": "crashed",
        "reasons": [why]}]


def test_a_failed_night_names_step_component_and_cause_and_retry_finishes_it(home: Nights,
                                                                             killed: tuple[str, str, float]) -> None:
    """It is the next night after the killed one. A baseline is there, and so the comparison goes on in the end. What is
    scheduled stays as it is."""
    ahead = home.scheduled("nightly/faults")
    assert len(ahead) >= 3
    flow_run = home.submit("nightly/faults", name="gate", overrides=TINY | {"total_steps": 60},
                           notify="block:webhook/morning", **CALM)
    refused = home.ended(flow_run, "FAILED")["state"]["message"]
    assert "no such block" in refused, "the block is made only now"
    made = home.shell("python -c \"import os; from prefect.blocks.webhook import Webhook; "
                      f"Webhook(url=os.environ['{HOOK}']).save('morning')\"")
    assert made.returncode == 0, made.stderr
    retried(home, flow_run)
    wait_until(lambda: home.flow_run(flow_run)["state_type"] == "RUNNING", 60, "it runs")
    wait_until(lambda: any(json.loads(path.read_text())["flow_run_id"] == flow_run
                           for path in (home.path / "nights").glob("*/night.json")), 60, "it has begun")
    key = home.key_of(flow_run)
    run = home.run(key)
    wait_until(lambda: run.record(6).exists(), 180, "step 6")
    spoiled = Spoiled(run)
    spoiled.spoil()
    message = home.ended(flow_run, "FAILED")["state"]["message"]
    spoiled.mend()
    step = recorded_steps(run)[-1] + 1
    assert f"night {key}: training step {step} of run {key}, experience store: ClaimedShardCorrupt" in message, message
    assert f"`headway rerun {key}`" in message and home.scheduled("nightly/faults") == ahead
    assert "no verdict" in home.artifacts(flow_run)["night-report"]
    before, mlflow_run = written(run), json.loads(run.mlflow_run.read_text())["run_id"]
    retried(home, flow_run)
    wait_until(lambda: home.flow_run(flow_run)["run_count"] == 3, 60, "it runs again")
    assert home.active("nightly/faults") == 1, "a Retry takes the place: what is due meanwhile is Cancelled"
    home.ended(flow_run)
    assert {k: written(run)[k] for k in before} == before and recorded_steps(run) == list(range(60))
    assert json.loads(run.mlflow_run.read_text())["run_id"] == mlflow_run and newest_attempt(run) == 2
    status, points = home.tracked(mlflow_run)
    assert status == "FINISHED" and set(points.values()) == {1}
    found = home.outcome(key)
    assert found.baseline is not None and found.baseline.kind == "champion"
    assert [note["verdict"] for note in home.told if note["night"] == key] == ["failed", found.verdict]
    assert home.scheduled("nightly/faults") == ahead


def retried(home: Nights, flow_run: str) -> None:
    """As Prefect's page does it."""
    home.ask("POST", f"/flow_runs/{flow_run}/set_state", {"force": False, "state": {
        "type": "SCHEDULED", "name": "AwaitingRetry", "message": "Retry from the UI"}})


def test_rerun_finishes_a_killed_night_in_its_mlflow_run_and_the_comparison_goes_on(
        home: Nights, killed: tuple[str, str, float]) -> None:
    _, key, _ = killed
    run = home.run(key)
    mlflow_run = json.loads(run.mlflow_run.read_text())["run_id"]
    before = written(run)
    done = home.call("rerun", key, "--json")
    assert done.process.returncode == 0, (done.out[-2000:], done.err)
    assert {k: written(run)[k] for k in before} == before and recorded_steps(run) == list(range(400))
    assert json.loads(run.mlflow_run.read_text())["run_id"] == mlflow_run
    assert home.outcome(key).verdict == "promote" and home.outcome(key).baseline is None
    version = home.version("killed")
    assert version is not None and tags_of(version)["headway.run_key"] == key


def test_rerun_of_its_key_finishes_a_failed_matrix_whose_other_run_was_never_begun(
        home: Nights, deployed: float) -> None:
    """Its first run fails at a step. The second one is begun by the rerun, and is the one that has a validation."""
    ahead = home.scheduled("nightly/faults")
    flow_run = home.submit("nightly/faults", name="pair", register_version="never", notify=f"env:{HOOK}",
                           overrides=TINY | {"data.validation_size": 16},
                           matrix=[{"total_steps": 30, "data.validation": None}, {"seed": 3}])
    wait_until(lambda: list((home.path / "nights").glob("pair-*/night.json")) != [], 120, "the night has begun")
    key = home.key_of(flow_run)
    first, second = home.run(f"{key}.1"), home.run(f"{key}.2")
    wait_until(lambda: first.record(3).exists(), 180, "step 3 of its first run")
    spoiled = Spoiled(first)
    spoiled.spoil()
    message = home.ended(flow_run, "FAILED")["state"]["message"]
    spoiled.mend()
    assert f"of run {key}.1, " in message and f"`headway rerun {key}`" in message, message
    parent = json.loads(home.night(key).parent.read_text())["run_id"]
    assert mlflow(home, f"runs/get?run_id={parent}")["run"]["info"]["status"] == "FAILED"
    before, mlflow_run = written(first), json.loads(first.mlflow_run.read_text())["run_id"]
    assert not second.root.exists()

    done = home.call("rerun", key, "--json")
    assert done.process.returncode == 0, (done.out[-2000:], done.err)
    found = home.outcome(key)
    assert (done.json["run_key"], done.json["status"]) == (f"{key}.2", "completed") == (found.run_key, "completed")
    assert [one.judgement.verdict for one in found.compared] == ["alarm", "promote"] and found.verdict == "promote"
    assert {step: written(first)[step] for step in before} == before and recorded_steps(first) == list(range(30))
    assert (newest_attempt(first), newest_attempt(second)) == (2, 1)
    children = [json.loads(run.mlflow_run.read_text())["run_id"] for run in (first, second)]
    assert children[0] == mlflow_run
    assert json.loads(home.night(key).parent.read_text())["run_id"] == parent
    shown = mlflow_runs(home, f"tags.`headway.night` = '{key}'")
    assert sorted(shown) == sorted([parent, *children]), "one parent, and each child once"
    assert {run: status for run, (status, _) in shown.items()} == dict.fromkeys(shown, "FINISHED")
    assert {run: of for run, (_, of) in shown.items()} == {parent: None} | dict.fromkeys(children, parent)
    assert [note["verdict"] for note in home.told if note["night"] == key] == ["failed", "promote"]
    assert home.scheduled("nightly/faults") == ahead != []


def mlflow_runs(home: KeptHome, where: str) -> dict[str, tuple[str, str | None]]:
    """Runs of the experiment that a filter finds: id -> (status, parent)."""
    place = mlflow(home, "experiments/get-by-name?experiment_name=headway")["experiment"]["experiment_id"]
    request = urllib.request.Request(
        f"{home.mlflow_page}/api/2.0/mlflow/runs/search",
        json.dumps({"experiment_ids": [place], "filter": where}).encode(),
        {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        found = json.loads(answer.read())["runs"]
    tags = {one["info"]["run_id"]: {tag["key"]: tag["value"] for tag in one["data"]["tags"]} for one in found}
    return {one["info"]["run_id"]: (one["info"]["status"], tags[one["info"]["run_id"]].get("mlflow.parentRunId"))
            for one in found}


def test_a_matrix_is_one_run_of_mlflow_with_children_and_keeps_its_place_when_the_server_is_killed(
        home: Nights, deployed: float) -> None:
    """The second run has no validation: the first one is the better one of those that are known. Prefect's server is
    killed while the first one trains: the night goes on, and its place is still its own."""
    flow_run = home.submit("nightly/gates", name="many", overrides=TINY, register_version="never",
                           matrix=[{"learner.lr": 1e-5}, {"learner.lr": 1e-5, "data.validation": None}])
    wait_until(lambda: list((home.path / "nights").glob("many-*/night.json")) != [], 120, "the night has begun")
    key = home.key_of(flow_run)
    wait_until(lambda: home.run(f"{key}.1").record(0).exists(), 180, "a step of its first run")
    lease = home.lease(flow_run)
    assert (home.path / "prefect" / "concurrency_leases" / f"{lease}.json").exists(), "places are files"
    home.kill("prefect")
    assert home.flow_run(flow_run)["state_type"] == "RUNNING", "the server was back before the night ended"
    assert (home.active("nightly/gates"), home.lease(flow_run), home.renew(lease)) == (1, lease, 204)
    assert home.ended(flow_run)["run_count"] == 1
    wait_until(lambda: home.active("nightly/gates") == 0, 10, "the place is given back")
    assert home.renew(lease) == 410
    found = home.outcome(key)
    assert [one.run_key for one in found.compared] == [f"{key}.1", f"{key}.2"] and found.run_key == f"{key}.1"
    assert [one.judgement.verdict for one in found.compared] == ["promote", "alarm"]
    assert "has no validation" in found.compared[1].judgement.reasons[0]
    parent = json.loads((home.night(key).root / "mlflow.json").read_text())["run_id"]
    children = [json.loads(home.run(f"{key}.{i}").mlflow_run.read_text())["run_id"] for i in (1, 2)]
    for child in children:
        tags = {one["key"]: one["value"] for one in mlflow(home, f"runs/get?run_id={child}")["run"]["data"]["tags"]}
        assert tags["mlflow.parentRunId"] == parent and tags["headway.night"] == key
    assert mlflow(home, f"runs/get?run_id={parent}")["run"]["info"]["status"] == "FINISHED"
    assert home.version("many") is None


def test_a_night_without_a_validation_is_an_alarm(home: Nights, deployed: float) -> None:
    flow_run = home.submit("nightly/gates", name="gate", overrides=TINY | {"data.validation": None}, **CALM)
    home.ended(flow_run)
    found = home.outcome(home.key_of(flow_run))
    assert found.verdict == "alarm" and "the run has no validation" in found.reasons[0]


# -- what waits for a clock

def test_a_night_that_died_before_it_began_is_crashed_and_gives_its_place_back(home: Nights,
                                                                               pending: tuple[str, float]) -> None:
    flow_run, since = pending
    left_s = silent_runs.BEGIN_S + 60 - (time.monotonic() - since)
    crashed = home.ended(flow_run, "CRASHED", deadline_s=max(1.0, left_s))
    assert "not begun" in crashed["state"]["message"]
    assert home.active("nightly/silent") == 0


def test_a_schedule_of_every_two_minutes_fires_twice_and_the_second_is_compared_with_the_first(
        home: Nights, deployed: float) -> None:
    def keys() -> list[str]:
        return sorted(path.parent.name for path in (home.path / "nights").glob("clock-*/verdict.json"))

    wait_until(lambda: len(keys()) >= 2, 420 - (time.monotonic() - deployed), "two nights by the clock")
    home.call("deploy", "--cron", "none", "--param", "notify=null")
    assert home.crash_notice() is None
    first, second = keys()[:2]
    assert home.outcome(first).baseline is None and str(home.outcome(second).baseline).startswith(f"{first} (")
    due = [json.loads(home.night(key).night.read_text())["scheduled_us"] for key in (first, second)]
    assert due[0] < due[1] and {at % 120_000_000 for at in due} == {0}, "by the clock; one may have been in the way"
    assert home.ask("GET", "/deployments/name/nightly/nightly")["schedules"] == []


def test_the_address_of_the_webhook_stands_nowhere(home: Nights, deployed: float) -> None:
    """Databases, logs, run directories and pages; the block is in Prefect's database, encrypted."""
    needle = SECRET.encode()
    found = [path for path in home.path.rglob("*") if path.is_file() and needle in path.read_bytes()]
    assert found == []
