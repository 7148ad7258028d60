"""`pytest --hook ./mine.py:loss`: the contract of a hook, asked of a function of yours and of nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

CONTRACT = "test_hooks.py"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--hook", action="append", default=[], metavar="[KIND=]FILE:FUNCTION",
                     help="ask the contract of this function's kind (docs/hooks.md), and run no other test")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if config.getoption("--hook") and collection_path.suffix == ".py" and collection_path.name != CONTRACT:
        return True
    return None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "own_hook" in metafunc.fixturenames:
        metafunc.parametrize("own_hook", metafunc.config.getoption("--hook"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--hook"):
        items[:] = [item for item in items if "own_hook" in getattr(item, "fixturenames", ())]
