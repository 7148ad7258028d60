"""`headway deploy`: the words around it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from flows.command import FAILED, INTERRUPTED, failed, show
from rl_core.errors import BrokenFile, ConfigError, DeadPart


def deploy(*, directory: str | None, prefect_file: str | None, as_json: bool) -> int:
    """Register the deployments; returns the exit code."""
    from tasks import deploying
    from tasks.paths import headway_home

    place = Path(directory or os.getcwd()).resolve()
    source = Path(prefect_file).resolve() if prefect_file else Path(str(files("deployments") / "prefect.yaml"))
    try:
        if not place.is_dir():
            raise ConfigError(f"--directory {directory}: no such directory")
        made = deploying.deploy(headway_home(), place, source)
    except (ConfigError, BrokenFile) as error:
        return failed(error)
    except DeadPart as error:
        return failed(error, FAILED)
    except KeyboardInterrupt:
        return INTERRUPTED
    show({"directory": str(place), "deployments": made}, deployed_lines, as_json=as_json)
    return 0


def deployed_lines(report: Mapping[str, Any]) -> list[str]:
    """Each deployment with its page, and how one is run."""
    names = [one["name"] for one in report["deployments"]]
    width = max(map(len, names), default=0)
    return [*(f"{one['name']:<{width}}  {one['url']}" for one in report["deployments"]),
            f"relative paths of their runs begin in {report['directory']}",
            "run one: eval \"$(headway env)\" && prefect deployment run 'train/adhoc' --param preset=tiny-cpu --watch"]
