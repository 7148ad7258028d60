"""The automation that tells of a night whose process was killed: it cannot tell anybody itself, so that Prefect's
server does it, by the block that `notify` of the deployed nightly names (docs/nightly.md 6). Asked by HTTP: imports no
Prefect.

A variable of the worker's environment (`env:NAME`) is not known to the server: then there is no such automation.
"""

from __future__ import annotations

from typing import Any

from rl_core.errors import ConfigError
from tasks import servers, silent_runs

NAME = "headway: a night has crashed"
FLOW = "nightly"
WEBHOOK = "webhook"
"""Slug of the type of block that is called with JSON. What others take is subject and text."""
SUBJECT = "{{ flow_run.name }}: crashed"
TEXT = "{{ flow_run.name }}: crashed: {{ flow_run.state.message }}"
WORDS = ('{"subject": {{ (flow_run.name ~ ": crashed") | tojson }}, '
         '"text": {{ (flow_run.name ~ ": crashed: " ~ flow_run.state.message) | tojson }}, '
         '"night": {{ flow_run.name | tojson }}, "verdict": "crashed", '
         '"reasons": [{{ flow_run.state.message | tojson }}]}')
"""As of a night that failed (night_end.tell_trouble); the name of the flow run stands for the key of the night."""


def check(api_url: str, auth: str | None, notify: str | None) -> None:
    """Raises ConfigError for a block that the server does not have, DeadPart where it does not say."""
    if _name(notify) is not None and _block(api_url, auth, notify) is None:
        raise ConfigError(f"--param notify={notify}: there is no such block; make it on Prefect's page (Blocks) first")


def ensure(api_url: str, auth: str | None, notify: str | None) -> None:
    """Have the automation as `notify` asks for it: made, changed to another block, or taken away. One that a person has
    switched off stays off. Raises DeadPart where the server does not say, or take it."""
    action, found = _action(_block(api_url, auth, notify)), silent_runs.find(api_url, auth, NAME)
    if action is None and found is not None:
        servers.prefect_ask(api_url, auth, "DELETE", f"/automations/{found['id']}")
    elif action is not None and found is None:
        silent_runs.make(api_url, auth, _automation(action))
    elif action is not None and found is not None and not _does(found, action):
        servers.prefect_ask(api_url, auth, "PUT", f"/automations/{found['id']}",
                            _automation(action, enabled=found["enabled"]))


def _name(notify: str | None) -> tuple[str, str] | None:
    """`block:webhook/morning` -> `("webhook", "morning")`; None for what is no block."""
    kind, _, name = (notify or "").partition(":")
    slug, slash, document = name.partition("/")
    return (slug, document) if kind == "block" and slash else None


def _block(api_url: str, auth: str | None, notify: str | None) -> dict[str, Any] | None:
    """The block as the server has it."""
    if (name := _name(notify)) is None:
        return None
    return servers.prefect_ask(api_url, auth, "GET", f"/block_types/slug/{name[0]}/block_documents/name/{name[1]}")


def _action(block: dict[str, Any] | None) -> dict[str, Any] | None:
    """What the automation does; None without a block, and with one that Prefect's server cannot use."""
    if block is None:
        return None
    if block["block_type"]["slug"] == WEBHOOK:
        return {"type": "call-webhook", "block_document_id": block["id"], "payload": WORDS}
    if "notify" in block["block_schema"]["capabilities"]:
        return {"type": "send-notification", "block_document_id": block["id"], "subject": SUBJECT, "body": TEXT}
    return None


def _automation(action: dict[str, Any], *, enabled: bool = True) -> dict[str, Any]:
    """As Prefect's API takes it."""
    return {
        "name": NAME, "enabled": enabled, "actions": [action],
        "description": "The process of a night was killed. `headway deploy --param notify=block:TYPE/NAME` changes "
                       "this, `headway deploy --param notify=null` removes it.",
        "trigger": {
            "type": "event", "posture": "Reactive", "threshold": 1, "within": 0,
            "match": {"prefect.resource.id": "prefect.flow-run.*"},
            "match_related": {"prefect.resource.role": "flow", "prefect.resource.name": FLOW},
            "for_each": ["prefect.resource.id"], "expect": ["prefect.flow-run.Crashed"]}}


def _does(found: dict[str, Any] | None, action: dict[str, Any]) -> bool:
    """Whether an automation as the server has it does this."""
    return found is not None and len(found["actions"]) == 1 \
        and {name: found["actions"][0].get(name) for name in action} == action
