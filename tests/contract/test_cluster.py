"""Actors on a real Ray head: named, fenced, adopted, watched, and calls with deadlines."""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_core.config import DeadlineConfig
from rl_core.errors import CollectiveFailed, DeadlinePassed, DeadPart, LearnerDead, StaleAttempt, WorkerDead
from rl_core.types import Lease, Prompt, Sampling, WeightVersion
from tasks import cluster, keeper, services
from tasks.cluster import ActorSpec, Handle

ROLES = Path(__file__).parent
LOOPS = 300


@pytest.fixture(scope="module")
def connected(tmp_path_factory: pytest.TempPathFactory) -> Iterator[services.Services]:
    """A Ray head of our own, and no Prefect server: its address is given and never asked."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROLES))
        patch.setenv("HEADWAY_ALLOWED_IMPORTS", "my_rewards")
        patch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
        where = services.start(home / "services", home, isolated=False, deadlines=DeadlineConfig())
        try:
            handler = signal.signal(signal.SIGTERM, on_sigterm)
            cluster.connect(where, owner_timeout_s=60.0)
            assert signal.getsignal(signal.SIGTERM) is on_sigterm, "ray.init replaced the SIGTERM handler"
            signal.signal(signal.SIGTERM, handler)
            yield where
        finally:
            cluster.disconnect()
            services.stop(where)


def on_sigterm(signum: int, frame: Any) -> None:
    raise AssertionError("no SIGTERM is sent here")


def spec(role: str = "rollout", rank: int = 0, *, attempt: int = 1, owner_timeout_s: float = 60.0,
         **kwargs: Any) -> ActorSpec:
    return ActorSpec(run_uuid="run", role=role, rank=rank, attempt=attempt, factory="actor_roles:Counter",
                     kwargs=kwargs, owner_timeout_s=owner_timeout_s, start_s=60.0)


@pytest.fixture
def counter(connected: services.Services) -> Iterator[Handle]:
    handle = cluster.start_or_adopt(spec("worker", start=5, child=True))
    yield handle
    handle.kill()


def gone(handle: Handle, within_s: float) -> bool:
    until = time.monotonic() + within_s
    while keeper.is_alive(handle.identity.pid, handle.identity.started):
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def test_a_call_costs_little(counter: Handle) -> None:
    seconds: list[float] = []
    for i in range(LOOPS):
        begun = time.perf_counter()
        assert counter.call("add", 1, deadline_s=10) == 6 + i
        seconds.append(time.perf_counter() - begun)
    assert statistics.median(seconds) < 0.005


def test_an_actor_works_where_its_owner_works(connected: services.Services, tmp_path: Path) -> None:
    log = tmp_path / "logs" / "rollout-1.log"
    handle = cluster.start_or_adopt(replace(spec(rank=1), threads=3, log=log))
    try:
        assert handle.call("surroundings", deadline_s=10) == (os.getcwd(), "3", "my_rewards")
        assert log.read_text() == "counter from 0\n"
        assert os.getsid(handle.identity.pid) == connected.pids["ray"].pid
        with pytest.raises(DeadlinePassed) as silent:
            handle.call("sleep", 2.0, deadline_s=0.6)
        with pytest.raises(WorkerDead) as death:
            handle.call("die", deadline_s=10)
        assert silent.value.log == death.value.log == log
    finally:
        handle.kill()


def test_exceptions_of_a_role_arrive_as_themselves(counter: Handle) -> None:
    with pytest.raises(KeyError, match="lost") as caught:
        counter.call("fail", "lost", deadline_s=10)
    assert type(caught.value) is KeyError
    assert caught.value.__notes__[0].startswith(f"raised in worker/0 (pid {counter.identity.pid}) by `fail`:")
    with pytest.raises(ValueError, match="no such model") as refused:
        cluster.start_or_adopt(spec(rank=2, fail="no such model"))
    assert type(refused.value) is ValueError
    assert cluster._named(spec(rank=2)) is None


def test_a_call_has_a_deadline(counter: Handle) -> None:
    begun, told = time.monotonic(), rf"worker/0 \(pid {counter.identity.pid}\): `sleep` gave no answer in 0.7 s"
    with pytest.raises(DeadlinePassed, match=told):
        counter.call("sleep", 2.0, deadline_s=0.7)
    assert 0.6 < time.monotonic() - begun < 1.5
    assert counter.call("add", 0, deadline_s=10) == 5, "other calls go on"


@pytest.mark.parametrize(("role", "error"),
                         [("rollout", WorkerDead), ("learner", LearnerDead), ("validation", DeadPart)])
def test_a_death_is_an_error_that_names_who_and_what(
        connected: services.Services, role: str, error: type[DeadPart], capfd: pytest.CaptureFixture[str]) -> None:
    handle = cluster.start_or_adopt(spec(role, 3, child=True))
    child = handle.call("child_pid", deadline_s=10)
    started = keeper.start_time(child)
    assert started is not None
    begun = time.monotonic()
    with pytest.raises(error, match=rf"{role}/3 \(pid {handle.identity.pid}\) is dead, asked for `die`") as caught:
        handle.call("die", deadline_s=30)
    assert type(caught.value) is error
    with pytest.raises(error, match="asked for `add`"):
        handle.call("add", 1, deadline_s=30)
    assert time.monotonic() - begun < 5.0
    handle.kill()
    assert not keeper.is_alive(child, started), "what a dead actor left behind is ended with it"
    assert capfd.readouterr() == ("", "")


def test_kill_ends_the_actor_and_its_children_and_frees_the_name(counter: Handle) -> None:
    child = counter.call("child_pid", deadline_s=10)
    started = keeper.start_time(child)
    assert started is not None
    begun = time.monotonic()
    counter.kill()
    assert time.monotonic() - begun < 3.0
    assert gone(counter, 0.0) and not keeper.is_alive(child, started)
    counter.kill()
    again = cluster.start_or_adopt(spec("worker", start=5, child=True))
    assert not again.adopted and again.call("add", 0, deadline_s=10) == 5
    again.kill()


def test_a_newer_attempt_adopts_and_fences_the_one_before(counter: Handle) -> None:
    counter.call("add", 2, deadline_s=10)
    newer = cluster.start_or_adopt(spec("worker", attempt=2, start=5, child=True))
    assert newer.adopted and newer.identity.pid == counter.identity.pid
    assert newer.call("add", 0, deadline_s=10) == 7, "the state is what the attempt before left"
    with pytest.raises(StaleAttempt, match="worker/0: attempt 1 is over, attempt 2 owns the run"):
        counter.call("add", 1, deadline_s=10)
    with pytest.raises(StaleAttempt):
        cluster.start_or_adopt(spec("worker", attempt=1, start=5, child=True))
    assert newer.call("calling_attempt", "x", deadline_s=10) == ("x", 2), "a parameter `attempt` is filled in"
    assert newer.call("calling_attempt", "x", 7, deadline_s=10) == ("x", 7)


def test_other_settings_are_not_adopted(counter: Handle) -> None:
    other = cluster.start_or_adopt(spec("worker", attempt=2, start=6))
    assert not other.adopted and gone(counter, 1.0)
    assert other.call("add", 0, deadline_s=10) == 6
    other.kill()


def test_what_cannot_be_placed_is_told_with_what_is_there(connected: services.Services) -> None:
    with pytest.raises(DeadlinePassed, match=r"rollout/4 did not start in 2 s .* asks for 8 GPUs, the cluster has"):
        cluster.start_or_adopt(replace(spec(rank=4), gpus=8.0, start_s=2.0))
    assert cluster._named(spec(rank=4)) is None


def test_a_busy_actor_still_hears_its_owner_and_a_silent_owner_ends_it(connected: services.Services) -> None:
    handle = cluster.start_or_adopt(replace(spec(rank=5, owner_timeout_s=3.0, child=True), concurrency=1))
    child = handle.call("child_pid", deadline_s=10)
    started = keeper.start_time(child)
    assert started is not None
    try:
        assert handle.call("sleep", 5.0, deadline_s=20) == 5.0
        assert keeper.is_alive(handle.identity.pid, handle.identity.started)
        cluster._forget(handle)  # the owner's heartbeat goes past this actor
        assert gone(handle, 3.0 + 3.0)
        assert not keeper.is_alive(child, started)
    finally:
        handle.kill()


def test_actors_that_a_later_start_has_no_use_for_are_ended(connected: services.Services) -> None:
    kept, spare = cluster.start_all([spec("rollout", 10), spec("rollout", 11)])
    other = cluster.start_or_adopt(replace(spec("rollout", 11), run_uuid="run2"))
    try:
        listed = [(actor["actor"], actor["pid"]) for actor in cluster.actors()]
        assert {("rollout/10", kept.identity.pid), ("rollout/11", spare.identity.pid)} <= set(listed)
        assert cluster.end_unwanted("run", {"run/rollout/10"}) == ["run/rollout/11"]
        assert gone(spare, 0.0) and not gone(kept, 0.0) and not gone(other, 0.0)
        assert cluster.end_unwanted("run", {"run/rollout/10"}) == []
    finally:
        kept.kill()
        other.kill()


def test_a_pool_starts_together_restarts_one_and_ends_all(connected: services.Services) -> None:
    pool = cluster.RemotePool([spec(rank=10 + i) for i in range(3)], call_s=10.0, swap_s=10.0)
    links = pool.links()
    try:
        assert [link.name for link in links] == ["rollout-10", "rollout-11", "rollout-12"]
        assert [link.handle.identity.pid for link in pool.links()] == [link.handle.identity.pid for link in links]
        prompt = Prompt(dataset_epoch=0, position=0, prompt_idx=0, answer="", data_source="sort",
                        token_ids_P=np.arange(4, dtype=np.int32))
        lease = Lease(prompt=prompt, try_no=0, lease_no=0, idx_dispatch=0, n_expected=8, min_group=4,
                      sampling=Sampling(), attempt=1)
        links[0].lease([lease, lease])
        assert links[0].events(0.0) == 2
        assert links[0].cancel(["e0-p0-t0"]) == {"e0-p0-t0": "unknown"}
        assert links[0].swap(WeightVersion(v=1, step=1, idx=1, attempt=1, digest="d")) == "digest"
        links[0].kill()
        with pytest.raises(WorkerDead):
            links[0].events(0.0)
        fresh = pool.restart("rollout-10")
        assert fresh.events(0.0) == 0
    finally:
        pool.kill()
    assert all(gone(link.handle, 0.0) for link in [*links, fresh])


OWNER = textwrap.dedent("""
    import json, os, signal, sys
    from pathlib import Path
    sys.path.insert(0, {roles!r})
    os.environ["PREFECT_API_URL"] = "http://127.0.0.1:9/api"
    from rl_core.config import DeadlineConfig
    from tasks import services
    where = services.start(Path({state!r}), Path({home!r}), isolated=False,
                           deadlines=DeadlineConfig(owner_timeout_s={timeout}))
    from tasks import cluster
    cluster.connect(where, owner_timeout_s={timeout})
    spec = cluster.ActorSpec(run_uuid="run", role="rollout", rank=0, attempt={attempt}, owner_timeout_s={timeout},
                             factory="actor_roles:Counter", kwargs=dict(start=1, child=True))
    handle = cluster.start_or_adopt(spec)
    def tell(**facts):
        print(json.dumps(facts), flush=True)
