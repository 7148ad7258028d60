"""Names of the Hugging Face hub, `hf:owner/name[@revision]`, and the directory that stands for one.

Downloads are made by a process of its own (hub_download.py), since the commands keep this one offline: libraries that
look at a local directory shall not ask the hub about it. What a person has set for HF_HUB_OFFLINE is honoured.
Importable without torch and without huggingface_hub.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rl_core.errors import ConfigError, DeadlinePassed

PREFIX = "hf:"
OFFLINE = "HF_HUB_OFFLINE"
ASKED_OFFLINE = "HEADWAY_HUB_OFFLINE"
"""HF_HUB_OFFLINE as the person set it, where a command sets it for itself."""
DOWNLOAD = Path(__file__).with_name("hub_download.py")


@dataclass(frozen=True, slots=True)
class HubId:
    """A repository of the hub: `HubId("owner/name", "main")`."""

    name: str
    revision: str | None
    """Branch, tag or commit; None: the newest of the main branch."""


def hub_id(field: str, text: str) -> HubId | None:
    """`hf:owner/name@v1` -> `HubId("owner/name", "v1")`; None for a text that is no name of the hub.

    Raises ConfigError, naming `field`, for one that begins like it and is none.
    """
    if not text.startswith(PREFIX):
        return None
    name, at, revision = text.removeprefix(PREFIX).partition("@")
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name) or (at and not revision):
        raise ConfigError(f"{field}: write hf:owner/name or hf:owner/name@revision (got {text!r})")
    return HubId(name, revision or None)


def fetch(field: str, wanted: HubId, *, kind: Literal["model", "dataset"], patterns: Sequence[str],
          cache: Path | None, deadline_s: float) -> Path:
    """The directory with those files of the repository that match `patterns`, downloaded or found in the cache.

    A name without a commit is asked for at the hub; where that cannot be reached, what was downloaded before is taken.
    `cache` None: that of the hub's own library. Raises ConfigError naming `field`, DeadlinePassed; what has come by
    then is kept for the next try.
    """
    text = f"{PREFIX}{wanted.name}" + (f"@{wanted.revision}" if wanted.revision else "")
    answer = _ask({"repo_id": wanted.name, "revision": wanted.revision, "repo_type": kind,
                   "allow_patterns": list(patterns), "cache_dir": None if cache is None else str(cache)},
                  f"{field}: {text}", deadline_s)
    if "path" not in answer:
        raise ConfigError(f"{field}: {text!r} is not in the cache and could not be downloaded ({answer['error']}: "
                          f"{answer['message']}); check name, revision, network and HF_TOKEN, or download it elsewhere "
                          "and give its directory")
    return Path(answer["path"])


def _ask(request: dict[str, Any], what: str, deadline_s: float) -> dict[str, str]:
    """The answer of one process that downloads; its progress bars are shown on a terminal."""
    shown = sys.stderr.isatty()
    try:
        done = subprocess.run([sys.executable, "-P", str(DOWNLOAD), json.dumps(request)], env=_environment(shown),
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=None if shown else subprocess.PIPE, text=True, timeout=deadline_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise DeadlinePassed(f"{what}: the download took longer than {deadline_s:g} s (deadlines.model_setup_s); the "
                             "same command goes on with it") from error
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        said = (done.stderr or "").strip().splitlines()
        return {"error": f"exit code {done.returncode}", "message": said[-1][:300] if said else "no word of why"}


def _environment(shown: bool) -> dict[str, str]:
    """This process's environment, online unless a person asked for offline."""
    env = dict(os.environ)
    asked = env.pop(ASKED_OFFLINE, None)
    if asked is not None:
        env.pop(OFFLINE, None)
        env |= {OFFLINE: asked} if asked else {}
    return env if shown else env | {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}
