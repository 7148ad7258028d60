"""One HEADWAY_HOME for all pipeline tests."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks import keeper
from tests.runs import Home

MODELS = Path(__file__).resolve().parents[2] / "build" / "test-models"
"""The tiny models of earlier sessions, by the digest of their settings; `make clean` removes them."""


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """Ends what a failed test left behind, by the ids that the runs wrote down."""
    made = Home(tmp_path_factory.mktemp("home"))
    if MODELS.is_dir():
        shutil.copytree(MODELS, made.path / "models")
    yield made
    for model in made.path.glob("models/tiny-*"):
        keep_model(model, MODELS / model.name)
    for state_dir in made.path.glob("runs/*/services"):
        state = keeper.read_state(state_dir)
        if state is not None:
            keeper.end_services(state_dir, state, 2.0)


def keep_model(made: Path, kept: Path) -> None:
    """Copy beside and rename: another session may do the same."""
    if kept.exists():
        return
    aside = MODELS.with_name(f"test-models-{made.parents[1].parent.name}-{made.parents[1].name}") / made.name
    shutil.copytree(made, aside)
    MODELS.mkdir(parents=True, exist_ok=True)
    try:
        aside.rename(kept)
    except OSError:
        shutil.rmtree(aside)
    aside.parent.rmdir()
