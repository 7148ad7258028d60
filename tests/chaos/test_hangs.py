"""Whole runs in which one part hangs: each ends within the deadline of that wait, names who hung, and can go on. So
does one whose engine dies inside the process that hosts it, of which nobody outside sees anything, either.

The hangs of `HANGS` meet one run, start after start; in the end it completes, and nothing was lost or trained twice.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rl_core.experience.audit import audit
from rl_core.records import recorded_steps
from rl_core.run_dir import newest_attempt
from rl_core.run_identity import prompt_rows
from tests.chaos import faults
from tests.chaos.stack import check_finished, pid_of, pid_of_actor
from tests.kept import wait_until
from tests.runs import Command, Home, processes_of, wait_until_gone

pytestmark = pytest.mark.slow
"""About twenty starts. `make chaos` runs it."""

KEY, STEPS = "hangs", 400
PARTS_LOG = r"^ *(the end of (learner|rollout|validation)-\d\.log:|(learner|rollout|validation)-\d\.log is empty)$"
MARGIN_S = 15.0
"""Beside a deadline: the parts that end, MLflow's last words (5 s), the end of the process."""
REWARD = """
import os
import time

HERE = os.path.dirname(os.path.abspath(__file__))


def score(answer, ground_truth):
    while os.path.exists(HERE + "/stuck"):
        time.sleep(0.1)
    if not os.path.exists(HERE + "/over"):
        time.sleep(0.02)
    return float(answer == ground_truth)
"""
"""Slow until all is over, so that the steps last."""
SETTINGS = (
    "reward=./reward.py:score", "groups_per_step=4", "group_size=4", "validation.every=1000", "validation.slots=16",
    "checkpoint.every=10", "data.size=4096", "data.validation_size=64", "model.warmup_steps=0",
    "learner.loss.entropy_coef=0.05", "learner.decay=constant")
"""A model without warm-up, which no reward moves: its entropy does."""


ENGINE_DIED = r"engine of worker rollout-0: torch engine: died of RuntimeError\('the device is lost'\)"


@dataclass
class Scene:
    """A start that trains, and the place where its reward lies."""

    home: Home
    work: Path
    command: Command

    def pid(self, role: str, rank: int = 0) -> int:
        """Of an actor, which is there."""
        until = time.monotonic() + 30
        while (pid := pid_of_actor(self.home, self.command.run, role, rank)) is None:
            assert time.monotonic() < until, f"there is no {role}-{rank}"
            time.sleep(0.05)
        return pid

    def trains_on(self, steps: int = 3) -> None:
        """Until so many further steps have a record."""
        done = recorded_steps(self.command.run)
        self.command.wait_for_step((done[-1] if done else -1) + steps)

    def stop(self, role: str, rank: int = 0) -> str:
        """SIGSTOP to an actor; how an error names it."""
        pid = self.pid(role, rank)
        os.kill(pid, signal.SIGSTOP)
        return rf"{role}/{rank} \(pid {pid}\)"

    def stop_twice(self, role: str, rank: int = 0) -> str:
        """The first time the run goes on with another process."""
        first = self.pid(role, rank)
        self.stop(role, rank)
        until = time.monotonic() + 60
        while pid_of_actor(self.home, self.command.run, role, rank) in (None, first):
            assert self.command.process.poll() is None, self.command.process.communicate()
            assert time.monotonic() < until, f"no other {role}-{rank}"
            time.sleep(0.05)
        self.trains_on()
        return self.stop(role, rank)

    def touch(self, name: str) -> str:
        (self.work / name).touch()
        return ""

    def take_no_files(self, role: str) -> str:
        faults.take_no_files(self.pid(role))
        return ""


@dataclass(frozen=True, kw_only=True)
class Hang:
    """What hangs, and what the run says of it."""

    settings: tuple[str, ...]
    begin: Callable[[Scene], str]
    """Returns the name of who hangs, as a regular expression."""
    says: str
    """Regular expression of the cause; `WHO` stands for the name."""
    within_s: float
    """From the hang on, by its deadline and its budget."""


