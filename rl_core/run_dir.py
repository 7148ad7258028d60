"""The tree of a run directory (experience-store.md 3.1), and the one way names come into being in it.

Only this module joins the paths. A name is created by `put_if_absent` (write aside, fsync, link, fsync of the
directory): on every POSIX file system that passes `self_test`, exactly one of several writers wins and its bytes stand.
`rename` is last-writer-wins and an O_EXCL write under the final name is torn by a kill: neither is ever used for a name
that others decide by.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import re
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from rl_core.errors import BrokenFile, ConfigError, FormatTooNew, NoExclusiveCreate, RunIsAlive, StaleAttempt
from rl_core.types import FORMAT

SELF_TEST_THREADS = 8
SELF_TEST_ROUNDS = 20
NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV, errno.EMLINK, errno.EINVAL}
"""What file systems without hard links say to `link`."""
LOOK_S = 0.02
_ANOTHER_HOME = "set HEADWAY_HOME to a directory on a local POSIX file system with hard links"


def fsync_dir(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def put_if_absent(path: Path, data: bytes, *, fsync: bool = True) -> bool:
    """Create `path` with exactly these bytes, or leave what is there. Returns True for the one winner.

    The bytes are complete and durable before the name exists. Parent directories are created.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(6)}.tmp")
    fd = os.open(tmp, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    try:
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view):]
            if fsync:
                os.fsync(fd)
        except OSError as error:
            error.filename = str(path)  # a full disk is told of a descriptor, people ask for a place
            raise
        finally:
            os.close(fd)
        try:
            os.link(tmp, path)
        except FileExistsError:
            return False
    finally:
        tmp.unlink(missing_ok=True)
    if fsync:
        fsync_dir(path.parent)
    return True


def link_file(source: Path, target: Path, *, or_copy: bool = False) -> None:
    """Give an immutable file a second name; parent directories are created. `or_copy`: where that cannot be (another
    file system, or one without hard links) its bytes are copied. Raises OSError, FileExistsError for a name that is
    taken."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError as error:
        if not or_copy or error.errno not in NO_LINKS:
            raise
        put_if_absent(target, source.read_bytes())


def replace_file(path: Path, data: bytes) -> None:
    """Last writer wins. Only for views that can be made again (status, service addresses), never for records."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(6)}.tmp")
    try:
        tmp.write_bytes(data)
        os.replace(tmp, path)
    finally:
        tmp.unlink(missing_ok=True)  # of a disk that is full


def to_json(payload: dict[str, Any]) -> bytes:
    """One JSON object with its format number, keys in the given order; NaN and infinities are written as null."""
    whole = {"format": FORMAT, **payload}
    try:
        text = json.dumps(whole, allow_nan=False)
    except ValueError:  # JSON has no word for them
        text = json.dumps(json_values(whole), allow_nan=False)
    return (text + "\n").encode()


