"""Fixtures shared by unit tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rl_core.run_dir import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run directory with nothing in it."""
    return RunDir(tmp_path / "run")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Torch computes with one thread, as engine and learner set it by default, whatever the machine has: the same bits
    for a row alone and among others are promised for one. Tests that never import torch do not wait for it."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
