"""One HEADWAY_HOME for all pipeline tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tasks import keeper
from tests.runs import Home


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """Ends what a failed test left behind, by the ids that the runs wrote down."""
    made = Home(tmp_path_factory.mktemp("home"))
    yield made
    for state_dir in made.path.glob("runs/*/services"):
        state = keeper.read_state(state_dir)
        if state is not None:
            keeper.end_services(state_dir, state, 2.0)