HANGS = {
    "a reward that never returns": Hang(
        settings=("deadlines.reward_s=1", "failure.reward_failures=3"), begin=lambda scene: scene.touch("stuck"),
        says=r"FailureBudgetSpent: 3 reward calls failed in a row \(failure\.reward_failures\); the last one: reward "
             r"\./reward\.py:score: no answer within 1 s; its process was ended",
        within_s=10.0),
    "an engine that accepts and never answers": Hang(
        settings=("deadlines.group_s=3", "failure.reward_failures=6"), begin=lambda scene: scene.touch("silent"),
        says=r"FailureBudgetSpent: at least 6 answers in a row failed with group_deadline and nothing landed "
             r"\(failure\.reward_failures 6\); the first, in e\d+-p\d+-t\d+: [234] of 4 answers were not there after "
             r"3 s \(deadlines\.group_s\)",
        within_s=10.0),
    "a rollout worker that is stopped, twice": Hang(
        settings=("deadlines.call_s=4", "failure.worker_restarts=1"), begin=lambda scene: scene.stop_twice("rollout"),
        says=r"FailureBudgetSpent: rollout workers died 2 times in this attempt \(failure\.worker_restarts 1\); the "
             r"last one: rollout-0: WHO: `(events|lease)` gave no answer in 4(\.5)? s",
        within_s=5.0),
    "an engine that dies inside its worker, and no restart is left": Hang(
        settings=("failure.worker_restarts=0",), begin=lambda scene: scene.touch("dying"),
        says=rf"FailureBudgetSpent: rollout workers died 1 times in this attempt \(failure\.worker_restarts 0\); the "
             rf"last one: rollout-0: {ENGINE_DIED}",
        within_s=5.0),
    "a learner that is stopped": Hang(
        settings=("deadlines.step_s=6",), begin=lambda scene: scene.stop("learner"),
        says=r"DeadlinePassed: WHO: `(train|checkpoint)` gave no answer in 6 s", within_s=8.0),
    "a validation engine that is stopped": Hang(
        settings=("deadlines.validation_s=4", "validation.every=2"), begin=lambda scene: scene.stop("validation"),
        says=r"DeadlinePassed: WHO: `validate` gave no answer in 4 s", within_s=10.0),
    "a worker whose files take nothing": Hang(
        settings=(), begin=lambda scene: scene.take_no_files("rollout"),
        says=r"OSError: \[Errno 27\] File too large: no shard has landed for 3\d s; make room, then the same command "
             r"goes on: '.*/streams/rollout-0-[0-9a-f]{12}'",
        within_s=40.0),
}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the reward of the runs lies."""
    made = tmp_path_factory.mktemp("hangs")
    (made / "reward.py").write_text(REWARD)
    return made


@pytest.fixture(autouse=True)
def flags(work: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All runs have the engine that falls silent while a file is there, and dies of another; a test takes its files
    along."""
    code = faults.SILENT_ENGINE.format(flag=str(work / "silent")) + faults.ENGINE_DIES.format(flag=str(work / "dying"))
    monkeypatch.setenv("PYTHONPATH", faults.python_path(work / "site", "rl_core.rollout.torch_engine", code))
    yield
    for flag in ("stuck", "silent", "dying", "over"):
        (work / flag).unlink(missing_ok=True)


def under_way(home: Home, work: Path, key: str, *settings: str) -> Scene:
    """A start of the run that trains and that MLflow knows."""
    scene = Scene(home, work, home.train(key, *SETTINGS, *settings, cwd=work))
    scene.trains_on()
    scene.command.wait_for_tracking()
    return scene


def cause(command: Command) -> str:
    """What the console says of a failure."""
    said = re.search(r"^failed: (.*)$", command.out, re.MULTILINE)
    return said[1] if said else command.out


def check_failed(home: Home, command: Command, says: str, starts: int) -> None:
    """Console, exit code, Prefect and MLflow say the same, the log of a dead part included, and nothing is left."""
    assert re.search(f"^failed: {says}", command.out, re.MULTILINE), (says, command.out)
    assert (command.process.returncode, command.err, command.json["status"]) == (1, "", "failed")
    key = command.run.root.name
    assert home.states(key) == (["FAILED"] * starts, ["FAILED"])
    prefect, mlflow = home.causes(key)
    assert cause(command) in prefect and mlflow.startswith(cause(command)), (cause(command), prefect, mlflow)
    if re.search(r"\(pid |engine of worker ", cause(command)):  # below it stands what the part wrote last
        failure = command.run.logs / f"failure-{newest_attempt(command.run):06d}.txt"
        for told in (command.out, prefect, mlflow, failure.read_text()):
            assert re.search(PARTS_LOG, told, re.MULTILINE), told
    assert wait_until_gone(home, 10) == {}


