"""What `headway deploy` registers: flows that are there, with flat parameters that are typed and described."""

from __future__ import annotations

import importlib
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect import Flow
from prefect.utilities.callables import parameter_schema

from rl_core.run_dir import replace_file, to_json
from tasks.forking import fork_of
from tasks.kept import POOL
from tasks.paths import run_dir
from tasks.service_doctor import DEPLOYMENTS
from tasks.silent_runs import FLOWS

LISTED: list[dict[str, Any]] = yaml.safe_load(files("deployments").joinpath("prefect.yaml").read_text())["deployments"]
FLAT = {"string", "integer", "boolean", "number"}
LISTS = {"overrides": {"object"}, "seeds": {"array"}, "matrix": {"array"}}


def flow_of(entrypoint: str) -> Flow[Any, Any]:
    module, _, name = entrypoint.rpartition(".")
    return getattr(importlib.import_module(module), name)


def test_the_doctor_asks_for_what_is_deployed() -> None:
    names = {f"{flow_of(one['entrypoint']).name}/{one['name']}" for one in LISTED}
    assert names == set(DEPLOYMENTS)
    assert {name.split("/")[0] for name in names} <= set(FLOWS), "without a heartbeat they would be Running for ever"
    assert {one["work_pool"]["name"] for one in LISTED} == {POOL}


@pytest.mark.parametrize("entrypoint", [one["entrypoint"] for one in LISTED])
def test_parameters_are_flat_typed_and_described(entrypoint: str) -> None:
    fields = parameter_schema(flow_of(entrypoint)).properties
    assert fields
    for name, field in fields.items():
        kinds = {one.get("type") for one in field.get("anyOf", [field])} - {"null"}
        assert kinds <= FLAT or kinds == LISTS.get(name), (name, field)
        assert field.get("description", "").endswith("."), name


def test_a_retry_of_a_fork_goes_on_with_the_fork_that_it_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path))
    for key, flow_run in {"sort": "a", "sort~1": "b", "sort~2": None, "other~1": "c"}.items():
        replace_file(run_dir(key).attempt(1), to_json({"prefect_run_id": flow_run}))
    assert [fork_of("sort", flow_run) for flow_run in ("a", "b", "c", None)] == [None, "sort~1", None, None]
