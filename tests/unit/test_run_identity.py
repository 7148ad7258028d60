"""run.json and inputs.json: what every later start is checked against."""

from __future__ import annotations

import pytest

from rl_core.errors import ConfigError
from rl_core.experience.discovery import run_digests
from rl_core.run_dir import RunDir, put_if_absent, to_json
from rl_core.run_identity import check_inputs, prompt_rows


def test_the_first_start_says_what_the_inputs_are(run: RunDir) -> None:
    assert prompt_rows(run) is None
    check_inputs(run, {"model": "m", "data": "d"}, rows=12)
    assert prompt_rows(run) == 12
    assert run_digests(run) == {"model": "m", "data": "d"}
    check_inputs(run, {"data": "d"})  # a later look at a part of them
    assert prompt_rows(run) == 12
    with pytest.raises(ConfigError, match=r"data changed since the run began"):
        check_inputs(run, {"model": "m", "data": "e"}, rows=11)


def test_a_run_that_did_not_say_how_many_prompts_it_has_is_still_read(run: RunDir) -> None:
    put_if_absent(run.inputs, to_json({"digests": {"data": "d"}}))
    check_inputs(run, {"data": "d"}, rows=12)
    assert prompt_rows(run) is None