@pytest.mark.parametrize("what", HANGS)
def test_what_hangs_ends_the_run_within_its_deadline_and_is_named(home: Home, work: Path, what: str) -> None:
    hang = HANGS[what]
    scene = under_way(home, work, KEY, f"total_steps={STEPS}", *hang.settings)
    who = hang.begin(scene)
    begun = time.monotonic()
    scene.command.wait(hang.within_s + MARGIN_S)
    took = time.monotonic() - begun
    print(f"{what}: {took:.1f} s; {cause(scene.command)}")
    check_failed(home, scene.command, hang.says.replace("WHO", who), len(home.states(KEY)[0]))
    status = home.call("status", KEY, "--json").json
    assert re.match(hang.says.replace("WHO", who), status["cause"]), status


def test_behind_all_hangs_the_same_run_completes_and_nothing_was_lost(home: Home, work: Path) -> None:
    (work / "over").touch()
    command = home.train(KEY, *SETTINGS, f"total_steps={STEPS}", cwd=work)
    assert command.wait(300) == 0, command.said
    check_finished(home, command, STEPS)


def test_an_engine_that_dies_inside_its_worker_ends_that_process_and_the_run_goes_on(home: Home, work: Path) -> None:
    """Twice: with each death the whole process goes, and another one takes over."""
    steps, pids = 80, list[int]()
    scene = under_way(home, work, "engines", f"total_steps={steps}")
    for _ in range(2):
        pids.append(scene.pid("rollout"))
        scene.touch("dying")
        begun = time.monotonic()
        wait_until(lambda: pid_of_actor(home, scene.command.run, "rollout") not in (None, *pids), 30,
                   "another rollout worker")
        print(f"an engine that dies: another worker {time.monotonic() - begun:.1f} s later")
        assert not set(pids) & set(processes_of(home)), "its worker is still there"
        scene.trains_on()
    (work / "over").touch()
    assert scene.command.wait(120) == 0, scene.command.said
    noted = scene.command.run.component_log("owner").read_text()
    for n in (1, 2):
        assert re.search(rf"rollout-0 died and is started again \({n} of \d+\): {ENGINE_DIED}", noted), noted
    check_finished(home, scene.command, steps)


def test_a_rank_that_leaves_the_collective_is_named(home: Home, work: Path) -> None:
    """Once the ranks start again, and the second time the budget is spent."""
    scene = under_way(home, work, "ranks", "total_steps=400", "learner.ranks=2", "deadlines.collective_s=5",
                      "failure.learner_restarts=1", "data.validation=null")
    who = scene.stop_twice("learner", 1)
    begun = time.monotonic()
    scene.command.wait(12 + MARGIN_S)
    print(f"a rank that leaves: {time.monotonic() - begun:.1f} s; {cause(scene.command)}")
    says = r"FailureBudgetSpent: the learner died 2 times in this attempt \(failure\.learner_restarts = 1\); the " \
           r"last: WHO left the collective of `train` and says nothing; rank 0: a collective ended without one of the"
    check_failed(home, scene.command, says.replace("WHO", who), 1)
    assert audit(scene.command.run, n_prompts=prompt_rows(scene.command.run)).violations == []


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system takes root")
def test_a_full_disk_ends_the_run_and_with_room_the_same_command_goes_on(home: Home, work: Path) -> None:
    steps = 60
    with faults.small_file_system(home.run("full").root, 160):
        scene = under_way(home, work, "full", f"total_steps={steps}")
        filler = faults.fill(scene.command.run.root)
        begun = time.monotonic()
        scene.command.wait(40 + MARGIN_S)
        print(f"a full disk: {time.monotonic() - begun:.1f} s; {cause(scene.command)}")
        check_failed(home, scene.command, r"(OSError: \[Errno 28\] No space left on device"
                                          r"|DiskQuotaTooSmall: .* bytes of the file system are free)", 1)
        filler.unlink()
        (work / "over").touch()
        command = home.train("full", *SETTINGS, f"total_steps={steps}", cwd=work)
        assert command.wait(200) == 0, command.said
        check_finished(home, command, steps)