def json_values(value: Any) -> Any:
    """The same values with None for every number that JSON has no word for, at any depth."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {key: json_values(part) for key, part in cast(dict[Any, Any], value).items()}
        case list() | tuple():
            return [json_values(part) for part in cast(list[Any], value)]
        case _:
            return value


def numbers(stored: Mapping[str, float | None]) -> dict[str, float]:
    """Numbers by name as they were before `to_json`: null is NaN."""
    return {name: math.nan if value is None else value for name, value in stored.items()}


def read_json(path: Path) -> dict[str, Any]:
    """Read what `to_json` wrote. Raises BrokenFile (named) or FormatTooNew; FileNotFoundError passes through."""
    raw = path.read_bytes()
    try:
        payload = json.loads(raw)
    except ValueError as error:
        raise BrokenFile(f"{path}: not JSON ({error})") from error
    if not isinstance(payload, dict) or "format" not in payload:
        raise BrokenFile(f"{path}: not a Headway file (no `format`)")
    if payload["format"] > FORMAT:
        raise FormatTooNew(f"{path}: format {payload['format']} is newer than this Headway reads ({FORMAT}); upgrade")
    return cast(dict[str, Any], payload)


def self_test(directory: Path, *, rounds: int = SELF_TEST_ROUNDS) -> None:
    """Prove that creating a name is exclusive here: 8 threads behind a barrier, one winner, its bytes stand.

    Raises NoExclusiveCreate naming the directory and what happened; ConfigError where nothing can be written at all.
    """
    base = directory / f".self-test-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        base.mkdir()
    except OSError as error:
        raise _unwritable(directory, error) from error
    barrier = threading.Barrier(SELF_TEST_THREADS)
    wins: list[list[int]] = [[] for _ in range(rounds)]
    failures: list[BaseException] = []

    def race(me: int) -> None:
        try:
            for i in range(rounds):
                barrier.wait(timeout=30)
                if put_if_absent(base / f"name-{i}", b"%d" % me * 64, fsync=False):
                    wins[i].append(me)
        except BaseException as error:
            failures.append(error)
            barrier.abort()

    threads = [threading.Thread(target=race, args=(n,), name=f"self-test-{n}") for n in range(SELF_TEST_THREADS)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        for error in sorted(failures, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            if isinstance(error, OSError) and error.errno not in NO_LINKS:
                raise _unwritable(directory, error) from error
            raise NoExclusiveCreate(f"{directory}: names cannot be created by link there "
                                    f"({error or 'no answer within 30 s'}); {_ANOTHER_HOME}") from error
        for i, winners in enumerate(wins):
            stands = (base / f"name-{i}").read_bytes()
            if len(winners) != 1 or stands != b"%d" % winners[0] * 64:
                raise NoExclusiveCreate(f"{directory}: {len(winners)} of {SELF_TEST_THREADS} writers believe that they "
                                        f"created one name: this file system has no exclusive create; {_ANOTHER_HOME}")
    finally:
        shutil.rmtree(base, ignore_errors=True)


def _unwritable(directory: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{directory}: nothing can be written there ({error.strerror}); make room or mend its "
                       "permissions, or set HEADWAY_HOME to another directory")


@dataclass(frozen=True, slots=True)
class RunDir:
    """Paths of one run. `RunDir(Path("runs/k")).claim(42)` -> `runs/k/ledger/learner/step-000000042.json`."""

    root: Path

    # -- identity
    @property
    def run_json(self) -> Path:
        return self.root / "run.json"

    @property
    def revisions(self) -> Path:
        """Amendments of the settings (rl_core/revisions.py)."""
        return self.root / "revisions"

    def settings(self, revision: int) -> Path:
        """Where the settings of a config revision stand: run.json, or the amendment."""
        return self.revisions / f"rev-{revision:06d}.json" if revision else self.run_json

    @property
    def inputs(self) -> Path:
        """Digests of model, tokenizer, chat template and data, and the number of prompts, as the first start found
        them."""
        return self.root / "inputs.json"

    @property
    def owner_lock(self) -> Path:
        return self.root / "owner.lock"

    @property
    def attempts(self) -> Path:
        return self.root / "attempts"

    def attempt(self, a: int) -> Path:
        return self.attempts / f"attempt-{a:06d}.json"

    # -- model and weights
    @property
    def model(self) -> Path:
        """The initial model: a Hugging Face directory (config, tokenizer, safetensors)."""
        return self.root / "model"

    @property
    def roles(self) -> Path:
        """Directories that models beside the policy were loaded from, by role; absent where all are the initial model.
        """
        return self.root / "roles"

    def role(self, role: str) -> Path:
        return self.roles / role

    @property
    def versions(self) -> Path:
        return self.root / "versions"

    def version(self, v: int) -> Path:
        return self.versions / f"v-{v:08d}.json"

    @property
    def weights_root(self) -> Path:
        """May be a link into shared memory."""
        return self.root / "weights"

    def weights(self, v: int) -> Path:
        return self.weights_root / f"v-{v:08d}"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    def checkpoint(self, n: int) -> Path:
        return self.checkpoints / f"n-{n:09d}"

    # -- experience
    @property
    def orders(self) -> Path:
        """Orders of the prompts by a function (rl_core/rollout/orders.py)."""
        return self.root / "orders"

    def order(self, dataset_epoch: int) -> Path:
        return self.orders / f"epoch-{dataset_epoch:06d}.json"

    @property
    def streams(self) -> Path:
        return self.root / "streams"

    def stream(self, stream: str) -> Path:
        return self.streams / stream

    def shard(self, stream: str, seq: int) -> Path:
        return self.streams / stream / f"{seq:08d}.arrow"

    def stream_tmp(self, stream: str) -> Path:
        return self.streams / stream / ".tmp"

    def shard_tmp(self, stream: str, seq: int) -> Path:
        """Where the shard is written before it has its name. The stream's incarnation (12 digits) is in the name."""
        return self.stream_tmp(stream) / f"{stream[-12:]}-{seq:08d}"

    @property
    def origin(self) -> RunDir:
        """What this run keeps of the one whose shards it trains on (offline.md 2): `run.json`, revisions, versions,
        `inputs.json`, and while they are scored anew the shards."""
        return RunDir(self.root / "origin")

    @property
    def taken(self) -> Path:
        """Which shards of another run this one trains on: decided once. Absent where it samples its own."""
        return self.origin.root / "taken.json"

    @property
    def rescored(self) -> Path:
        """Which shard has taken the place of each that was scored anew; there when all are."""
        return self.origin.root / "rescored.json"

    @property
    def quarantine(self) -> Path:
        return self.root / "quarantine"

    def quarantined(self, stream: str, seq: int) -> Path:
        return self.quarantine / f"{stream}-{seq:08d}.json"

    def foreign(self, stream: str, name: str) -> Path:
        """Report on a file among the shards that no writer of ours could have named."""
        return self.quarantine / f"{stream}-foreign-{name}.json"

    @property
    def outcomes(self) -> Path:
        return self.root / "outcomes"

    def outcome(self, group_id: str) -> Path:
        return self.outcomes / f"{group_id}.json"

    @property
    def lost(self) -> Path:
        return self.root / "lost"

    def lost_leases(self, attempt: int, i: int) -> Path:
        """Groups that a worker had in flight when it died, the i-th time in this attempt."""
        return self.lost / f"attempt-{attempt:06d}-{i:06d}.json"

    # -- ledger
    def ledger(self, consumer: str = "learner") -> Path:
        return self.root / "ledger" / consumer

    def claim(self, step: int, consumer: str = "learner") -> Path:
        return self.ledger(consumer) / f"step-{step:09d}.json"

    def void(self, step: int, consumer: str = "learner") -> Path:
        return self.ledger(consumer) / f"step-{step:09d}.void.json"

    def drops(self, step: int, i: int, consumer: str = "learner") -> Path:
        return self.ledger(consumer) / f"drops-{step:09d}-{i:06d}.json"

    def end(self, revision: int, consumer: str = "learner") -> Path:
        return self.ledger(consumer) / f"end-{revision:06d}.json"

    def snapshot(self, step: int, consumer: str = "learner") -> Path:
        """What the index needs of all claims below `step`; can be made again from them."""
        return self.ledger(consumer) / f"snap-{step:09d}.arrow"

    def retired(self, step: int, i: int, consumer: str = "learner") -> Path:
        """Shards that no step from `step` on needs; they are removed once this file is there."""
        return self.ledger(consumer) / f"retired-{step:09d}-{i:06d}.json"

    def archived(self, archive: Path, stream: str, seq: int) -> Path:
        """A retired shard of this run in an archive of many runs."""
        return archive / self.root.name / stream / f"{seq:08d}.parquet"

    # -- what was done
    @property
    def records(self) -> Path:
        return self.root / "records"

    def record(self, step: int) -> Path:
        return self.records / f"step-{step:09d}.json"

    def divergent_record(self, step: int, attempt: int) -> Path:
        return self.records / f"step-{step:09d}.divergent-{attempt:06d}.json"

    @property
    def validations(self) -> Path:
        return self.root / "validations"

    def validation(self, step: int) -> Path:
        return self.validations / f"step-{step:09d}.json"

    def validation_table(self, step: int) -> Path:
        """Some answers of that validation, as texts."""
        return self.validations / f"step-{step:09d}.table.json"

    @property
    def observations(self) -> Path:
        """What the owner saw of the rollout side beside each step; a lost one is lost to people only."""
        return self.root / "observations"

    def observation(self, step: int) -> Path:
        return self.observations / f"step-{step:09d}.json"

    @property
    def pins(self) -> Path:
        return self.root / "pins"

    # -- views and logs, rebuildable
    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def weight_sender(self) -> Path:
        """Where engines of transport `collective` get weights from, while a learner lives."""
        return self.root / "weight-sender.json"

    def server_log(self, worker: str, i: int) -> Path:
        """stdout and stderr of a server that a rollout worker runs; tasks/leftovers.py knows its processes by it."""
        return self.logs / f"{worker}-server-{i}.log"

    def component_log(self, component: str) -> Path:
        """What a process of the run logs, a JSON object a line (rl_core/run_log.py): `owner`, `learner-0` ..."""
        return self.logs / f"{component}.jsonl"

    @property
    def stalls(self) -> Path:
        """Who waited on whom, a line each minute of a wait that lasted."""
        return self.logs / "stalls.log"

    @property
    def screens(self) -> Path:
        """Pages of the run that could not be made, a line each."""
        return self.logs / "screens.log"

    @property
    def figures(self) -> Path:
        return self.root / "figures"

    @property
    def services(self) -> Path:
        """Addresses, pids and heartbeat of the private services of this run."""
        return self.root / "services"

    @property
    def prometheus(self) -> Path:
        """Where Prometheus finds the owner's endpoint, in the form of its file_sd_configs (so without `format`). There
        while the owner serves it, and behind an owner that died or failed."""
        return self.root / "prometheus.json"

    @property
    def mlflow_run(self) -> Path:
        return self.root / "mlflow-run.json"

    @property
    def status(self) -> Path:
        """What the owner is doing; rewritten about twice a second."""
        return self.root / "status.json"

    @property
    def result(self) -> Path:
        """How the last attempt ended; rewritten by every attempt."""
        return self.root / "result.json"


