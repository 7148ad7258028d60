"""Documents describe the present: links lead somewhere, settings and metrics exist, worked examples compute, and what
the code cites is there."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

from rl_core.config import field_kinds
from rl_core.foreign_keys import FOREIGN_KEYS
from rl_core.metrics import BY_NAME
from tasks.service_doctor import DEPLOYMENTS

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")])
PARTS = {name.split(".")[0] for name in field_kinds() if "." in name}
METRIC_GROUPS = {name.split("/")[0] for name in BY_NAME}
FILE_ENDINGS = (".py", ".md", ".yaml", ".toml", ".json")
ROOMS = ("rl_core", "tasks", "flows", "deployments", "tests")

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
    theirs = {name for system in FOREIGN_KEYS.values() for name in system} | {"actor.ppo_mini_batch_size"}
    assert not named - known - (theirs if path.name in ("coming-from.md", "quickstart.md") else set())


@documents
def test_named_metrics_exist(path: Path) -> None:
    named = {name for name in re.findall(r"`([a-z_]+/[a-z0-9_]+)`", path.read_text())
             if name.split("/")[0] in METRIC_GROUPS}
    assert not named - set(BY_NAME) - set(DEPLOYMENTS)


def test_the_worked_example_of_staleness_computes() -> None:
    results = doctest.testfile(str(ROOT / "docs" / "staleness.md"), module_relative=False)
    assert results.attempted >= 15
    assert results.failed == 0


def citations(text: str) -> list[tuple[str, list[str]]]:
    """Documents that docstrings and comments name, with the sections they name of them.

    `(architecture.md section 4, experience-store.md 3.3 and 3.6)` ->
    `[("architecture.md", ["4"]), ("experience-store.md", ["3.3", "3.6"])]`.
    """
    joined = re.sub(r"\s*\n\s*#?\s*", " ", text)
    number = r"\d+(?:\.\d+)*"
    found = re.findall(rf"([A-Za-z][\w-]*\.md)((?:,? sections?)?,? {number}(?:(?:,| and) {number})*)?(?!\w)", joined)
    return [(name, re.findall(number, sections)) for name, sections in found]


def sections_of(path: Path) -> set[str]:
    """Numbers of the headings of a document."""
    return set(re.findall(r"^#{2,4} (\d+(?:\.\d+)*)\b", path.read_text(), re.MULTILINE))


GENERATED = {"results.md"}
"""Written beside its data by `make study-report`."""


@pytest.mark.parametrize(("text", "expected"), {
    "none": ("see docs/staleness.md.", [("staleness.md", [])]),
    "a word between": ("(models.md section 2).", [("models.md", ["2"])]),
    "two documents": ("(architecture.md section 4, experience-store.md 3.3 and 3.6)",
                      [("architecture.md", ["4"]), ("experience-store.md", ["3.3", "3.6"])]),
    "over a line's end": ("the same (experience-store.md\n# 3.1, 3.8).", [("experience-store.md", ["3.1", "3.8"])]),
    "other numbers": ("(algorithms.md), 5 of them", [("algorithms.md", [])]),
}.values(), ids=lambda value: None)
def test_citations_are_understood(text: str, expected: list[tuple[str, list[str]]]) -> None:
    assert citations(text) == expected


def test_cited_documents_and_sections_exist() -> None:
    """A reader of the repository finds what a docstring or a comment refers to."""
    dead: list[str] = []
    cited = 0
    for path in (path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))):
        for name, sections in citations(path.read_text()):
            document = ROOT / "docs" / name
            there = sections_of(document) if document.exists() else set[str]()
            cited += 1
            dead += [f"{path.relative_to(ROOT)}: {name} {section}" for section in sections if section not in there]
            if not document.exists() and not (ROOT / name).exists() and name not in GENERATED:
                dead.append(f"{path.relative_to(ROOT)}: {name}")
    assert not dead, "\n".join(dead)
    assert cited >= 30


def test_documents_cite_sections_that_are_there() -> None:
    """`([algorithms](algorithms.md) 15)` of another document, `section 9` of the own one."""
    number, dead, cited = r"(\d+(?:\.\d+)*)(?!\w|\.\d)", list[str](), 0
    for path in sorted((ROOT / "docs").glob("*.md")):
        text = re.sub(r"\s+", " ", path.read_text())
        others = re.findall(rf"\]\(([\w-]+\.md)\),?(?: section)? {number}", text)
        others += [(name, section) for section, name in
                   re.findall(rf"\bsection {number} of \[[^]]*\]\(([\w-]+\.md)\)", text)]
        own = re.findall(rf"(?<!\) )(?<!\), )\bsection {number}(?! of \[)", text) if sections_of(path) else []
        for name, section in [*others, *((path.name, section) for section in own)]:
            cited += 1
            if section not in sections_of(ROOT / "docs" / name):
                dead.append(f"{path.name}: {name} {section}")
    assert not dead, "\n".join(dead)
    assert cited >= 50


def test_numbered_sections_follow_each_other_and_what_is_not_there_comes_last() -> None:
    for path in sorted((ROOT / "docs").glob("*.md")):
        heads = re.findall(r"^## (\d+) (.*)$", path.read_text(), re.MULTILINE)
        assert [int(number) for number, _ in heads] == list(range(1, len(heads) + 1)), path.name
        assert "Not there yet" not in [title for _, title in heads[:-1]], path.name


def test_documents_are_cited_by_their_file() -> None:
    """Without its ending a document would escape the test above."""
    names = "|".join(path.stem for path in (ROOT / "docs").glob("*.md"))
    bare = [f"{path.relative_to(ROOT)}: {found}" for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))
            for found in re.findall(rf"docs/(?:{names})\b(?!\.md)", path.read_text())]
    assert not bare
