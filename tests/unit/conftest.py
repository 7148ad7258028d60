"""Fixtures shared by unit tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_core.run_dir import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run directory with nothing in it."""
    return RunDir(tmp_path / "run")
