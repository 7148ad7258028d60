"""Runs that are broken from outside: they end failed, with their first cause, everywhere the same."""

from __future__ import annotations

import time

import pytest

from rl_core.experience.ledger import claimed_steps, read_claim
from tests.runs import Command, Home, wait_until_gone


def break_step(command: Command) -> str:
    """A byte flipped in the shards of every claim that has no record yet, until the learner reads one of them."""
    run, spoiled, until = command.run, set[str](), time.monotonic() + 30
    while not run.result.exists() and time.monotonic() < until:
        step = claimed_steps(run)[-1]
        if run.record(step).exists():
            continue
        for group in read_claim(run, step).groups:
            path = run.shard(group.stream, group.seq)
            if str(path) not in spoiled:
                spoiled.add(str(path))
                raw = bytearray(path.read_bytes())
                raw[len(raw) // 2] ^= 1
                path.write_bytes(raw)
    return "ClaimedShardCorrupt"


def break_pump(command: Command) -> str:
    """An outcome that is not JSON: the pump's full listing raises."""
    command.run.outcomes.joinpath("e0-p0-t0.json").write_text("not JSON")
    return "BrokenFile"


BREAKS = {"step": (break_step, 2.0), "pump": (break_pump, 32.0)}
"""How it is broken, and seconds until that is met at the latest."""


@pytest.mark.parametrize("where", BREAKS)
def test_an_exception_ends_the_run_failed_with_its_first_cause(home: Home, where: str) -> None:
    key = f"broken-{where}"
    command = home.train(key, "total_steps=2000", "data.validation=null")
    command.wait_for_tracking()
    breaks, met_s = BREAKS[where]
    cause = breaks(command)
    begun = time.monotonic()
    assert command.wait(60) == 1, command.said
    assert time.monotonic() - begun <= 10 + 2 + met_s, "Failed within 10 s of the exception"
    assert f"failed: {cause}" in command.out
    assert command.err == ""
    assert command.json["status"] == "failed"
    flows, runs = home.states(key)
    assert (flows, runs) == (["FAILED"], ["FAILED"])
    assert home.call("status", key, "--json").json["cause"].startswith(cause)
    assert wait_until_gone(home, 10) == {}
