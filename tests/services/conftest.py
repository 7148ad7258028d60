"""One HEADWAY_HOME with kept services for the tests of a module; another one, without, for those of bad set-ups."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kept import KeptHome


@pytest.fixture(scope="module")
def kept_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeptHome]:
    """Services are up, and deployed."""
    home = KeptHome.at(tmp_path_factory.mktemp("kept"))
    home.up()
    deployed = home.call("deploy", "--json")
    assert deployed.process.returncode == 0, deployed.said
    yield home
    home.down()


@pytest.fixture
def bare_home(tmp_path: Path) -> Iterator[KeptHome]:
    """Nothing is up."""
    home = KeptHome.at(tmp_path / "home")
    home.path.mkdir()
    yield home
    home.down()
    shutil.rmtree(home.path, ignore_errors=True)
