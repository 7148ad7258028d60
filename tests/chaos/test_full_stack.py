"""The full-stack tier: every process of a real run is killed at every moment of it; the same command finishes the run.

The pump is a thread of the owner, and the engine lives in the rollout worker's process: they die with them. The owner
writes MLflow's database itself, but in one run, which tracks to a server: this is killed there. `make chaos` runs this;
it takes about half an hour on two cores.
"""

from __future__ import annotations

import json
import random
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rl_core.metrics import tracked_names
from rl_core.records import recorded_steps
from rl_core.run_dir import newest_attempt
from tests.chaos.mlflow_server import MlflowServer, mlflow_server
from tests.chaos.stack import MOMENTS, PATIENCE_S, Run, check_finished, kill_at, pid_of
from tests.kept import wait_until
from tests.runs import Home

VICTIMS = ("owner", "learner", "rollout", "validation", "prefect")
TRACKED = tracked_names("learner")[0]
PER_KILL, LAST = 25, 20
"""Steps of a run: so many for each of its kills, and so many behind the last one."""
REWARD = """
import os
import time


def score(answer, ground_truth):
    if not os.path.exists({over!r}):
        time.sleep(0.02)
    while os.path.exists({hold!r}):
        time.sleep(0.02)
    return float(answer == ground_truth)
"""
"""Slow until the kills are over, so that the steps last; scores nothing while it is held, so that the learner has
nothing to train on."""
APART = 3
"""Steps recorded between two kills, so that each meets a run that goes on."""
SETTINGS = (
    "reward=./reward.py:score", "groups_per_step=4", "group_size=4", "validation.every=4",
    "validation.slots=16", "checkpoint.every=5", "data.size=4096", "model.warmup_steps=0",
    "learner.loss.entropy_coef=0.05", "learner.decay=constant",
    "failure.worker_restarts=100", "failure.learner_restarts=100", "failure.validation_restarts=100",
    "failure.max_leases=50",
    f"deadlines.reward_s={4 * PATIENCE_S}")
"""A model without warm-up, which no reward moves: its entropy does. A reward may be held for as long as a moment
is waited for."""
RUNS = 6
IDLE = "idle"
"""The moment that is forced, by holding the reward, and the run whose kills are all of them in it."""
UNVALIDATED = "validation.every=1000"
"""In that run: a validation is scored, too; while the reward is held the flow would wait for it, not for a claim."""
Cell = tuple[str, str]
"""(victim, moment)."""
SERVED = (IDLE, "step", "swap", "publish", "checkpoint", "tracking")
"""Moments at which an MLflow server is killed, in this order; of a start it learns nothing."""
SERVED_EVERY = "validation.every=30"
"""More steps than there are before the kill while idle, which a validation would hold up."""
CATCH_UP_S = 60.0
"""From the moment in which MLflow answers again until all points are there: the tracker looks in ever longer steps."""
CELLS = tuple((victim, moment) for victim in VICTIMS for moment in MOMENTS)
TWICE = 2

EXPECTED = {
    "owner": "services and actors live on; the same command adopts them and goes on with the claimed step",
    "learner": "the owner starts it again: newest checkpoint, replay, the same claim; while it is being adopted the "
               "command may end with LearnerDead, and the same command goes on",
    "rollout": "the pump starts it again, its groups in flight are leased again",
    "validation": "the owner starts it again, the validation is made again",
    "prefect": "the run goes on, and the next start has a server again; a start may fail, and the same command goes on",
    "mlflow": "the run goes on, and sends what was recorded meanwhile when the server is back",
}


@dataclass
class Table:
    """How often each cell was killed, hit at its moment, and survived by the command itself."""

    killed: Counter[Cell] = field(default_factory=Counter[Cell])
    hit: Counter[Cell] = field(default_factory=Counter[Cell])
    survived: Counter[Cell] = field(default_factory=Counter[Cell])
    seconds: float = 0.0

    def text(self) -> str:
        lines = [f"{'victim':<12}{'moment':<12}{'kills':>6}{'at it':>6}{'went on by itself':>19}"]
        for (victim, moment), kills in sorted(self.killed.items()):
            cell = victim, moment
            lines.append(f"{victim:<12}{moment:<12}{kills:>6}{self.hit[cell]:>6}{self.survived[cell]:>19}")
        lines.append(f"{self.killed.total()} kills, {self.hit.total()} at their moment, {self.seconds:.0f} s")
        return "\n".join([*lines, *(f"{victim}: {expected}" for victim, expected in EXPECTED.items())])


