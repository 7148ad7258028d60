"""What `headway doctor` finds: who owns a run, what waits for what, which processes belong to it, whether there is room
and the databases answer. Facts only; `flows/doctoring.py` has the words, `tasks/mending.py` what `--fix` does.

Reports are JSON values. `findings` are what is wrong, `notes` what is worth knowing and no trouble.
"""

from __future__ import annotations

import os
import shutil
import socket
import sqlite3
import time
import urllib.request
from collections.abc import Iterable
from contextlib import closing
from dataclasses import asdict
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from rl_core.config import Config
from rl_core.errors import BrokenFile, ConfigError, RunIsAlive
from rl_core.records import recorded_steps
from rl_core.revisions import config_of, current_revision
from rl_core.run_dir import Holder, RunDir, holder, json_values, newest_attempt, read_json
from rl_core.uris import redact, redact_in
from tasks import keeper, servers, services
from tasks.databases import url as database_url
from tasks.destination import destination
from tasks.hosted import here
from tasks.inspection import open_run, read_result, read_status
from tasks.leftovers import Member, homeless, members_but_owner
from tasks.paths import headway_home, run_dir

SILENT_S = 30.0
"""An owner rewrites its status view twice a second; one that has not for so long hangs, or is stopped."""
STARTING_S = 6.0
"""An owner that is starting, and has no lock yet, makes itself heard every 2 s."""
LEAST_FREE_BYTES = 2**30
ASK_S = 3.0
LATE_LEASE_S = 60.0
"""Beyond `deadlines.group_s`: the worker ends a group by itself at the deadline, then it has to be heard of."""


def diagnose(run_key: str | None) -> dict[str, Any]:
    """One run, or all runs under HEADWAY_HOME, and the home itself. Raises ConfigError where there is no such run."""
    home = headway_home()
    keys = [run_key] if run_key is not None else sorted(place.name for place in (home / "runs").glob("*")
                                                       if RunDir(place).run_json.exists())
    seen = [run_report(key) for key in keys]
    runs = [report for report, _ in seen]
    place = home_report(home, {uri for _, uri in seen if uri is not None})
    wrong = len(place["findings"]) + sum(len(run["findings"]) for run in runs)
    return json_values({"healthy": wrong == 0, "home": place, "runs": runs})


def home_report(home: Path, tracking: Iterable[str] = ()) -> dict[str, Any]:
    """Room and databases. `tracking`: MLflow addresses of the runs, with their passwords, asked beside the default one.
    """
    findings, databases = list[dict[str, Any]](), list[dict[str, Any]]()
    there = next(path for path in (home, *home.parents) if path.exists())
    free = shutil.disk_usage(there).free
    if free < LEAST_FREE_BYTES:
        findings.append(_finding("disk", f"{home}: {_gib(free)} are free on its file system; make room"))
    places = {destination(Config(), home).uri, *tracking}
    for name, uri in [("Prefect", database_url(home, "prefect")),
                      *(("MLflow", uri) for uri in sorted(places))]:
        trouble = database_trouble(uri)
        databases.append({"name": name, "where": redact(uri), "trouble": trouble})
        if trouble is not None:
            findings.append(_finding("database", f"{name} at {redact(uri)}: {trouble}; runs go on, and what is missing "
                                                 "is sent when it is back"))
    for place, pids in homeless(home / "runs").items():
        findings.append(_finding("leaked", f"{place} is gone, and processes of that run are not: "
                                           f"{', '.join(map(str, pids))}; end them by hand"))
    return {"directory": str(home), "free_bytes": free, "databases": databases, "findings": findings}


