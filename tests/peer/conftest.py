"""One process of TRL for all comparisons of a session: what it computes, by case."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_core.learner.policy import Policy, load_policy
from tests.peer.batch import Batch, job_of, make_batches, write_models
from tests.peer.cases import SAME, WAYS, Case
from tests.peer.differences import DIFFERENT, ONLY_THERE
from tests.peer.headway_step import Found, take_step

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(os.environ.get("HEADWAY_TRL_PYTHON", ROOT / ".venv-trl" / "bin" / "python"))
"""Of the environment of `make trl`; the variable is set by `make test-peer`, and then it must be there."""
DEADLINE_S = 900


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "peer" in item.path.parts:
            item.add_marker(pytest.mark.peer)


@dataclass(frozen=True, eq=False)
class Both:
    """The two sides of every case."""

    model: Path
    policy: Policy
    references: dict[str, Path]
    batches: dict[str, Batch]
    results: dict[str, Any]

    def trl(self, name: str, way: str = "own advantages") -> dict[str, Any]:
        """`loss`, `norm`, `advantages` of TRL."""
        return self.results["cases"][f"{name} / {way}"]

    def headway(self, case: Case, way: str = "own advantages", **learner: Any) -> Found:
        """The same of Headway, with other settings in place of those of the case."""
        batch = self.batches[case.batch]
        settings = case.learner | learner
        asked = settings["kl"].get("use", "none") != "none"
        return take_step(self.policy, batch, settings, reference=self.references[case.reference] if asked else None,
                         advantages=batch.advantages if "advantages" in WAYS[way] else None)


@pytest.fixture(scope="session")
def both(tmp_path_factory: pytest.TempPathFactory) -> Both:
    if not PYTHON.exists():
        absent = f"{PYTHON}: no environment with TRL; `make trl` makes it, `make test-peer` runs these"
        pytest.fail(absent) if "HEADWAY_TRL_PYTHON" in os.environ else pytest.skip(absent)
    place = tmp_path_factory.mktemp("peer")
    model, references = write_models(place)
    batches = make_batches(model)
    cases = SAME | DIFFERENT | {name: case for name, (case, _) in ONLY_THERE.items()}
    (place / "job.json").write_text(json.dumps(job_of(model, references, batches, cases, WAYS)))
    with (place / "log").open("w") as log:
        code = run_trl([str(ROOT / "tests" / "peer" / "trl_losses.py"), str(place / "job.json"),
                        str(place / "result.json")], log)
    assert code == 0, (place / "log").read_text()[-4000:]
    policy = load_policy(model, logits_chunk=64, dtype=torch.float32, device=torch.device("cpu"))
    return Both(model, policy, references, batches, json.loads((place / "result.json").read_text()))


def run_trl(words: list[str], log: Any) -> int:
    """A script in TRL's environment, with nothing of this one; its exit code."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return subprocess.run([str(PYTHON), *words], env=environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
                          stdout=log, stderr=subprocess.STDOUT, timeout=DEADLINE_S, check=False).returncode


@pytest.fixture(scope="session")
def same_as(both: Both) -> Callable[[str, str], tuple[dict[str, Any], Found]]:
    """Both sides of a case of the table; Headway's step is made once."""
    return cache(lambda name, way: (both.trl(name, way), both.headway(SAME[name], way)))
