"""Documents describe the present: links lead somewhere, settings and metrics exist, worked examples compute."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

from rl_core.config import field_kinds
from rl_core.metrics import BY_NAME

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")])
PARTS = {name.split(".")[0] for name in field_kinds() if "." in name}
METRIC_GROUPS = {name.split("/")[0] for name in BY_NAME}
FILE_ENDINGS = (".py", ".md", ".yaml", ".toml", ".json")

documents = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)


@documents
def test_links_lead_somewhere(path: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text())
    dead = [target for target in targets if "://" not in target and not (path.parent / target).exists()]
    assert not dead


@documents
def test_named_settings_exist(path: Path) -> None:
    """`part.field` in backticks, and the keys of `--set`."""
    text = path.read_text()
    known = set(field_kinds())
    named = {name for name in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?:[:=][^`]*)?`", text)
             if name.split(".")[0] in PARTS and not name.endswith(FILE_ENDINGS)}
    named |= set(re.findall(r"--set ([a-z_.]+)=", text))
    assert not named - known - {"actor.ppo_mini_batch_size"}


@documents
def test_named_metrics_exist(path: Path) -> None:
    named = {name for name in re.findall(r"`([a-z_]+/[a-z0-9_]+)`", path.read_text())
             if name.split("/")[0] in METRIC_GROUPS}
    assert not named - set(BY_NAME)


def test_the_worked_example_of_staleness_computes() -> None:
    results = doctest.testfile(str(ROOT / "docs" / "staleness.md"), module_relative=False)
    assert results.attempted >= 15
    assert results.failed == 0
