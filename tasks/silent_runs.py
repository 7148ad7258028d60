"""The automations that set flow runs to Crashed whose process is gone: Prefect by itself lets them be Running, or
Pending, for ever, and a deployment that takes one run at a time would wait for them.

A flow run says every 30 s that it lives (servers.HEARTBEAT_S); after three silent times the server calls it Crashed.
One whose process ended before it said anything is still Pending, as its worker has left it: after BEGIN_S it has
crashed, too. Asked by HTTP: imports no Prefect.

While the server itself is away nobody hears anything, and that is no silence of a run. Prefect keeps, for each run,
until when it must be heard; started again later than that, it would call all of them crashed that are alive, or, a
minute later still, none that is dead. So `forget_windows` takes these away before a kept server starts, and
`crash_the_dead` looks once, when those who live have had the time to say so, for runs from before that nobody has heard
of since.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any

from rl_core.errors import DeadPart
from tasks import databases, servers
from tasks.kept import POOL

NAME = "headway: a flow run without a heartbeat has crashed"
NEVER_BEGAN = "headway: a flow run that did not begin has crashed"
NAMES = (NAME, NEVER_BEGAN)
FLOWS = ("train", "rerun", "replay", "nightly")
"""Headway's flows. Those of others may be slower to say that they live."""
SILENT_S = 3 * servers.HEARTBEAT_S
BEGIN_S = 120
"""From a worker's word that it starts a process to the first one of that process, which imports for seconds."""
HEARTBEAT = "prefect.flow-run.heartbeat"
ENDS = [f"prefect.flow-run.{state}" for state in ("Completed", "Failed", "Cancelled", "Crashed")]


def automations() -> tuple[dict[str, Any], ...]:
    """As Prefect's API takes them."""
    return (
        _crashes(NAME, after=HEARTBEAT, expect=[HEARTBEAT, *ENDS], within=SILENT_S,
                 description="The process of the run is gone: killed, or its machine went down. `headway rerun` of its "
                             "run key, or Retry, goes on with it.",
                 message=f"no heartbeat for {SILENT_S} s: its process is gone; Retry goes on with its run"),
        _crashes(NEVER_BEGAN, after="prefect.flow-run.Pending", within=BEGIN_S,
                 expect=["prefect.flow-run.Running", "prefect.flow-run.Retrying", "prefect.flow-run.Scheduled",
                         "prefect.flow-run.AwaitingRetry", HEARTBEAT, *ENDS],
                 description="The process of the run ended before it could begin, or its worker was killed. Retry "
                             "begins it.",
                 message=f"not begun within {BEGIN_S} s: its process is gone; Retry begins it"))


def _crashes(name: str, *, after: str, expect: list[str], within: int, description: str, message: str
             ) -> dict[str, Any]:
    return {
        "name": name, "description": description, "enabled": True,
        "trigger": {
            "type": "event", "posture": "Proactive", "threshold": 1, "within": within,
            "match": {"prefect.resource.id": "prefect.flow-run.*"},
            "match_related": {"prefect.resource.role": "flow", "prefect.resource.name": list(FLOWS)},
            "for_each": ["prefect.resource.id"], "after": [after], "expect": expect},
        "actions": [{"type": "change-flow-run-state", "state": "CRASHED", "name": "Crashed", "message": message}],
    }


def find(api_url: str, auth: str | None, name: str) -> dict[str, Any] | None:
    """The automation as the server has it; None if it has none. Raises DeadPart where it does not say."""
    found = servers.prefect_ask(api_url, auth, "POST", "/automations/filter",
                                {"automations": {"name": {"any_": [name]}}})
    return found[0] if found else None


def make(api_url: str, auth: str | None, automation: dict[str, Any]) -> None:
    """Raises DeadPart where the server does not take it; one that has no automations at all answers 404."""
    if servers.prefect_ask(api_url, auth, "POST", "/automations/", automation) is None:
        raise DeadPart(f"the Prefect server at {api_url} has no automations: it did not take {automation['name']!r}")


