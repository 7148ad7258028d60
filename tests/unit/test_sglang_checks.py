"""What a start says of a server's version, and that the places that name tested versions agree."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from rl_core.rollout.sglang import checks
from rl_core.rollout.sglang.checks import TESTED, parse_version

ROOT = Path(__file__).resolve().parents[2]
PINS = (ROOT / "deployments" / "sglang" / "requirements-cpu.txt").read_text()

VERSIONS = {"0.5.23": (0, 5, 23), "0.5.23.post1": (0, 5, 23), "v0.6.0rc1": (0, 6, 0), "1.0": (1, 0, 0),
            "0.5.23+cu130": (0, 5, 23), "main": (), "": ()}


@pytest.mark.parametrize("text", VERSIONS)
def test_versions_are_read_as_they_are_written(text: str) -> None:
    assert parse_version(text) == VERSIONS[text]


def test_the_pin_and_the_extra_are_the_tested_range() -> None:
    pin = re.search(r"^sglang==(\S+)$", PINS, re.MULTILINE)
    assert pin is not None and TESTED[0] <= parse_version(pin[1]) < TESTED[1]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    first, below = (".".join(map(str, version)) for version in TESTED)
    assert extras["sglang"] == [f"sglang>={first},<{below}"]
    assert checks.tested_range() == f"{first} or newer, below {below}"
    assert f"**{pin[1]}**" in (ROOT / "docs" / "sglang.md").read_text()


def test_every_package_of_the_server_is_pinned_to_one_version() -> None:
    lines = [line for line in PINS.splitlines() if line and not line.startswith("#")]
    assert len(lines) > 100 and [line for line in lines if re.fullmatch(r"[A-Za-z0-9._-]+==[\w.]+", line) is None] == []
