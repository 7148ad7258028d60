"""Imports go one way, and ray, mlflow and prefect stand behind their doors.

Read from the source, so that imports inside functions and under TYPE_CHECKING count too. `lint-imports`, run beside it,
checks chains of imports over several modules.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HOUSE = ("rl_core", "tasks", "flows", "deployments")  # each may import itself and what stands before it
DOORS = {
    "ray": ("tasks/cluster.py",),
    "mlflow": ("tasks/tracking/",),
    "prefect": ("tasks/", "flows/"),
}


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """`(line, module)` of every import in a file, wherever it stands; also `import_module("x")` with a constant."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=str(module), level=0):
                yield node.lineno, module
            case ast.Call(func=ast.Attribute(attr="import_module") | ast.Name(id="import_module" | "__import__"),
                          args=[ast.Constant(value=str(module)), *_]):
                yield node.lineno, module
            case _:
                pass


def violations(root: Path) -> list[str]:
    """`file:line imports x` for each import that goes the wrong way or past a door, sorted."""
    found: list[str] = []
    for rank, package in enumerate(HOUSE):
        for path in (root / package).rglob("*.py"):
            name = path.relative_to(root).as_posix()
            for line, module in imports_of(path):
                top = module.split(".")[0]
                upwards = top in HOUSE and HOUSE.index(top) > rank
                past_door = top in DOORS and not name.startswith(DOORS[top])
                if upwards or past_door:
                    found.append(f"{name}:{line} imports {module}")
    return sorted(found)


def test_imports_go_one_way_and_through_their_doors() -> None:
    assert violations(ROOT) == []


@pytest.mark.parametrize(
    ("name", "source", "expected"),
    [
        ("rl_core/learner.py", "def f():\n    import ray", ["rl_core/learner.py:2 imports ray"]),
        ("rl_core/plan.py", "from tasks.owner import set_up", ["rl_core/plan.py:1 imports tasks.owner"]),
        ("tasks/training.py", "import ray.util", ["tasks/training.py:1 imports ray.util"]),
        ("tasks/cluster.py", "import ray", []),
        ("tasks/report.py", "from mlflow import log_metric", ["tasks/report.py:1 imports mlflow"]),
        ("tasks/tracking/mirror.py", "import mlflow", []),
        ("flows/train.py", "from prefect import flow\nfrom tasks import training", []),
        ("deployments/load.py", "import prefect", ["deployments/load.py:1 imports prefect"]),
        ("tasks/x.py", "import importlib\nimportlib.import_module('flows.cli')", ["tasks/x.py:2 imports flows.cli"]),
    ],
    ids=lambda value: value if isinstance(value, str) and value.endswith(".py") else "",
)
def test_a_wrong_import_is_found(tmp_path: Path, name: str, source: str, expected: list[str]) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.write_text(source)
    assert violations(tmp_path) == expected


def test_import_linter_contracts_hold() -> None:
    lint_imports = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([lint_imports, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