def run_report(run_key: str) -> tuple[dict[str, Any], str | None]:
    """One run: owner, state, waits, actors, processes, room, and what is wrong with them. Beside it MLflow's address,
    whose password the report does not have; None where it is not known."""
    run = run_dir(run_key)
    broken = {
        "run_key": run_key, "state": "broken", "alive": False, "notes": [], "waits": [], "actors": [], "processes": [],
        "owner": None, "steps": 0, "total_steps": 0, "attempt": 0, "since_s": None, "used_bytes": 0, "quota_bytes": 0,
        "tracking": redact(destination(Config(), headway_home()).uri), "live": {}, "stall": None,
        "directory": str(run.root)}
    try:
        open_run(run, run_key)
        config = config_of(run, current_revision(run))
        uri = _tracked_at(config)
        return _report(run, run_key, config, uri), uri
    except BrokenFile as error:
        return {**broken, "findings": [_finding("broken", str(error))]}, None


def _tracked_at(config: Config) -> str | None:
    """MLflow's address, with its password; None where it is in a variable that the environment does not have."""
    try:
        return destination(config, headway_home()).uri
    except ConfigError:
        return None


def _report(run: RunDir, run_key: str, config: Config, uri: str | None) -> dict[str, Any]:
    owner, alive = _owner(run)
    view, result, attempt = read_status(run), read_result(run), newest_attempt(run)
    found = members_but_owner(run, owner)
    ended = result.get("attempt") == attempt
    state = view.get("state", "starting") if alive else result.get("status", "stopped") if ended else "stopped"
    view = view if alive else {}
    used = used_bytes(run.root)
    report: dict[str, Any] = {
        "run_key": run_key, "state": state, "alive": alive, "owner": None if owner is None else asdict(owner),
        "attempt": attempt, "steps": len(recorded_steps(run)), "total_steps": config.total_steps,
        "since_s": _ago(view.get("since_us")), "waits": view.get("waits", []), "stall": view.get("stall"),
        "actors": _actors(view.get("actors", [])), "processes": [asdict(member) for member in found],
        "live": view.get("live", {}), "used_bytes": used, "quota_bytes": config.storage.bytes_quota,
        "tracking": config.tracking.uri if uri is None else redact(uri), "directory": str(run.root)}
    findings, notes = _room(run, config, used)
    if uri is None:
        notes.append(f"tracking.uri is {config.tracking.uri}: no address here, so that MLflow is not asked")
    if alive:
        findings += [*_owner_trouble(owner, view), *_actor_trouble(report["actors"]), *_lease_trouble(view, config),
                     *_service_trouble(run)]
    else:
        more, said = _left(run, config, found)
        findings, notes = [*findings, *more], [*notes, *said]
        if attempt and not ended:
            notes.append(f"attempt {attempt} ended without a word after {report['steps']} steps; "
                         f"`headway rerun {run_key}` goes on")
            findings += _views_trouble(run, config, attempt)
            notes += [said] if (said := prefect_is_away(run, config, attempt)) is not None else []
    return {**report, "findings": findings, "notes": notes}


def _finding(kind: str, text: str, *, mends: bool = False) -> dict[str, Any]:
    """Something that is wrong; `mends`: `--fix` can do something about it."""
    return {"kind": kind, "text": text, "mends": mends}


def _owner(run: RunDir) -> tuple[Holder | None, bool]:
    try:
        found = holder(run)
    except RunIsAlive:  # somebody who has not said who it is
        return None, True
    return found, found is not None


def _ago(ts_us: int | None) -> float | None:
    return None if ts_us is None else round(max(0.0, time.time() - ts_us / 1e6), 1)