def plans() -> list[list[Cell]]:
    """Every cell twice: over RUNS runs, and those of idle in one behind them. Behind each kill of an owner the next
    start is killed into; the last kills of a run are such a pair that leaves Prefect alive, to be told how the run
    ended. In the run of idle the owner is killed behind Prefect, which is back with the next start."""
    rng = random.Random(4)
    cells = [cell for cell in CELLS if cell[1] != IDLE] * TWICE
    owners = [cell for cell in cells if cell[0] == "owner" and cell[1] != "start"]
    starts = [cell for cell in cells if cell[1] == "start"]
    others = [cell for cell in cells if cell[0] != "owner" and cell[1] != "start"]
    for some in (owners, starts, others):
        rng.shuffle(some)
    starts.sort(key=lambda cell: cell[0] != "prefect")
    pairs = list(zip(owners, starts, strict=True))
    made: list[list[Cell]] = []
    for i in range(RUNS):
        *first, last = pairs[i::RUNS]
        made.append([*(cell for pair in first for cell in pair), *others[i::RUNS], *last])
    return [*made, [(victim, IDLE) for victim in (*VICTIMS[1:], "owner")] * TWICE]


def put_reward(work: Path) -> None:
    """The run's `reward.py`; it is slow until there is a file `over`, and scores nothing while there is one `hold`."""
    (work / "reward.py").write_text(REWARD.format(over=str(work / "over"), hold=str(work / "hold")))


@pytest.fixture(scope="module")
def table() -> Iterator[Table]:
    made, begun = Table(), time.monotonic()
    yield made
    made.seconds = time.monotonic() - begun
    print(f"\n{made.text()}")


@dataclass
class Chaos:
    """One run under kills: the command that is under way, and what it was."""

    home: Home
    key: str
    steps: int
    work: Path
    table: Table
    settings: tuple[str, ...]

    def start(self) -> None:
        attempt = newest_attempt(self.home.run(self.key))
        self.command = self.home.train(self.key, *self.settings, f"total_steps={self.steps}", cwd=self.work)
        self.at = Run(self.home, self.command.run, attempt)

    def kill(self, victim: str, moment: str) -> None:
        """Kill the victim at the moment; the same command follows where the run did not go on by itself."""
        command, run = self.command, self.command.run
        if moment != "start":
            command.wait_for_step(len(recorded_steps(run)) + APART)
        before = pid_of(self.home, command, victim)
        with self.held() if moment == IDLE else nullcontext():
            hit = kill_at(self.at, command, victim, moment)
        assert hit is not None, f"ended before {victim} could be killed in {moment}: {command.process.communicate()}"
        assert hit or moment != IDLE, f"{victim} was killed, and the learner did not wait for a claim"
        self.table.killed[victim, moment] += 1
        self.table.hit[victim, moment] += hit
        print(f"{self.key}: {victim} in {moment}, {'hit' if hit else 'not at it'}, step {len(recorded_steps(run))}",
              flush=True)
        if victim != "owner" and self.goes_on(victim, before):
            self.table.survived[victim, moment] += 1
            return
        code = command.wait(30)
        assert victim == "owner" or moment == "start", (victim, moment, command.out, command.err)
        assert code == (-9 if victim == "owner" else 1), (victim, moment, code, command.out, command.err)
        self.start()

    @contextmanager
    def held(self) -> Iterator[None]:
        """No answer is scored, so that nothing lands: once it has trained what waits, the learner is idle."""
        hold = self.work / "hold"
        hold.touch()
        try:
            yield
        finally:
            hold.unlink()

    def goes_on(self, victim: str, before: int | None) -> bool:
        """Whether the run records further steps, and the victim has a successor; False if the command ends."""
        command, until = self.command, time.monotonic() + 120
        first = len(recorded_steps(command.run))
        while command.process.poll() is None:
            ahead = len(recorded_steps(command.run)) >= first + APART
            later = victim in ("prefect", "validation", "mlflow")  # with the next start, the next validation, the test
            if ahead and (later or pid_of(self.home, command, victim) not in (None, before)):
                return True
            assert time.monotonic() < until, f"no step within 120 s after {victim} was killed"
            time.sleep(0.05)
        return False