def test_mlflow_that_accepts_and_never_answers_holds_nothing_up(home: Home, work: Path) -> None:
    """The run completes, says what MLflow misses within the deadline of its last words, and sends it later."""
    steps = 20
    (work / "over").touch()
    with faults.silent_server() as address:
        command = home.train("silent", *SETTINGS, f"total_steps={steps}", f"tracking.uri={address}", cwd=work)
        command.wait_for_step(steps - 1)
        begun = time.monotonic()
        assert command.wait(35 + MARGIN_S) == 0, command.said
    print(f"MLflow that never answers: {time.monotonic() - begun:.1f} s behind the last step")
    assert (command.json["status"], command.err) == ("completed", "")
    told = re.search(r"^ +(.*); the same command with --run-key silent replays", command.out, re.MULTILINE)
    assert told is not None and f"MLflow at {address}" in told[1], command.out
    assert wait_until_gone(home, 10) == {}
    again = home.train("silent", *SETTINGS, f"total_steps={steps}", "tracking.uri=null", cwd=work)
    assert again.wait(120) == 0, again.said
    check_finished(home, again, steps)


def test_prefect_that_accepts_and_never_answers_holds_nothing_up(home: Home, work: Path) -> None:
    """The run completes and says that Prefect could not be told: 10 s for its artifacts, three tries of 10 s for the
    state, 10 s for the last logs."""
    steps = 40
    scene = under_way(home, work, "unanswered", f"total_steps={steps}")
    pid = pid_of(home, scene.command, "prefect")
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    (work / "over").touch()
    scene.command.wait_for_step(steps - 1, 60)
    begun = time.monotonic()
    assert scene.command.wait(60 + MARGIN_S) == 0, scene.command.said
    print(f"Prefect that never answers: {time.monotonic() - begun:.1f} s behind the last step")
    assert (scene.command.json["status"], scene.command.err) == ("completed", "")
    assert "Prefect could not be told that the run completed: ReadTimeout" in scene.command.out
    assert wait_until_gone(home, 10) == {}


def test_a_prefect_server_that_dies_while_a_start_asks_it_ends_nothing(
        home: Home, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The start after a kill -9 asks for the flow run before it; what it cannot do, the start after it does."""
    steps, run = 60, home.run("unheard")
    first = under_way(home, work, "unheard", f"total_steps={steps}").command
    os.kill(first.process.pid, signal.SIGKILL)
    first.process.wait()
    code = faults.PREFECT_DIES.format(state=str(run.services / "services.json"))
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", faults.python_path(work / "other-site", "tasks.attempts", code))
        second = under_way(home, work, "unheard", f"total_steps={steps}")
    assert home.states("unheard")[0] == ["RUNNING", "RUNNING"]
    os.kill(second.command.process.pid, signal.SIGKILL)
    second.command.process.wait()
    (work / "over").touch()
    third = home.train("unheard", *SETTINGS, f"total_steps={steps}", cwd=work)
    assert third.wait(200) == 0, third.said
    assert home.states("unheard")[0] == ["CRASHED", "CRASHED", "COMPLETED"]
    check_finished(home, third, steps)


def test_a_prefect_server_that_is_gone_before_the_run_begins_is_named(
        home: Home, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, run = 12, home.run("unbegun")
    (work / "over").touch()
    code = faults.PREFECT_IS_GONE.format(state=str(run.services / "services.json"))
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", faults.python_path(work / "third-site", "flows.train", code))
        first = home.train("unbegun", *SETTINGS, f"total_steps={steps}", cwd=work)
    assert first.wait(60) == 1, first.said
    assert re.fullmatch(r"DeadPart: Prefect at http://127\.0\.0\.1:\d+/api \(private, for this run alone\) did not "
                        r"answer when the run was to begin \(.+\); the same command starts one anew and goes on",
                        cause(first)), first.out
    assert (first.err, first.json["status"], newest_attempt(run)) == ("", "failed", 0)
    assert wait_until_gone(home, 10) == {}
    second = home.train("unbegun", *SETTINGS, f"total_steps={steps}", cwd=work)
    assert second.wait(120) == 0, second.said
    check_finished(home, second, steps)
