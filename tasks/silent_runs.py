"""The automation that sets flow runs to Crashed whose process is gone: Prefect by itself lets them be Running for ever,
and a deployment that takes one run at a time would wait for them.

A flow run says every 30 s that it lives (servers.HEARTBEAT_S); after three silent times the server calls it Crashed.
Asked by HTTP: imports no Prefect.
"""

from __future__ import annotations

from typing import Any

from rl_core.errors import DeadPart
from tasks import servers

NAME = "headway: a flow run without a heartbeat has crashed"
FLOWS = ("train", "rerun", "replay", "nightly")
"""Headway's flows. Those of others may be slower to say that they live."""
SILENT_S = 3 * servers.HEARTBEAT_S


def automation() -> dict[str, Any]:
    """As Prefect's API takes it."""
    heartbeat = "prefect.flow-run.heartbeat"
    ends = [f"prefect.flow-run.{state}" for state in ("Completed", "Failed", "Cancelled", "Crashed")]
    return {
        "name": NAME,
        "description": "The process of the run is gone: killed, or its machine went down. `headway rerun` of its run "
                       "key, or Retry, goes on with it.",
        "enabled": True,
        "trigger": {
            "type": "event", "posture": "Proactive", "threshold": 1, "within": SILENT_S,
            "match": {"prefect.resource.id": "prefect.flow-run.*"},
            "match_related": {"prefect.resource.role": "flow", "prefect.resource.name": list(FLOWS)},
            "for_each": ["prefect.resource.id"], "after": [heartbeat], "expect": [heartbeat, *ends]},
        "actions": [{"type": "change-flow-run-state", "state": "CRASHED", "name": "Crashed",
                     "message": f"no heartbeat for {SILENT_S} s: its process is gone; Retry goes on with its run"}],
    }


def find(api_url: str, auth: str | None) -> dict[str, Any] | None:
    """The automation as the server has it; None if it has none."""
    found = servers.prefect_call(api_url, auth, "POST", "/automations/filter",
                                 {"automations": {"name": {"any_": [NAME]}}})
    return found[0] if found else None


def ensure(api_url: str, auth: str | None) -> None:
    """Make it where there is none; one that a person has switched off stays off. Raises DeadPart."""
    if find(api_url, auth) is None and servers.prefect_call(api_url, auth, "POST", "/automations/",
                                                            automation()) is None:
        raise DeadPart(f"the Prefect server at {api_url} did not take the automation {NAME!r}")