@dataclass
class Served(Chaos):
    """A run that tracks to a server: how far that is."""

    server: MlflowServer

    def sent(self) -> int:
        """Steps that MLflow has: it gets them in their order."""
        run_id = json.loads(self.command.run.mlflow_run.read_text())["run_id"]
        with closing(sqlite3.connect(self.home.path / "mlflow" / "mlflow.db")) as database:
            [(last,)] = database.execute("select max(step) from metrics where key = ? and run_uuid = ?",
                                         (TRACKED, run_id))
        return 0 if last is None else last + 1

    def come_back(self) -> None:
        """The server answers again, and gets what was recorded without it; nothing else is scored meanwhile."""
        with self.held():
            recorded, begun = len(recorded_steps(self.command.run)), time.monotonic()
            assert recorded - self.sent() >= APART, (recorded, self.sent())
            self.server.start()
            up = time.monotonic()
            wait_until(lambda: self.sent() >= recorded, CATCH_UP_S, f"MLflow has the {recorded} steps recorded so far")
            print(f"served: up in {up - begun:.1f} s, all {recorded} steps {time.monotonic() - up:.1f} s later")


def test_every_victim_is_killed_twice_at_every_moment_and_prefect_is_there_at_each_end() -> None:
    made = plans()
    assert Counter(cell for plan in made for cell in plan) == Counter(CELLS * TWICE)
    assert len(CELLS) * TWICE == 70 and len(made) == RUNS + 1
    for plan in made:
        for before, (victim, moment) in zip([("", ""), *plan], plan, strict=False):
            assert moment != "start" or before[0] == "owner", f"nobody starts before {victim} is killed in it"
        ends = [victim for victim, _ in plan]
        assert "prefect" not in ends[len(ends) - 1 - ends[::-1].index("owner"):], "told nobody how it ended"


@pytest.mark.slow
@pytest.mark.parametrize("plan", plans(), ids=[*range(RUNS), IDLE])
def test_wherever_a_process_is_killed_the_same_command_finishes_the_run(
        home: Home, table: Table, plan: list[Cell], request: pytest.FixtureRequest, tmp_path: Path) -> None:
    put_reward(tmp_path)
    name = request.node.callspec.id
    settings = (*SETTINGS, "data.validation_size=64", *([UNVALIDATED] if name == IDLE else []))
    chaos = Chaos(home, f"chaos-{name}", PER_KILL * len(plan) + LAST, tmp_path, table, settings)
    chaos.start()
    try:
        for victim, moment in plan:
            if pid_of(home, chaos.command, victim) is None and victim == "prefect" and moment != "start":
                chaos.kill("owner", "step")  # a server that was killed comes back with the next start
            chaos.kill(victim, moment)
        (tmp_path / "over").touch()
        assert chaos.command.wait(400) == 0, chaos.command.said
        check_finished(home, chaos.command, chaos.steps)
    finally:
        chaos.command.process.kill()  # nothing where it has ended


@pytest.mark.slow
def test_wherever_its_mlflow_server_is_killed_the_run_goes_on_and_no_step_is_missing_or_doubled(
        home: Home, table: Table, tmp_path: Path) -> None:
    """Steps are recorded while the server is down, each time; the last time the owner is killed as well, and the next
    start begins without it."""
    put_reward(tmp_path)
    steps = PER_KILL * len(SERVED) + LAST
    with mlflow_server(home) as server:
        settings = (*SETTINGS, "data.validation_size=64", SERVED_EVERY, f"tracking.uri={server.address}")
        served = Served(home, "served", steps, tmp_path, table, settings, server)
        served.start()
        try:
            server.wait()
            for moment in SERVED:
                wait_until(served.command.run.mlflow_run.exists, 60, "MLflow knows the run")
                served.kill("mlflow", moment)
                assert served.table.hit["mlflow", moment], f"not killed in {moment}"
                if moment == SERVED[-1]:
                    served.kill("owner", "step")
                    served.command.wait_for_step(len(recorded_steps(served.command.run)) + APART)
                served.come_back()
            (tmp_path / "over").touch()
            assert served.command.wait(200) == 0, served.command.said
        finally:
            served.command.process.kill()
    noted = served.command.run.component_log("owner").read_text()
    assert "training goes on, the records are replayed when it is back" in noted and "is back and up to date" in noted
    check_finished(home, served.command, steps)


@pytest.mark.slow
def test_every_cell_was_hit(table: Table) -> None:
    """After the runs: sixty kills at their moment, every victim twice at every moment, an MLflow server once."""
    assert table.hit.total() >= 60
    least = dict.fromkeys(CELLS, TWICE) | {("mlflow", moment): 1 for moment in SERVED}
    missed = {cell: table.hit[cell] for cell, times in least.items() if table.hit[cell] < times}
    assert not missed, f"at their moment too seldom: {missed}"
