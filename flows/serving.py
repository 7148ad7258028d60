"""`headway services up | down | status | doctor`, `headway env`, `headway ui`: the words around the kept services."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping
from typing import Any

from flows.command import answer, guarded, leave_on_sigterm, show
from flows.console import Console, duration

TITLES = {"prefect": "Prefect", "mlflow": "MLflow", "worker": "worker"}


def up(*, prefect_port: int | None = None, mlflow_port: int | None = None, prefect_database: str | None = None,
       mlflow_database: str | None = None, as_json: bool = False, pages: bool = False) -> int:
    """Run `headway services up`, and with `pages` `headway ui`; returns the exit code."""
    from tasks import keeping
    from tasks.paths import headway_home

    console = Console()

    def said(name: str, seconds: float) -> None:
        if not as_json:
            console.line(f"  {TITLES[name]:<12} {seconds:6.1f} s")

    def work() -> int:
        home = headway_home()
        keeping.up(home, prefect_port=prefect_port, mlflow_port=mlflow_port, prefect_database=prefect_database,
                   mlflow_database=mlflow_database, on_ready=said)
        show(keeping.status(home), page_lines if pages else status_lines, as_json=as_json)
        return 0

    leave_on_sigterm()
    return guarded(work, stopped="interrupted; what was begun goes on: `headway services down` ends it")


def down(*, force: bool, as_json: bool) -> int:
    """Run `headway services down`; returns the exit code."""
    from tasks import keeping
    from tasks.paths import headway_home

    def work() -> int:
        ended = keeping.down(headway_home(), force=force)
        show({"ended": ended}, lambda report: [f"ended: {', '.join(TITLES[name] for name in ended)}" if ended else
                                               "nothing was up"], as_json=as_json)
        return 0

    return guarded(work)


def show_status(*, as_json: bool) -> int:
    """Run `headway services status`: 0 if all is up, else 1."""
    from tasks import keeping
    from tasks.paths import headway_home

    return answer(lambda: keeping.status(headway_home()), status_lines, as_json=as_json,
                  holds=lambda report: report["up"])


def show_diagnosis(*, as_json: bool) -> int:
    """Run `headway services doctor`: 0 if nothing is wrong, else 1."""
    from tasks.paths import headway_home
    from tasks.service_doctor import examine

    return answer(lambda: examine(headway_home()), diagnosis_lines, as_json=as_json,
                  holds=lambda report: report["healthy"])


def show_environment() -> int:
    """Run `headway env`: lines for the `eval` of a POSIX shell."""
    from tasks import keeping
    from tasks.paths import headway_home

    def work() -> int:
        Console().lines(environment_lines(keeping.environment(headway_home()), keeping.unset_names()))
        return 0

    return guarded(work)


def status_lines(report: Mapping[str, Any]) -> list[str]:
    """A line for each service: state, address, memory, how often it was started again, and how it ended then."""
    if not report["services"]:
        return [f"no services are kept under {report['home']}: `headway services up`"]
    lines: list[str] = []
    for name, one in report["services"].items():
        where = one["address"] or ("flow runs: " + (", ".join(report["flow_runs"]) or "none"))
        memory = f"{one['memory_bytes'] / 2**20:.0f} MB" if one["memory_bytes"] else "-"
        again = f"  restarted {one['restarts']} times" if one["restarts"] else ""
        lines.append(f"{TITLES[name]:<8} {one['state'] if one['alive'] or one['state'] != 'ready' else 'dead':<9} "
                     f"{memory:>7}  {where}{again}")
        if one["why"]:
            lines.append(f"         last end: {one['why'].splitlines()[0]}")
    lines += [f"{TITLES[name]:<8} data in {where}" for name, where in report["databases"].items()]
    if report["supervisor"] is None:
        lines.append("nobody watches them: `headway services up` does")
    elif report["since_us"]:
        lines.append(f"watched by pid {report['supervisor']} for {duration(time.time() - report['since_us'] / 1e6)}")
    return lines


def page_lines(report: Mapping[str, Any]) -> list[str]:
    """Addresses of the pages, and what Prefect's asks for."""
    services = report["services"]
    return [f"MLflow   {services['mlflow']['address']}", f"Prefect  {services['prefect']['address']}",
            f"         asks for user:password, which stands in {report['secret']}",
            "`headway services down` ends both"]


def diagnosis_lines(report: Mapping[str, Any]) -> list[str]:
    """What is wrong, then what is worth knowing."""
    lines = [f"wrong: {text}" for text in report["findings"]] + [f"note:  {text}" for text in report["notes"]]
    return lines if report["findings"] else [*lines, "nothing is wrong"]


def environment_lines(env: Mapping[str, str], unset: list[str]) -> list[str]:
    """`export NAME='value'` for each, after what is in their way."""
    exports = (f"export {name}={shlex.quote(value)}" for name, value in env.items())
    return [*(f"unset {name}" for name in unset), *exports]

