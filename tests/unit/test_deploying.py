"""`headway deploy`: a schedule or a parameter that cannot work is refused before anything is registered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.deploying import deployed_lines, nightly_parameters
from rl_core.errors import ConfigError, DeadPart
from tasks import servers
from tasks.deploying import _registered, _schedule, _with_parameters, check_cron, server
from tests.answering import answering

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
    "no address at all": ("notify=", "pattern"),
    "an unknown preset": ("preset=tiny-gpu", "tiny-cpu"), "an address": ("notify=https://x/s3cr3t", "pattern"),
    "a password": ('overrides={"tracking.uri": "http://me:s3cr3t@host"}', r"tracking\.uri: .*env:NAME"),
    "a password in a matrix": ('matrix=[{"tracking": {"uri": "http://me:s3cr3t@host"}}]', r"tracking\.uri: .*env:NAME")}


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


# -- what the server says of it

NIGHTLY: dict[str, tuple[int, Any]] = {
    "GET /deployments/name/nightly/nightly": (200, {"id": "d"}),
    "GET /deployments/d/schedules": (200, [{"id": "s1"}, {"id": "s2"}]),
    "DELETE /deployments/d/schedules/s1": (204, None), "DELETE /deployments/d/schedules/s2": (404, None),
    "POST /deployments/d/schedules": (201, [])}
"""One of two schedules is taken away by somebody else meanwhile."""


def test_a_schedule_replaces_those_that_were_there() -> None:
    with answering(NIGHTLY) as prefect:
        _schedule(prefect.page, None, "none", None)
        assert prefect.asked == [*NIGHTLY][:4]
        prefect.asked.clear()
        _schedule(prefect.page, None, "0 2 * * *", None)
        assert prefect.asked == [*NIGHTLY]


@pytest.mark.parametrize("silent", NIGHTLY)
def test_a_silent_server_has_not_changed_the_schedule(silent: str) -> None:
    with answering({asked: said for asked, said in NIGHTLY.items() if asked != silent}) as prefect:
        with pytest.raises(DeadPart, match=f"did not answer .* to {silent}"):
            _schedule(prefect.page, None, "0 2 * * *", None)
        assert prefect.asked[-1] == silent


def test_a_deployment_that_is_gone_takes_no_schedule() -> None:
    with answering({"GET /deployments/name/nightly/nightly": (404, None)}) as prefect, \
            pytest.raises(DeadPart, match="has no nightly/nightly to give the schedule 'none' to"):
        _schedule(prefect.page, None, "none", None)


def listed(**found: str) -> dict[str, tuple[int, Any]]:
    """A server with deployments called alike: id of each, and its entrypoint; the flow of `d` is `f-d`."""
    return {"POST /deployments/filter": (200, [
        {"id": one, "flow_id": f"f-{one}", "entrypoint": entrypoint} for one, entrypoint in found.items()])}


def test_a_deployment_is_told_from_one_of_another_flow_that_is_called_the_same() -> None:
    found = listed(theirs="theirs.py:night", ours="flows.nightly.nightly", before="flows.nightly.nightly")
    with answering(found | {"GET /flows/f-ours": (200, {"name": "nightly"})}) as prefect:
        one = _registered("http://page", prefect.page, None, "nightly", "flows.nightly.nightly", "")
        assert (one["name"], one["id"]) == ("nightly/nightly", "ours")
        with pytest.raises(DeadPart, match="did not register 'nightly':\nits words"):
            _registered("http://page", prefect.page, None, "nightly", "mine.py:nightly", "its words")


@pytest.mark.parametrize(("answers", "why"), {
    "of the deployment": ({}, "did not answer .* to POST /deployments/filter"),
    "of its flow": (listed(d="x.y"), "did not answer .* to GET /flows/f-d"),
    "that the flow is gone": (listed(d="x.y") | {"GET /flows/f-d": (404, None)}, "did not register 'nightly'"),
}.values(), ids=["of the deployment", "of its flow", "that the flow is gone"])
def test_what_a_server_does_not_say_of_a_deployment_is_a_dead_part(answers: dict[str, tuple[int, Any]], why: str
                                                                   ) -> None:
    with answering(answers) as prefect, pytest.raises(DeadPart, match=why):
        _registered("http://page", prefect.page, None, "nightly", "x.y", "")