def file_numbers(directory: Path, pattern: str) -> list[int]:
    """Numbers of the files whose name matches `pattern` (one group of digits), ascending. No path is made: a directory
    with a file for each step is looked at thousands of times."""
    return [number for number, _ in _matches(directory, pattern)]


def numbered(directory: Path, pattern: str) -> Iterator[tuple[int, Path]]:
    """`(number, path)` of the files whose name matches `pattern` (one group of digits), in order of number."""
    return ((number, directory / name) for number, name in _matches(directory, pattern))


def _matches(directory: Path, pattern: str) -> list[tuple[int, str]]:
    match = re.compile(pattern).fullmatch
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    return sorted((int(hit.group(1)), name) for name in names if (hit := match(name)))


def newest_attempt(run: RunDir) -> int:
    """The newest attempt's number; 0 before the first start."""
    return max(file_numbers(run.attempts, r"attempt-(\d{6})\.json"), default=0)


def check_attempt(run: RunDir, attempt: int) -> None:
    """Raises StaleAttempt if a newer start of the run's owner exists (fencing, experience-store.md 3.8)."""
    newest = newest_attempt(run)
    if newest > attempt:
        raise StaleAttempt(f"{run.root}: attempt {attempt} is over, attempt {newest} owns the run")


def boot_id() -> str:
    """This boot of this machine: a pid of another boot says nothing. "unknown" where the kernel does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """The process that holds owner.lock, as it wrote itself into it: what a pid means needs all of these."""

    pid: int
    started: int | None
    """Clock ticks since boot; None where the system does not tell."""
    host: str
    place: str
    """Boot of the machine, and pid namespace."""

    @property
    def here(self) -> bool:
        """Whether its pid means the same process to us."""
        return (self.host, self.place) == (socket.gethostname(), _place())

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"


def _place() -> str:
    try:
        return f"{boot_id()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return boot_id()


def _myself() -> Holder:
    try:
        started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        started = None
    return Holder(pid=os.getpid(), started=started, host=socket.gethostname(), place=_place())


def owner_is_alive(run: RunDir) -> bool:
    """Whether a live process holds owner.lock now."""
    return _held(run) is not None


def holder(run: RunDir) -> Holder | None:
    """The live process that owns the run now; None if nobody does.

    Raises RunIsAlive where the lock is held by somebody who has not said who it is (yet).
    """
    said = _held(run)
    if said is None:
        return None
    try:
        return Holder(**json.loads(said.splitlines()[1]))
    except (IndexError, ValueError, TypeError):
        raise RunIsAlive(f"{run.root}: the run is alive, and its {run.owner_lock.name} does not say which process has "
                         "it; try again, or stop that process first") from None


def refuse_if_alive(run: RunDir) -> None:
    """Raises RunIsAlive, naming the holder, if a live process owns the run now. Takes nothing, writes nothing."""
    if (said := _held(run)) is not None:
        raise _alive(run, said)


def _held(run: RunDir) -> str | None:
    """What the holder of owner.lock wrote into it; None if it is free."""
    try:
        fd = os.open(run.owner_lock, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _who(fd)
    finally:
        os.close(fd)
    return None


def _who(fd: int) -> str:
    return os.pread(fd, 1024, 0).decode(errors="replace").strip() or "unknown"


def _alive(run: RunDir, said: str) -> RunIsAlive:
    return RunIsAlive(f"{run.root}: the run is alive, owned by {said.splitlines()[0]}; stop it first, end it with "
                      "--take-over, or use another --run-key")


class OwnerLock:
    """flock on owner.lock while a run is owned, and the next attempt. Comfort, not safety: fencing is by attempts.

    Raises RunIsAlive, naming the holder, if another live process has it.
    """

    def __init__(self, run: RunDir) -> None:
        run.root.mkdir(parents=True, exist_ok=True)
        self._run = run
        self._fd = os.open(run.owner_lock, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        for last in (False, False, False, True):
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if last:
                    said = _who(self._fd)
                    os.close(self._fd)
                    raise _alive(run, said) from error
                time.sleep(LOOK_S)  # `headway status` holds the lock shared for the moment of its look
        me = _myself()
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{me}\n{json.dumps(asdict(me))}\n".encode(), 0)

    def next_attempt(self, next_step: int, prefect_run_id: str | None) -> int:
        """Write the next attempt file and return its number."""
        while True:
            a = newest_attempt(self._run) + 1
            payload = {"attempt": a, "host": socket.gethostname(), "pid": os.getpid(), "boot_id": boot_id(),
                       "prefect_run_id": prefect_run_id, "next_step": next_step, "ts_us": time.time_ns() // 1000}
            if put_if_absent(self._run.attempt(a), to_json(payload)):
                return a

    def release(self) -> None:
        os.close(self._fd)
