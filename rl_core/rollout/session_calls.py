"""How a session function of a user's is called, and what it may return (docs/hooks.md 9).

Needs no NumPy: a child of the rollout worker imports it (rewards/child.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast


@dataclass(frozen=True, slots=True)
class SessionCalls:
    """A session function that takes requests, in the form of `Bound` of rewards/signatures.py."""

    function: Callable[[Any], Any]
    signature: str = "session"

    @property
    def needs(self) -> list[str]:
        """No column of a row is needed to call it."""
        return []

    def call(self, request: dict[str, Any]) -> Any:
        return self.function(request["session"])

    def score(self, value: Any) -> dict[str, Any]:
        return {"prompt": as_prompt(value)}


def as_prompt(value: Any) -> Any:
    """What the session goes on with: a text, chat messages or token ids; None: it is over.

    Raises ValueError for anything else; what a chat must be, the worker says.
    """
    if value is None or (isinstance(value, str) and value.strip()):
        return value
    if isinstance(value, list) and value:
        items = cast("list[Any]", value)
        if all(isinstance(item, dict) for item in items) or \
                all(isinstance(item, int) and not isinstance(item, bool) for item in items):
            return items
    shown = repr(cast(Any, value))[:80]
    raise ValueError(f"the result is {shown}; return what the model is asked next (a text, chat messages, or token "
                     "ids), or None where the session is over")
