"""What `headway services doctor` finds: a set-up that is wrong, or half started. Facts as JSON values; the words around
them are in flows/serving.py."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rl_core.errors import BrokenFile, DeadPart
from rl_core.uris import redact
from tasks import databases, keeper, kept, servers, silent_runs
from tasks.diagnosis import LEAST_FREE_BYTES, database_trouble
from tasks.kept import Kept

DEPLOYMENTS = ("train/adhoc", "nightly/nightly", "rerun/from-step", "replay/step")
WANTED = {
    ("server", "concurrency", "lease_storage"): "prefect.server.concurrency.lease_storage.filesystem",
    ("server", "analytics_enabled"): False,
}
"""Settings of the Prefect server without which runs are lost when it is restarted, or data leaves the machine."""
UP = "`headway services up`"


def examine(home: Path, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """`{"healthy": False, "findings": [...], "notes": [...]}`. Changes nothing."""
    findings, notes = [*_secrets(home), *_databases(home)], [*_shell(home, environ)]
    try:
        found = kept.read(home)
        settings = kept.read_settings(home)
    except BrokenFile as error:
        return _report(home, [*findings, str(error)], notes)
    if settings is not None:  # before the first `up` nobody has made them so
        findings += [said for place in kept.directories(home) for said in _open_to_others(place, 0o700)]
    if found is None:
        strays = sorted(pid for pid in keeper.processes() if kept.is_of(home, pid))
        if strays:
            findings.append(f"processes of services that nobody has noted: {', '.join(map(str, strays))}; {UP} ends "
                            "them and starts anew")
        elif settings is not None:
            findings += [f"port {settings.port(name)} of {name} is taken by somebody else; end that process, or take "
                         f"another port: headway services up --{name}-port" for name in ("prefect", "mlflow")
                         if not servers.is_free(settings.port(name))]
            notes.append(f"services are down; {UP} starts them")
        else:
            notes.append(f"services were never up under {home}; {UP} starts them")
        return _report(home, findings, notes)
    findings += [*_processes(found), *_while_it_answers(_prefect(home)), *_mlflow(home, found)]
    return _report(home, findings, [*notes, *_while_it_answers(_deployments(home))])


def _report(home: Path, findings: list[str], notes: list[str]) -> dict[str, Any]:
    return {"healthy": not findings, "home": str(home), "findings": findings, "notes": notes}


def _secrets(home: Path) -> Iterator[str]:
    place = home / "secrets"
    if not place.is_dir():
        return
    yield from _open_to_others(place, 0o700)
    for path in sorted(place.iterdir()):
        yield from _open_to_others(path, 0o600)


def _open_to_others(path: Path, wanted: int) -> Iterator[str]:
    if path.exists() and (mode := stat.S_IMODE(path.stat().st_mode)) & ~wanted:
        yield f"{path} can be read by others (mode {mode:04o}): chmod {wanted:o} {path}"


def _databases(home: Path) -> Iterator[str]:
    there = next(path for path in (home, *home.parents) if path.exists())
    if (free := shutil.disk_usage(there).free) < LEAST_FREE_BYTES:
        yield f"{home}: {free // 2**20} MiB are free on its file system; make room"
    for name in databases.NAMES:
        url, found = databases.url(home, name), databases.state(home, name)
        if (trouble := database_trouble(url)) is not None:
            yield f"database of {name}, {redact(url)}: {trouble}"
        elif found == "newer":
            yield f"database of {name}, {url}: made by a newer {name} than the installed one; upgrade {name}, or " \
                  "restore the copy that was made before it"
        elif found == "older":
            yield f"database of {name}, {url}: of an older {name}; {UP} copies it and brings it up to date"
        elif found == "unknown":
            yield f"database of {name}, {url}: holds no schema; was its first start cut short? Move it away"


def _shell(home: Path, environ: Mapping[str, str]) -> Iterator[str]:
    """Other servers than the kept ones, in the shell that asks."""
    for variable, name, path in (("PREFECT_API_URL", "prefect", "/api"), ("MLFLOW_TRACKING_URI", "mlflow", "")):
        page, said = kept.address(home, name), environ.get(variable)
        if page is not None and said and said.rstrip("/") != page + path:
            yield f"{variable} of this shell is {redact(said)}, the kept server is {page}{path}: " \
                  "eval \"$(headway env)\""


def _processes(found: Kept) -> Iterator[str]:
    if not found.watched:
        yield f"the supervisor is gone: services that die stay dead; {UP} takes over those that live"
    for name in kept.NAMES:
        one = found.services.get(name)
        if one is None or (one.state == "down" and not found.watched):
            yield f"{name} is not there"
        elif one.state == "given up":
            yield f"{name} was given up: {one.why}"
        elif not one.alive:
            yield f"{name} (pid {one.process.pid if one.process else '-'}) is dead" + (
                "; it is started again" if found.watched else "")
        elif one.state != "ready":
            yield f"{name} is {one.state}; it has not answered yet"
        elif one.process is not None and (known := keeper.stat(one.process.pid)) is not None and known.state in "Tt":
            yield f"{name} is stopped; `kill -CONT {one.process.pid}` lets it go on"


def _while_it_answers(said: Iterator[str]) -> Iterator[str]:
    """What is said up to the first question that a server does not answer, and that it does not: silence tells nothing
    of what was asked for."""
    try:
        yield from said
    except DeadPart as error:
        yield str(error)


def _prefect(home: Path) -> Iterator[str]:
    """What the kept Prefect server says of itself. Raises DeadPart where it does not answer."""
    api, auth = kept.prefect_api(home), servers.prefect_auth(home)
    page = kept.address(home, "prefect")
    if api is None:
        if page is not None:
            yield f"Prefect at {page} does not answer to the password in {home / 'secrets' / 'prefect-auth'}"
        return
    settings = servers.prefect_ask(api, auth, "GET", "/admin/settings") or {}
    for path, wanted in WANTED.items():
        value: Any = settings
        for part in path:
            value = value.get(part) if isinstance(value, dict) else None
        if value != wanted:
            yield f"Prefect at {page}: {'.'.join(path)} is {value!r}, should be {wanted!r}: " \
                  f"`headway services down`, {UP}"
    pool = servers.prefect_ask(api, auth, "GET", f"/work_pools/{kept.POOL}")
    if pool is None:
        yield f"Prefect has no work pool {kept.POOL!r}: its worker makes it when it starts"
    elif pool["type"] != "process":
        yield f"work pool {kept.POOL!r} is of type {pool['type']!r}, should be 'process': prefect work-pool delete " \
              f"{kept.POOL}"
    elif pool["is_paused"]:
        yield f"work pool {kept.POOL!r} is paused: prefect work-pool resume {kept.POOL}"
    for name in silent_runs.NAMES:
        made = silent_runs.find(api, auth, name)
        if made is None or not made["enabled"]:
            yield f"the automation {name!r} is {'switched off' if made else 'not there'}: a run that was killed is " \
                  f"not said to be" + ("" if made else f"; {UP} makes it")


def _mlflow(home: Path, found: Kept) -> Iterator[str]:
    mlflow = kept.address(home, "mlflow")
    if mlflow is not None and found.services["mlflow"].state == "ready" and not servers.mlflow_answers(mlflow):
        yield f"MLflow at {mlflow} does not answer"


def _deployments(home: Path) -> Iterator[str]:
    """Raises DeadPart where Prefect does not answer."""
    api = kept.prefect_api(home)
    if api is None:
        return
    missing = [name for name in DEPLOYMENTS
               if servers.prefect_ask(api, servers.prefect_auth(home), "GET", f"/deployments/name/{name}") is None]
    if missing:
        yield f"not deployed: {', '.join(missing)}; `headway deploy` does it"
