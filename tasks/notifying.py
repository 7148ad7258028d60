"""A few words about a night to a webhook: by an address in the environment, or by a Prefect block.

The address is a secret: parameters, run directories, logs and messages have its name alone. Whoever does not answer
does not make a night fail: what went wrong is returned, for the log.
"""

from __future__ import annotations

import asyncio
import http.client
import importlib
import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from inspect import isawaitable
from typing import Any, cast
from urllib.parse import urlsplit

from rl_core.errors import ConfigError

ADDRESS = r"^(env:[A-Za-z_][A-Za-z0-9_]*|block:[a-z0-9-]+/[a-z0-9-]+)$"
"""`env:NAME`, a variable of the worker's environment; `block:webhook/morning`, a block by its type and name."""
ANSWER_S = 10.0
USE = "use env:NAME of a variable with the address, or block:TYPE/NAME of a Prefect block; never the address itself"


def check_address(address: str | None) -> None:
    """Raises ConfigError for a variable or block that is not there. A Prefect that does not answer is no reason."""
    if address is None:
        return
    if re.fullmatch(ADDRESS, address) is None:
        raise ConfigError(f"notify: no name of an address; {USE}")  # what was given may be a secret
    kind, _, name = address.partition(":")
    if kind == "env" and urlsplit(os.environ.get(name, "")).scheme not in ("http", "https"):
        raise ConfigError(f"notify: {address}: the variable {name} of the worker's environment holds no http:// or "
                          f"https:// address; export it before `headway services up`, or {USE}")
    if kind == "block":
        try:
            _load(name)
        except ValueError as error:
            raise ConfigError(f"notify: {address}: there is no such block ({type(error).__name__}); make it on "
                              f"Prefect's page (Blocks), or {USE}") from None
        except Exception:  # whatever an unreachable server raises: then nobody is notified
            return


def notify(address: str, words: Mapping[str, Any]) -> str | None:
    """Send `words`, with `subject` and `text` for people; returns why nobody has taken them, None if somebody has."""
    if re.fullmatch(ADDRESS, address) is None:
        return "no name of an address"  # what it is may be a secret
    kind, _, name = address.partition(":")
    pool = ThreadPoolExecutor(1, thread_name_prefix="notify")
    try:
        sending = pool.submit(_post, os.environ.get(name, ""), words) if kind == "env" \
            else pool.submit(copy_context().run, _send_by_block, name, words)
        return sending.result(ANSWER_S + 2.0)
    except TimeoutError:
        return f"{address}: no answer within {ANSWER_S:.0f} s"
    except Exception as error:  # of a block of anybody's making; its text may hold the address
        return f"{address}: {type(error).__name__}"
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


class _AsAnswered(urllib.request.HTTPRedirectHandler):
    """Leads nowhere else: a POST that is sent on becomes a GET, without the words."""

    def redirect_request(self, *args: Any, **options: Any) -> None:
        return None


def _post(url: str, words: Mapping[str, Any]) -> str | None:
    if urlsplit(url).scheme not in ("http", "https"):
        return "the variable holds no address any more"
    request = urllib.request.Request(url, json.dumps(dict(words)).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.build_opener(_AsAnswered).open(request, timeout=ANSWER_S):
            return None
    except urllib.error.HTTPError as error:
        return _refusal(error.code)
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        return f"no answer ({type(reason).__name__})"


def _refusal(code: int) -> str | None:
    """Why an answer with this status is no taking of the words; None where it is."""
    if code < 300:
        return None
    return f"it answered {code}" + ("; give the address it leads to" if code < 400 else "")


def _load(name: str) -> Any:
    for known in ("prefect.blocks.notifications", "prefect.blocks.webhook"):
        importlib.import_module(known)  # which makes its types known
    from prefect.blocks.core import Block

    return cast(Any, Block).load(name, _sync=True)


def _send_by_block(name: str, words: Mapping[str, Any]) -> str | None:
    """A notification block (Slack, Teams, mail ...) gets subject and text, a Webhook block all of it as JSON."""
    block = _load(name)
    if hasattr(block, "notify"):
        with block.raise_on_failure():
            answer = block.notify(words["text"], words["subject"])
    else:
        answer = block.call(dict(words))
    if isawaitable(answer):
        answer = asyncio.run(_awaited(answer))
    return _refusal(getattr(answer, "status_code", 200))


async def _awaited(answer: Any) -> Any:
    return await answer
