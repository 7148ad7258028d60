"""One HEADWAY_HOME for all pipeline tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks import keeper
from tests.runs import Home

MODELS = Path(__file__).resolve().parents[2] / "build" / "test-models"
"""Tiny models by the digest of their settings, made by the first who needs one; `make clean` removes them."""


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """Its models are those of all test processes, side by side and later. Ends what a failed test left behind, by the
    ids that the runs wrote down."""
    made = Home(tmp_path_factory.mktemp("home"))
    MODELS.mkdir(parents=True, exist_ok=True)
    (made.path / "models").symlink_to(MODELS, target_is_directory=True)
    yield made
    for state_dir in made.path.glob("runs/*/services"):
        state = keeper.read_state(state_dir)
        if state is not None:
            keeper.end_services(state_dir, state, 2.0)
