"""`headway deploy`: a schedule or a parameter that cannot work is refused before anything is registered."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from flows.deploying import deployed_lines, nightly_parameters
from rl_core.errors import ConfigError, DeadPart
from tasks import servers
from tasks.deploying import _with_parameters, check_cron, server

CRONS = {
    "a typo": ("0 25 * * *", None, "no schedule"), "four fields": ("0 2 * *", None, "it has 4 fields"),
    "six fields": ("0 0 2 * * *", None, "it has 6 fields"), "a word": ("daily", None, "it has 1 fields"),
    "random": ("R 2 * * *", None, "no schedule"), "no time zone": ("0 2 * * *", "Berlin", "--timezone 'Berlin'")}


@pytest.mark.parametrize(("cron", "timezone", "why"), CRONS.values(), ids=CRONS)
def test_a_schedule_that_is_none_is_refused(cron: str, timezone: str | None, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        check_cron(cron, timezone)


def test_schedules_are_taken() -> None:
    for cron, timezone in (("0 2 * * *", None), ("*/2 * * * *", "Europe/Berlin"), ("0 2 * * mon-fri", None),
                           ("none", None)):
        check_cron(cron, timezone)


def test_parameters_are_those_of_the_flow() -> None:
    assert nightly_parameters([]) == {}
    assert nightly_parameters(["preset=tiny-cpu", 'overrides={"seed": 3}', "seeds=[1, 2]", "baseline=null"]) == {
        "preset": "tiny-cpu", "overrides": {"seed": 3}, "seeds": [1, 2], "baseline": None}


PARAMETERS = {
    "no value": ("preset", "write NAME=VALUE"), "unknown": ("presets=x", "no such parameter; there are preset"),
    "wrong type": ("seeds=x", "seeds"), "out of range": ("accuracy_gain=2", "less than or equal to 1"),
    "an unknown preset": ("preset=tiny-gpu", "tiny-cpu"), "an address": ("notify=https://x/s3cr3t", "pattern")}


@pytest.mark.parametrize(("param", "why"), PARAMETERS.values(), ids=PARAMETERS)
def test_a_parameter_that_cannot_work_is_refused(param: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        nightly_parameters([param])
    assert "s3cr3t" not in str(refused.value)


def test_parameters_stay_until_they_are_given_or_taken_away(tmp_path: Path) -> None:
    (tmp_path / "services").mkdir()
    source = tmp_path / "prefect.yaml"
    source.write_text(yaml.safe_dump({"deployments": [{"name": "adhoc"}, {"name": "nightly", "parameters": {"a": 1}}]}))
    with _with_parameters(tmp_path, source, {}, {}) as file:
        assert file == source
    with _with_parameters(tmp_path, source, {"b": 2, "c": 3}, {"c": None, "d": 4}) as file:
        adhoc, nightly = yaml.safe_load(file.read_text())["deployments"]
    assert (adhoc, nightly["parameters"]) == ({"name": "adhoc"}, {"a": 1, "b": 2, "d": 4}) and not file.exists()


def test_the_schedule_is_said() -> None:
    def lines(schedules: list[str]) -> list[str]:
        one = {"name": "nightly/nightly", "url": "http://x", "schedules": schedules}
        return deployed_lines({"directory": "/d", "deployments": [one]})

    assert "nightly/nightly runs at 0 2 * * * UTC" in lines(["0 2 * * * UTC"])
    assert any("--cron" in line for line in lines([]))


REFUSED = {
    "no server at all": ({}, "`headway services up`, or name one of your own by PREFECT_API_URL"),
    "a page": ({"PREFECT_API_URL": "http://host:4200"}, "write http://host:4200/api"),
    "a password in it": ({"PREFECT_API_URL": "http://me:s3cr3t@host:4200/api"}, r"me:\*\*\*@host:4200"),
    "a port that is no number": ({"PREFECT_API_URL": "http://host:port/api"}, "write http://host:4200/api")}


@pytest.mark.parametrize(("environ", "why"), REFUSED.values(), ids=REFUSED)
def test_without_a_server_nothing_is_registered(environ: dict[str, str], why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=why):
        server(tmp_path, environ)


def test_a_server_that_does_not_answer_is_a_dead_part(tmp_path: Path) -> None:
    with pytest.raises(DeadPart, match="does not answer, or refuses who has no PREFECT_API_AUTH_STRING"):
        server(tmp_path, {"PREFECT_API_URL": f"http://{servers.HOST}:{servers.free_port()}/api"})
