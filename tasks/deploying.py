"""`headway deploy`: a prefect.yaml registered with the kept Prefect server, by Prefect's own command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from rl_core.errors import ConfigError, DeadPart
from tasks import kept, servers, silent_runs

DEPLOY_S = 120.0
"""For all of them; Prefect's command takes a few seconds."""


def deploy(home: Path, directory: Path, source: Path) -> list[dict[str, Any]]:
    """Register all deployments of a prefect.yaml; returns `{"name": "train/adhoc", "id": ..., "url": ...}` of each.

    `directory`: where relative paths of their runs begin. Deploying again changes what is there. Raises ConfigError
    where no server is kept, or the file cannot be read; DeadPart with what Prefect says.
    """
    page, api = kept.address(home, "prefect"), kept.prefect_api(home)
    if page is None or api is None:
        raise ConfigError(f"no Prefect server is kept under {home}: `headway services up`")
    auth = servers.prefect_auth(home)
    names = _names(source)
    silent_runs.ensure(api, auth)
    env = servers.clean_environ() | servers.own_path() | servers.not_proxied() \
        | servers.prefect_client_env(home, api, auth) | {"PWD": str(directory), "PYTHONSAFEPATH": "1",
                                                         "PREFECT_LOGGING_LEVEL": "WARNING", "NO_COLOR": "1"}
    try:
        done = subprocess.run([sys.executable, "-P", "-m", "prefect", "--no-prompt", "deploy", "--all",
                               "--prefect-file", str(source)], env=env, cwd=directory, stdin=subprocess.DEVNULL,
                              capture_output=True, text=True, timeout=DEPLOY_S)
    except subprocess.TimeoutExpired:
        raise DeadPart(f"prefect deploy did not end in {DEPLOY_S:.0f} s") from None
    said = done.stdout + done.stderr
    if done.returncode:
        raise DeadPart(f"prefect deploy ended with {done.returncode}:\n{said.strip()}")
    return [_registered(page, api, auth, name, said) for name in names]


def _names(source: Path) -> list[str]:
    """Names of the deployments in the file."""
    try:
        listed = yaml.safe_load(source.read_text())["deployments"]
        return [str(one["name"]) for one in listed]
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise ConfigError(f"--prefect-file {source}: {type(error).__name__}: {error}") from error


def _registered(page: str, api: str, auth: str, name: str, said: str) -> dict[str, Any]:
    found = servers.prefect_call(api, auth, "POST", "/deployments/filter", {"deployments": {"name": {"any_": [name]}}})
    if not found:
        raise DeadPart(f"prefect deploy did not register {name!r}:\n{said.strip()}")
    flow = servers.prefect_call(api, auth, "GET", f"/flows/{found[0]['flow_id']}")
    return {"name": f"{flow['name']}/{name}", "id": found[0]["id"],
            "url": f"{page}/deployments/deployment/{found[0]['id']}"}