""")


def owner(tmp_path: Path, attempt: int, body: str, timeout: float = 6.0) -> subprocess.CompletedProcess[str]:
    script = OWNER.format(roles=str(ROLES), state=str(tmp_path / "services"), home=str(tmp_path), attempt=attempt,
                          timeout=timeout)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", services.PRIVATE))}
    return subprocess.run([sys.executable, "-c", script + textwrap.dedent(body)], env=env, capture_output=True,
                          text=True, timeout=120)


def test_a_killed_owner_is_followed_by_one_that_adopts_and_then_by_silence(tmp_path: Path) -> None:
    first = owner(tmp_path, 1, """
        handle.call("add", 41, deadline_s=10)
        tell(pid=handle.identity.pid, ray=where.pids["ray"])
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    assert (first.returncode, first.stderr) == (-signal.SIGKILL, "")
    second = owner(tmp_path, 2, """
        tell(pid=handle.identity.pid, ray=where.pids["ray"], adopted=[where.adopted, handle.adopted],
             count=handle.call("add", 0, deadline_s=10), child=handle.call("child_pid", deadline_s=10))
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    assert (second.returncode, second.stderr) == (-signal.SIGKILL, "")
    was, now = json.loads(first.stdout), json.loads(second.stdout)
    assert now["adopted"] == [True, True] and now["count"] == 42
    assert (now["pid"], now["ray"]) == (was["pid"], was["ray"])
    killed = time.monotonic()
    while keeper.read_state(tmp_path / "services") is not None:
        assert time.monotonic() - killed < 6 + keeper.GRACE_S + 4
        time.sleep(0.1)
    assert keeper.session_members(*now["ray"]) == [] and keeper.start_time(now["child"]) is None


def test_a_lost_head_is_told_at_once_and_the_owner_lives(tmp_path: Path) -> None:
    done = owner(tmp_path, 1, """
        import time
        from rl_core.errors import DeadPart
        pending = handle.call_async("sleep", 100.0)
        os.kill(where.pids["ray"].pid, signal.SIGKILL)
        begun = time.monotonic()
        for ask in (lambda: pending.result(60), lambda: handle.call("add", 1, deadline_s=60),
                    lambda: cluster.start_or_adopt(spec)):
            try:
                ask()
            except DeadPart as error:
                tell(error=type(error).__name__, text=str(error), s=time.monotonic() - begun)
        handle.kill()
        cluster.disconnect()
        services.stop(where)
        tell(left=[p for p, _ in __import__("tasks.keeper").keeper.session_members(*where.pids["ray"])])
    """)
    assert done.returncode == 0, done.stderr
    asked, called, started, end = map(json.loads, done.stdout.splitlines())
    assert asked["error"] == called["error"] == "WorkerDead" and "ray of this run died" in asked["text"]
    assert started["text"].startswith("rollout/0 cannot be started: ray of this run died")
    assert started["s"] < 5.0
    assert end["left"] == []


def test_a_pool_is_ended_while_a_start_waits_for_a_dead_head(tmp_path: Path) -> None:
    """Ray waits for a head that is gone for as long as it takes: whoever ends the run does not."""
    done = owner(tmp_path, 1, """
        import threading, time
        from dataclasses import replace
        from tasks import keeper
        pool = cluster.RemotePool([replace(spec, rank=1)], call_s=10.0, swap_s=10.0)
        pool.links()
        head = [pid for pid, _ in keeper.session_members(*where.pids["ray"])]
        for pid in head:
            if "gcs_server" in Path(f"/proc/{pid}/cmdline").read_text():
                os.kill(pid, signal.SIGKILL)
        starting = threading.Thread(target=pool.restart, args=("rollout-1",), daemon=True)
        starting.start()
        starting.join(3.0)
        begun, waits = time.monotonic(), starting.is_alive()
        pool.kill()
        tell(waits=waits, s=time.monotonic() - begun)
        services.stop(where)
        os._exit(0)  # as no run does: Ray's own goodbye is not what this is about
    """)
    assert done.returncode == 0, done.stderr
    [told] = map(json.loads, done.stdout.splitlines())
    assert told["waits"] and told["s"] < 5.0, told


def test_of_calls_sent_together_the_first_to_fail_raises_whichever_it_is(connected: services.Services) -> None:
    one, two = cluster.start_all([spec("worker", 7), spec("learner", 7)])
    try:
        sent = [one.call_async("add", 1), two.call_async("add", 2)]
        assert cluster.gather(sent, 10) == [1, 2]
        begun = time.monotonic()
        with pytest.raises(KeyError, match="lost"):
            cluster.gather([one.call_async("sleep", 30.0), two.call_async("fail", "lost")], 60)
        assert time.monotonic() - begun < 5, "not when the first has answered"
        with pytest.raises(DeadlinePassed, match=r"`sleep` gave no answer in 0.6 s"):
            cluster.gather([two.call_async("sleep", 2.0)], 0.6)
        with pytest.raises(RuntimeError, match="the pump"):
            cluster.gather([two.call_async("sleep", 2.0)], 60, raise_pump)
        with pytest.raises(LearnerDead, match=r"learner/7"):  # what the peer says of it is no cause
            cluster.gather([one.call_async("fail", "peer"), two.call_async("die")], 60)
    finally:
        one.kill()
        two.kill()


def test_an_actor_that_is_stopped_is_named_at_the_deadline_and_can_be_ended(counter: Handle) -> None:
    """SIGSTOP: the process is there, and answers nobody."""
    os.kill(counter.identity.pid, signal.SIGSTOP)
    begun = time.monotonic()
    told = rf"worker/0 \(pid {counter.identity.pid}\): `add` gave no answer in 0.8 s"
    with pytest.raises(DeadlinePassed, match=told):
        counter.call("add", 1, deadline_s=0.8)
    assert time.monotonic() - begun < 2
    counter.kill()
    assert gone(counter, 0.0) and time.monotonic() - begun < 8


def test_a_rank_that_leaves_a_collective_is_named(connected: services.Services) -> None:
    one, two = cluster.start_all([spec("learner", 8), spec("learner", 9)])
    try:
        os.kill(two.identity.pid, signal.SIGSTOP)
        who = f"learner/9 (pid {two.identity.pid})"
        stopped = re.escape(f"{who} left the collective of `sleep` and says nothing; rank 0")
        with pytest.raises(LearnerDead, match=stopped) as caught:
            cluster.gather([one.call_async("lose_peer", 0.2), two.call_async("sleep", 0.0)], 60)
        assert type(caught.value) is CollectiveFailed, "the learner group starts again"
        os.kill(two.identity.pid, signal.SIGCONT)
        with pytest.raises(LearnerDead, match=r"learner/9 .* is dead, asked for `die`"):
            cluster.gather([one.call_async("lose_peer", 0.0), two.call_async("die")], 60)
    finally:
        one.kill()
        two.kill()


def raise_pump() -> None:
    raise RuntimeError("the pump")
