"""Every mutant of mutants.py makes the test fail that is there against it, in the way that is expected of it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chaos.mutants import MUTANTS

ROOT = Path(__file__).resolve().parents[2]


def run_broken(names: list[str], report: Path) -> dict[str, dict[str, str]]:
    """Run the tests of these mutants in one session, each under its mutant; how each ended, by mutant."""
    plan = {MUTANTS[name].test: name for name in names}
    assert len(plan) == len(names), "two mutants have one test"
    env = os.environ | {"HEADWAY_MUTANTS": json.dumps(plan), "HEADWAY_MUTANTS_REPORT": str(report)}
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "tests.chaos.mutants", "-p", "no:cacheprovider",
                           *plan], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert report.exists(), done.stdout + done.stderr
    ended = json.loads(report.read_text())
    return {name: ended.get(test, {"outcome": "not run", "text": done.stdout}) for test, name in plan.items()}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, str]]:
    """How the test of a mutant ended. The quick ones run in one session, the slow ones in another."""
    directory, known = tmp_path_factory.mktemp("mutants"), dict[str, dict[str, str]]()

    def of(name: str) -> dict[str, str]:
        if name not in known:
            slow = MUTANTS[name].slow
            names = [other for other, mutant in MUTANTS.items() if mutant.slow == slow]
            known.update(run_broken(names, directory / f"report-{slow}.json"))
        return known[name]

    return of


def test_the_document_lists_every_mutant() -> None:
    text = (ROOT / "docs" / "chaos.md").read_text()
    assert [name for name in MUTANTS if f"| {name} |" not in text] == []


CASES = [pytest.param(name, id=name, marks=[pytest.mark.slow] if mutant.slow else [])
         for name, mutant in MUTANTS.items()]


@pytest.mark.parametrize("name", CASES)
def test_the_mutant_is_found(ended: Callable[[str], dict[str, str]], name: str) -> None:
    mutant, how = MUTANTS[name], ended(name)
    assert (how["outcome"], how.get("when")) == ("failed", "call"), f"{mutant.test} holds although: {name}\n{how}"
    said = "\n".join(line for line in how["text"].splitlines() if line.startswith(("E ", ">")))
    print(f"{name}: {mutant.test}\n{said}")
    assert re.search(mutant.reason, said), f"failed for another reason: {how['text']}"
