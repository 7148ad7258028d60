"""What a fresh process loads: settings without torch, the packages of one tree only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "transformers", "tensordict", "ray", "mlflow", "prefect")
LIGHT = (
    "rl_core.config",
    "rl_core.types",
    "rl_core.errors",
    "rl_core.plan",
    "rl_core.run_dir",
    "rl_core.seeds",
    "rl_core.versions",
    "rl_core.records",
    "rl_core.metrics",
    "rl_core.experience",
)


def python(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter whose working directory comes before this tree, as with `python -m`."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("module", LIGHT)
def test_settings_and_nouns_load_nothing_heavy(tmp_path: Path, module: str) -> None:
    done = python(f"import json, sys, {module}; print(json.dumps(sorted(sys.modules)))", tmp_path)
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout)).isdisjoint(HEAVY)


def test_packages_of_one_tree_import(tmp_path: Path) -> None:
    done = python("import flows, tasks, deployments; print('fine')", tmp_path)
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr


@pytest.mark.parametrize("foreign", ["flows/__init__.py", "tasks/mine.py"], ids=["package", "directory without init"])
def test_a_foreign_sibling_is_refused_by_name(tmp_path: Path, foreign: str) -> None:
    path = tmp_path / foreign
    path.parent.mkdir()
    path.write_text("")
    name = path.parent.name
    done = python("import deployments", tmp_path)
    # A directory without __init__ hides nothing here: this tree's package is a regular one on the path behind it.
    if foreign.endswith("__init__.py"):
        assert done.returncode == 1
        last = done.stderr.strip().splitlines()[-1]
        assert last.startswith(f"ImportError: Headway's package `{name}` belongs to {ROOT} but was found in {tmp_path}")
        assert last.endswith(f"rename your own `{name}`")
    else:
        assert done.returncode == 0, done.stderr