def _actors(listed: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The owner's actors, and whether they live; unknown (None) on another machine."""
    known: list[dict[str, Any]] = []
    for actor in listed:
        stat = keeper.stat(actor["pid"]) if actor["place"] == here() else None
        same = stat is not None and stat.alive and stat.started == actor["started"]
        known.append({"actor": actor["actor"], "pid": actor["pid"],
                      "alive": same if actor["place"] == here() else None,
                      "stopped": same and stat is not None and stat.state in "Tt"})
    return known


def _owner_trouble(owner: Holder | None, view: dict[str, Any]) -> list[dict[str, Any]]:
    silent_s = _ago(view.get("ts_us"))
    if owner is not None and owner.here and (stat := keeper.stat(owner.pid)) is not None and stat.state in "Tt":
        return [_finding("owner-stopped", f"its owner, {owner}, is stopped; `kill -CONT {owner.pid}` lets it go on")]
    if silent_s is not None and silent_s > SILENT_S:
        return [_finding("owner-silent", f"its owner, {owner or 'unknown'}, has said nothing for {silent_s:.0f} s; "
                                         "another start with --take-over ends it and goes on")]
    return []


def _actor_trouble(actors: list[dict[str, Any]]) -> list[dict[str, Any]]:
    dead = [_finding("actor-dead", f"{a['actor']} (pid {a['pid']}) is dead; its owner starts another within its "
                                   "budget, or ends the run") for a in actors if a["alive"] is False]
    return dead + [_finding("actor-stopped", f"{a['actor']} (pid {a['pid']}) is stopped; `kill -CONT {a['pid']}` lets "
                                             "it go on, or its owner ends it at a deadline")
                   for a in actors if a["stopped"]]


def _lease_trouble(view: dict[str, Any], config: Config) -> list[dict[str, Any]]:
    limit = config.deadlines.group_s + LATE_LEASE_S
    return [_finding("stale-lease", f"{name} has had a group for {worker['oldest_lease_s']:.0f} s, beyond "
                                    f"deadlines.group_s = {config.deadlines.group_s:g}; see its log in logs/")
            for name, worker in view.get("live", {}).get("workers", {}).items()
            if worker.get("oldest_lease_s", 0.0) > limit]


def _service_trouble(run: RunDir) -> list[dict[str, Any]]:
    state = keeper.read_state(run.services)
    if state is None or state["boot_id"] != keeper.boot_id() or state["starting"]:
        return []
    gone = [name for name, p in state["processes"].items() if not keeper.is_alive(p["pid"], p["started"])]
    words = {"prefect": "its Prefect server is gone: the run goes on, and the next start tells Prefect how it ended",
             "ray": "its Ray head is gone: the run ends with that cause, the same command goes on"}
    return [_finding("service-dead", words[name]) for name in gone]


def _left(run: RunDir, config: Config, found: list[Member]) -> tuple[list[dict[str, Any]], list[str]]:
    """What a dead owner left: kept for a quick restart at first, leaked when nobody came."""
    if not found:
        return [], []
    heard, limit = services.heard_s(run.services), config.deadlines.owner_timeout_s
    listed = ", ".join(f"{member.what} (pid {member.pid})" for member in found[:8]) + (
        f" and {len(found) - 8} more" if len(found) > 8 else "")
    if heard is not None and heard <= STARTING_S:
        return [], [f"somebody is starting or ending it: heard {heard:.0f} s ago"]
    if heard is not None and heard <= limit + STARTING_S:
        return [], [f"{len(found)} processes wait for a quick restart, and end themselves {limit:g} s "
                    f"(deadlines.owner_timeout_s) after their owner; it was heard {heard:.0f} s ago: {listed}"]
    since = "" if heard is None else f"; the owner was heard {heard:.0f} s ago"
    return [_finding("leaked", f"{len(found)} processes have no owner{since}: {listed}", mends=True)], []


def _room(run: RunDir, config: Config, used: int) -> tuple[list[dict[str, Any]], list[str]]:
    free, quota = shutil.disk_usage(run.root).free, config.storage.bytes_quota
    if used > quota:
        return [_finding("disk", f"the run holds {_gib(used)}, storage.bytes_quota is {_gib(quota)}: rollouts wait; "
                                 f"--set storage.bytes_quota={2 * quota} at the next start")], []
    if free < quota - used:
        return [], [f"the file system has {_gib(free)} free, the quota would allow {_gib(quota - used)} more"]
    return [], []


def _views_trouble(run: RunDir, config: Config, attempt: int) -> list[dict[str, Any]]:
    """Prefect and MLflow may still believe that a killed attempt runs."""
    found: list[dict[str, Any]] = []
    if (state := flow_run_state(run, config, attempt)) is not None and state not in FINAL:
        found.append(_finding("prefect-state", f"Prefect says {state} of attempt {attempt}, which has no process",
                              mends=True))
    if tracked_as(run, config) == "RUNNING":
        found.append(_finding("mlflow-state", f"MLflow says RUNNING of attempt {attempt}, which has no process",
                              mends=True))
    return found


FINAL = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
"""Prefect's types of a state that stays."""


def flow_run_of(run: RunDir, attempt: int) -> str | None:
    """Id of the flow run of an attempt; None if it has none."""
    try:
        return read_json(run.attempt(attempt)).get("prefect_run_id")
    except (FileNotFoundError, BrokenFile):
        return None


def flow_run_state(run: RunDir, config: Config, attempt: int) -> str | None:
    """Type of the state that Prefect has for an attempt, `RUNNING`; None where it cannot be asked."""
    flow_run, server = flow_run_of(run, attempt), services.prefect_of(run.services, headway_home(),
                                                                     isolated=config.isolated)
    if flow_run is None or server is None:
        return None
    answer = servers.prefect_call(*server, "GET", f"/flow_runs/{flow_run}")
    return None if answer is None else answer.get("state_type")


def prefect_is_away(run: RunDir, config: Config, attempt: int) -> str | None:
    """That Prefect cannot be asked about a killed attempt, and what becomes of that; None if it can, or if it has
    nothing to say."""
    flow_run = flow_run_of(run, attempt)
    if flow_run is None or flow_run_state(run, config, attempt) is not None:
        return None
    return f"the Prefect server that has flow run {flow_run} of attempt {attempt} does not run, or does not " \
           "answer: it may still say Running there. The next start of the run sets it to Crashed, and so does --fix " \
           "while that server runs (`headway ui`)"


def tracked_as(run: RunDir, config: Config) -> str | None:
    """Status of the run in MLflow; None where it was never tracked, or cannot be asked."""
    try:
        stored = read_json(run.mlflow_run)
    except (FileNotFoundError, BrokenFile):
        return None
    uri = _tracked_at(config)
    if uri is None or redact(uri) != stored["uri"] or database_trouble(uri) is not None:
        return None
    from tasks.tracking import tracked_status  # imports mlflow, for a run that was killed

    return tracked_status(uri, stored["run_id"])


def database_trouble(uri: str) -> str | None:
    """Why a database or tracking server cannot be reached now; None if it can, or is not made yet."""
    try:
        where = urlsplit(uri)
        if where.scheme.startswith("sqlite"):
            path = Path(uri.partition(":///")[2])
            if path.exists():
                with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=ASK_S)) as database:
                    database.execute("select count(*) from sqlite_master").fetchone()
        elif where.scheme in ("http", "https"):
            bare = urlunsplit(where._replace(netloc=where.netloc.rpartition("@")[2]))  # health wants no password
            with urllib.request.urlopen(bare.rstrip("/") + "/health", timeout=ASK_S) as answer:
                answer.read()
        elif where.hostname is not None and where.port is not None:
            socket.create_connection((where.hostname, where.port), timeout=ASK_S).close()
    except (OSError, HTTPException, sqlite3.Error, ValueError) as error:
        return redact_in(f"{type(error).__name__}: {error}", uri)
    return None


def used_bytes(root: Path) -> int:
    """Bytes of all files under a directory, each once."""
    seen, total = set[tuple[int, int]](), 0
    for place, _, names in os.walk(root):
        for name in names:
            try:
                stat = os.lstat(os.path.join(place, name))
            except OSError:
                continue
            if (stat.st_dev, stat.st_ino) not in seen:
                seen.add((stat.st_dev, stat.st_ino))
                total += stat.st_size
    return total


def _gib(count: float) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**28 else f"{count / 2**20:.1f} MiB"