def ensure(api_url: str, auth: str | None) -> None:
    """Make those that are not there; one that a person has switched off stays off. Raises DeadPart."""
    for automation in automations():
        if find(api_url, auth, automation["name"]) is None:
            make(api_url, auth, automation)


# -- after the server was away

HEARD_AGAIN_S = BEGIN_S + servers.HEARTBEAT_S
"""After a start of the server: those who live have said so, and a worker has begun what it had taken."""
WINDOWS = "delete from automation_bucket where automation_id in (select id from automation where name in ({}))"
DATABASE_S = 5


def forget_windows(home: Path) -> None:
    """Before a kept server starts: nobody could be heard while it was away. A database without these tables, or that is
    none, has nothing to forget, and its server says so. Raises DeadPart for one that does not do it."""
    if not databases.is_sqlite(home, "prefect"):
        asyncio.run(_forget_in_postgresql(databases.url(home, "prefect")))
        return
    place = databases.file(home, "prefect")
    if not place.exists():
        return
    try:
        with closing(sqlite3.connect(place, timeout=DATABASE_S)) as database, database:
            database.execute(WINDOWS.format(", ".join("?" * len(NAMES))), NAMES)
    except sqlite3.DatabaseError as error:
        if not any(text in str(error) for text in ("no such table", "not a database", "malformed")):
            raise DeadPart(f"{place}: {error}") from None


async def _forget_in_postgresql(url: str) -> None:
    import asyncpg

    try:
        connection = await asyncpg.connect(url, timeout=DATABASE_S)
        try:
            await connection.execute(WINDOWS.format("$1, $2"), *NAMES, timeout=DATABASE_S)
        finally:
            await connection.close(timeout=DATABASE_S)
    except asyncpg.UndefinedTableError:
        pass
    except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        raise DeadPart(f"the database of Prefect: {type(error).__name__}: {error}") from None


def crash_the_dead(api_url: str, auth: str | None, since: datetime, lives: Callable[[str, str], bool]) -> list[str]:
    """Set flow runs of Headway to Crashed that are under way from before `since`, that nobody has heard of since, and
    of which `lives(flow_run_id, name)` knows no process. Returns their names.

    As the automations do, it judges those that have said at least once that they live, and those that a worker of
    headway's pool has taken and not begun. Raises DeadPart at the first question that is not answered.
    """
    found = servers.prefect_ask(api_url, auth, "POST", "/flow_runs/filter", {
        "flow_runs": {"state": {"type": {"any_": ["RUNNING", "PENDING"]}}}, "flows": {"name": {"any_": list(FLOWS)}}})
    crashed = list[str]()
    for run in found:
        begun = datetime.fromisoformat(run["state"]["timestamp"])
        if begun >= since or lives(run["id"], run["name"]) or not _is_ours(api_url, auth, run) \
                or _heard(api_url, auth, run["id"], since):
            continue
        state = {"type": "CRASHED", "name": "Crashed",
                 "message": f"nothing heard since {since.isoformat(timespec='seconds')}, when the server was started "
                            "again: its process is gone; Retry goes on with its run"}
        done = servers.prefect_ask(api_url, auth, "POST", f"/flow_runs/{run['id']}/set_state", {"state": state})
        if done is not None and done["status"] == "ACCEPT":  # else it has ended meanwhile
            crashed.append(run["name"])
    return crashed


def _is_ours(api_url: str, auth: str | None, run: dict[str, Any]) -> bool:
    if run["state"]["type"] == "PENDING":
        return run["work_pool_name"] == POOL
    return _heard(api_url, auth, run["id"], datetime.fromisoformat(run["created"]), HEARTBEAT)


def _heard(api_url: str, auth: str | None, flow_run: str, since: datetime, *events: str) -> bool:
    """Whether it has said anything since, or one of these events."""
    asked: dict[str, Any] = {"occurred": {"since": since.isoformat()},
                             "resource": {"id": [f"prefect.flow-run.{flow_run}"]}}
    if events:
        asked["event"] = {"name": list(events)}
    return bool(servers.prefect_ask(api_url, auth, "POST", "/events/filter", {"limit": 1, "filter": asked})["events"])
