"""The automations that set flow runs to Crashed whose process is gone: Prefect by itself lets them be Running, or
Pending, for ever, and a deployment that takes one run at a time would wait for them.

A flow run says every 30 s that it lives (servers.HEARTBEAT_S); after three silent times the server calls it Crashed.
One whose process ended before it said anything is still Pending, as its worker has left it: after BEGIN_S it has
crashed, too. Asked by HTTP: imports no Prefect.
"""

from __future__ import annotations

from typing import Any

from rl_core.errors import DeadPart
from tasks import servers

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
    """The automation as the server has it; None if it has none."""
    found = servers.prefect_call(api_url, auth, "POST", "/automations/filter",
                                 {"automations": {"name": {"any_": [name]}}})
    return found[0] if found else None


def ensure(api_url: str, auth: str | None) -> None:
    """Make those that are not there; one that a person has switched off stays off. Raises DeadPart."""
    for automation in automations():
        name = automation["name"]
        if find(api_url, auth, name) is None and servers.prefect_call(api_url, auth, "POST", "/automations/",
                                                                      automation) is None:
            raise DeadPart(f"the Prefect server at {api_url} did not take the automation {name!r}")
