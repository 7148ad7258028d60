"""`headway deploy`: the words around it."""

from __future__ import annotations

import inspect
import json
import logging
import os
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from flows.command import answer, hush
from flows.presets import load_preset, nested
from rl_core.errors import ConfigError
from rl_core.plan import check_tracking


def deploy(*, directory: str | None, prefect_file: str | None, cron: str | None, timezone: str | None,
           params: Sequence[str], as_json: bool) -> int:
    """Register the deployments; returns the exit code. `cron`, `timezone` and `params` are of the nightly."""
    hush()
    from tasks import deploying
    from tasks.paths import headway_home

    place = Path(directory or os.getcwd()).resolve()
    source = Path(prefect_file).resolve() if prefect_file else Path(str(files("deployments") / "prefect.yaml"))

    def deployed() -> dict[str, Any]:
        if not place.is_dir():
            raise ConfigError(f"--directory {directory}: no such directory")
        if timezone is not None and cron is None:
            raise ConfigError(f"--timezone {timezone}: is of --cron; give both")
        made = deploying.deploy(headway_home(), place, source, cron=cron, timezone=timezone,
                                parameters=nightly_parameters(params))
        return {"directory": str(place), "deployments": made}

    return answer(deployed, deployed_lines, as_json=as_json)


def nightly_parameters(params: Sequence[str]) -> dict[str, Any]:
    """`["preset=tiny-cpu", 'overrides={"seed": 3}']` -> `{"preset": "tiny-cpu", "overrides": {"seed": 3}}`; null takes
    one away. Raises ConfigError for what the nightly does not take."""
    found: dict[str, Any] = {}
    for param in params:
        name, equals, value = param.partition("=")
        if not equals or not name:
            raise ConfigError(f"--param {param!r}: write NAME=VALUE")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    if not found:
        return found
    from prefect.exceptions import ParameterTypeError, SignatureMismatchError

    from flows.nightly import nightly
    from tasks.destination import flatten

    known = inspect.signature(nightly.fn).parameters
    if unknown := sorted(set(found) - set(known)):
        raise ConfigError(f"--param {unknown[0]}: the nightly has no such parameter; there are {', '.join(known)}")
    given = {name: value for name, value in found.items() if value is not None}
    logger, before = logging.getLogger("prefect.flows"), logging.getLogger("prefect.flows").disabled
    logger.disabled = True  # it says the same, with all that was given
    try:
        nightly.validate_parameters(given)
    except (ParameterTypeError, SignatureMismatchError) as error:
        raise ConfigError(f"--param: {error}") from None
    finally:
        logger.disabled = before
    if "preset" in given:
        load_preset(given["preset"])
    for tree in (given.get("overrides") or {}, *(given.get("matrix") or ())):  # Prefect stores and shows them
        check_tracking(flatten(nested(tree)).get("tracking.uri"))
    return found


def deployed_lines(report: Mapping[str, Any]) -> list[str]:
    """Each deployment with its page, and how one is run."""
    names = [one["name"] for one in report["deployments"]]
    width = max(map(len, names), default=0)
    times = [f"{one['name']} runs at {when}" for one in report["deployments"] for when in one["schedules"]]
    return [*(f"{one['name']:<{width}}  {one['url']}" for one in report["deployments"]),
            *(times or ["nothing is scheduled: --cron '0 2 * * *' has the nightly run at two every night"]),
            f"relative paths of their runs begin in {report['directory']}",
            "run one: eval \"$(headway env)\" && prefect deployment run 'train/adhoc' --param preset=tiny-cpu --watch"]
