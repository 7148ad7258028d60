"""`headway deploy`: a prefect.yaml registered with the kept Prefect server, or with the one at PREFECT_API_URL, by
Prefect's own command; schedule and parameters of the nightly on top of it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from rl_core.errors import ConfigError, DeadPart
from rl_core.uris import redact
from tasks import crash_notices, kept, servers, silent_runs

DEPLOY_S = 120.0
"""For all of them; Prefect's command takes a few seconds."""
NIGHTLY = "nightly/nightly"
NO_CRON = "none"


def deploy(home: Path, directory: Path, source: Path, *, cron: str | None = None, timezone: str | None = None,
           parameters: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    """Register all deployments of a prefect.yaml; returns `{"name": "train/adhoc", "id": ..., "url": ...}` of each.

    `directory`: where relative paths of their runs begin. Deploying again changes what is there; of NIGHTLY the
    schedule stays without `cron` (NO_CRON takes it away), and the parameters that are not in `parameters` (None takes
    one away). Raises ConfigError where there is no server to register with, the file cannot be read, or has no NIGHTLY
    to schedule, and for a cron that is none; DeadPart with what Prefect says.
    """
    if cron is not None:
        check_cron(cron, timezone)
    page, api, auth = server(home)
    listed = _listed(source)
    names = [name for name, _ in listed]
    if (cron is not None or parameters) and NIGHTLY.partition("/")[2] not in names:
        raise ConfigError(f"--cron, --param: {source} has no deployment {NIGHTLY}; there are {', '.join(names)}")
    crash_notices.check(api, auth, (parameters or {}).get("notify"))
    silent_runs.ensure(api, auth)
    env = servers.clean_environ() | servers.own_path() | servers.not_proxied() \
        | servers.prefect_client_env(home, api, auth) | {"PWD": str(directory), "PYTHONSAFEPATH": "1",
                                                         "PREFECT_LOGGING_LEVEL": "WARNING", "NO_COLOR": "1"}
    before = servers.prefect_ask(api, auth, "GET", f"/deployments/name/{NIGHTLY}")
    with _with_parameters(home, source, {} if before is None else before["parameters"], parameters or {}) as file:
        try:
            done = subprocess.run([sys.executable, "-P", "-m", "prefect", "--no-prompt", "deploy", "--all",
                                   "--prefect-file", str(file)], env=env, cwd=directory, stdin=subprocess.DEVNULL,
                                  capture_output=True, text=True, timeout=DEPLOY_S)
        except subprocess.TimeoutExpired:
            raise DeadPart(f"prefect deploy did not end in {DEPLOY_S:.0f} s") from None
    said = done.stdout + done.stderr
    if done.returncode:
        raise DeadPart(f"prefect deploy ended with {done.returncode}:\n{said.strip()}")
    if cron is not None:
        _schedule(api, auth, cron, timezone)
    nightly = servers.prefect_ask(api, auth, "GET", f"/deployments/name/{NIGHTLY}")
    if nightly is not None:
        crash_notices.ensure(api, auth, nightly["parameters"].get("notify"))
    return [_registered(page, api, auth, name, entrypoint, said) for name, entrypoint in listed]


def server(home: Path, environ: Mapping[str, str] = os.environ) -> tuple[str, str, str | None]:
    """Page, API and password of the kept Prefect server; where none is kept, of the one that PREFECT_API_URL and
    PREFECT_API_AUTH_STRING name. Raises ConfigError where there is neither, DeadPart where that one does not answer."""
    if (page := kept.address(home, "prefect")) is not None:
        if (api := kept.prefect_api(home)) is None:
            raise DeadPart(f"the kept Prefect server at {page} does not answer; `headway services status`")
        return page, api, servers.prefect_auth(home)
    api, auth = environ.get("PREFECT_API_URL", "").rstrip("/"), environ.get("PREFECT_API_AUTH_STRING") or None
    if not api:
        raise ConfigError(f"no Prefect server is kept under {home}: `headway services up`, or name one of your own by "
                          "PREFECT_API_URL and PREFECT_API_AUTH_STRING")
    if not _is_address(api):
        raise ConfigError(f"PREFECT_API_URL is {redact(api)!r}; write http://host:4200/api, the password in "
                          "PREFECT_API_AUTH_STRING")
    if not servers.prefect_answers(api, auth):
        raise DeadPart(f"the Prefect server at PREFECT_API_URL, {redact(api)}, does not answer, or refuses "
                       f"{'the password of PREFECT_API_AUTH_STRING' if auth else 'who has no PREFECT_API_AUTH_STRING'}")
    return api.removesuffix("/api"), api, auth


def _is_address(api: str) -> bool:
    try:
        parts = urlsplit(api)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 \
            and "@" not in parts.netloc and parts.path.endswith("/api")
    except ValueError:  # a port that is no number
        return False


def check_cron(cron: str, timezone: str | None) -> None:
    """Raises ConfigError for what is no schedule, or no time zone."""
    from prefect.client.schemas.schedules import CronSchedule
    from pydantic import ValidationError

    fields = len(cron.split())
    try:
        if cron == NO_CRON:
            return
        CronSchedule(cron="0 0 * * *", timezone=timezone)
    except ValidationError:
        raise ConfigError(f"--timezone {timezone!r}: no time zone; write it as in Europe/Berlin") from None
    try:
        if fields != 5:
            raise ValueError(f"it has {fields} fields")
        CronSchedule(cron=cron)
    except ValueError as error:
        why = "" if isinstance(error, ValidationError) else f" ({error})"
        raise ConfigError(f"--cron {cron!r}: no schedule{why}; write five fields, minute, hour, day, month and "
                          f"weekday, as in '0 2 * * *' for two every night, or {NO_CRON}") from None


@contextmanager
def _with_parameters(home: Path, source: Path, before: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[Path]:
    """The prefect.yaml with the parameters of NIGHTLY as they were and those that are given; None takes one away."""
    if not before and not given:
        yield source
        return
    tree = yaml.safe_load(source.read_text())
    for one in tree["deployments"]:
        if one["name"] == NIGHTLY.partition("/")[2]:
            wanted = {**(one.get("parameters") or {}), **before, **given}
            one["parameters"] = {name: value for name, value in wanted.items() if value is not None}
    where = kept.directory(home)
    where.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=where, prefix="deployments-", suffix=".yaml") as file:
        file.write(yaml.safe_dump(tree, sort_keys=False))
        file.flush()
        yield Path(file.name)


def _schedule(api: str, auth: str | None, cron: str, timezone: str | None) -> None:
    """Give NIGHTLY this schedule, and no other. Raises DeadPart."""
    found = servers.prefect_ask(api, auth, "GET", f"/deployments/name/{NIGHTLY}")
    place = f"/deployments/{found['id']}/schedules" if found else ""
    for one in servers.prefect_ask(api, auth, "GET", place) or () if found else ():
        servers.prefect_ask(api, auth, "DELETE", f"{place}/{one['id']}")
    if not found or (cron != NO_CRON and servers.prefect_ask(api, auth, "POST", place, [
            {"schedule": {"cron": cron, "timezone": timezone or "UTC"}, "active": True, "slug": "headway"}]) is None):
        raise DeadPart(f"the Prefect server at {api} has no {NIGHTLY} to give the schedule {cron!r} to")


def _listed(source: Path) -> list[tuple[str, str | None]]:
    """Name and entrypoint of each deployment in the file."""
    try:
        listed = yaml.safe_load(source.read_text())["deployments"]
        return [(str(one["name"]), one.get("entrypoint")) for one in listed]
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise ConfigError(f"--prefect-file {source}: {type(error).__name__}: {error}") from error


def _registered(page: str, api: str, auth: str | None, name: str, entrypoint: str | None, said: str) -> dict[str, Any]:
    """The deployment as the server has it. Raises DeadPart.

    Of those of this name it is the newest one with this entrypoint: others, who use the server as well, may have called
    one of another flow the same.
    """
    found = servers.prefect_ask(api, auth, "POST", "/deployments/filter", {
        "deployments": {"name": {"any_": [name]}}, "sort": "UPDATED_DESC"}) or ()
    one = next((one for one in found if one["entrypoint"] == entrypoint), None)
    flow = None if one is None else servers.prefect_ask(api, auth, "GET", f"/flows/{one['flow_id']}")
    if one is None or flow is None:
        raise DeadPart(f"prefect deploy did not register {name!r}:\n{said.strip()}")
    schedules = [known["schedule"] for known in one.get("schedules") or () if known.get("active")]
    return {"name": f"{flow['name']}/{name}", "id": one["id"],
            "url": f"{page}/deployments/deployment/{one['id']}", "parameters": one.get("parameters") or {},
            "schedules": [f"{when['cron']} {when.get('timezone') or 'UTC'}" for when in schedules if "cron" in when]}
