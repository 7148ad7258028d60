"""The wheel as people get it: what is in it, what it says of itself, and a run from it beside somebody's own packages.

It is built from a copy of the tree and installed into an environment of its own, which has nothing else. Third-party
packages are those of the environment that runs the tests, by a path file: that the wheel's requirements admit them is
checked, that an index would choose the same is not.
"""

from __future__ import annotations

import ast
import email
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from email.message import Message
from importlib.metadata import packages_distributions, version
from pathlib import Path
from urllib.parse import urlparse

import pytest
from packaging.requirements import Requirement

import headway
from flows.presets import preset_names
from rl_core.records import recorded_steps
from tasks import servers
from tests.runs import Home, wait_until_gone

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("deployments", "flows", "rl_core", "tasks")
HOSTS = {"www.prefect.io", "www.ray.io", "mlflow.org", "keepachangelog.com", "semver.org"}
"""That the description may name."""
WATCHED = '''
"""A package of somebody's own, which notes who imports it."""
import os
from pathlib import Path
with open(Path(__file__).with_name("imported-by"), "a") as file:
    file.write(Path(f"/proc/{os.getpid()}/cmdline").read_text().replace(chr(0), " ") + chr(10))
'''
REWARD = '''
from tasks.words import share


def score(answer, truth):
    return share(answer, truth)
'''
WORDS = '''
def share(answer, truth):
    """Share of digits that stand at their place."""
    return sum(a == b for a, b in zip(answer, truth)) / len(truth)
'''


@dataclass(frozen=True)
class Installed:
    """An environment with the wheel, and a working directory that has packages of Headway's names."""

    wheel: Path
    environment: Path
    work: Path

    def run(self, home: Home, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        env = {name: value for name, value in os.environ.items()
               if not name.startswith(("PREFECT_", "RAY_", "MLFLOW_", "HEADWAY_", "PYTHON"))}
        env |= {"HEADWAY_HOME": str(home.path), **environ}
        command = [str(self.environment / "bin" / words[0]), *words[1:]]
        return subprocess.run(command, cwd=self.work, env=env, text=True, capture_output=True, timeout=240)

    def importers(self) -> list[str]:
        """Command lines of the processes that imported a package of the working directory."""
        return [line for path in self.work.glob("*/imported-by") for line in path.read_text().splitlines()]


def build(scratch: Path) -> Path:
    """The wheel, by the build hook that pip calls, from a copy of what belongs into it."""
    tree = scratch / "tree"
    for name in PACKAGES:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("headway.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    hook = f"from setuptools import build_meta; build_meta.build_wheel({str(scratch)!r})"
    subprocess.run([sys.executable, "-c", hook], cwd=tree, check=True, capture_output=True, timeout=120)
    (wheel,) = scratch.glob("*.whl")
    return wheel


def install(wheel: Path, environment: Path) -> None:
    """An environment without pip that has the wheel, and below it the packages of the running one."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True, timeout=60)
    python = environment / "bin" / "python"
    subprocess.run([sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "install",
                    "--quiet", "--no-index", "--no-deps", str(wheel)], check=True, capture_output=True, timeout=120)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(environment), "platbase": str(environment)}))
    # Path files of the running environment, an editable Headway among them, are not read from here.
    (site / "third-party.pth").write_text(f"{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n")
    if servers.template().exists():  # else the first start makes Prefect's database, in five seconds more
        shutil.copytree(servers.template().parent, environment / "share" / "headway")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    scratch = tmp_path_factory.mktemp("wheel")
    made = Installed(build(scratch), scratch / "environment", scratch / "work")
    install(made.wheel, made.environment)
    for name in PACKAGES:
        (made.work / name).mkdir(parents=True)
        (made.work / name / "__init__.py").write_text(WATCHED)
    (made.work / "tasks" / "words.py").write_text(WORDS)
    (made.work / "reward.py").write_text(REWARD)
    yield made


@pytest.fixture(scope="module")
def metadata(installed: Installed) -> Message:
    with zipfile.ZipFile(installed.wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_string(archive.read(name).decode())


# -- what is in it


def test_it_holds_every_module_and_preset_and_nothing_else(installed: Installed) -> None:
    with zipfile.ZipFile(installed.wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        entries = archive.read(next(n for n in archive.namelist() if n.endswith("entry_points.txt"))).decode()
    modules = {path.relative_to(ROOT).as_posix() for name in PACKAGES for path in (ROOT / name).rglob("*.py")}
    presets = {f"deployments/presets/{name}.yaml" for name in preset_names()}
    assets = {path.relative_to(ROOT).as_posix() for kind in ("js", "css")
              for path in (ROOT / "rl_core" / "pages").glob(f"*.{kind}")}
    assert "rl_core/pages/page.css" in assets
    assets |= {"deployments/prometheus/prometheus.yml", "deployments/prometheus/alerts.yml",
               "deployments/grafana/headway.json"}
    assert held == modules | presets | assets | {"deployments/prefect.yaml", "headway.py", "rl_core/py.typed"}
    assert entries.split("\n")[:2] == ["[console_scripts]", "headway = headway:main"]


def test_it_says_whose_it_is_and_where_it_runs(metadata: Message, installed: Installed) -> None:
    assert (metadata["Name"], metadata["License-Expression"]) == ("headway", "Apache-2.0")
    assert metadata["Version"] == version("headway")
    assert metadata["Requires-Python"] == ">=3.11"
    classifiers = metadata.get_all("Classifier", [])
    assert {"Operating System :: POSIX :: Linux", "Programming Language :: Python :: 3.11", "Typing :: Typed"} <= {
        *classifiers}
    assert not [name for name in classifiers if name.startswith("License ::")], "the expression says it"
    with zipfile.ZipFile(installed.wheel) as archive:
        (licence,) = (name for name in archive.namelist() if name.endswith("licenses/LICENSE"))
        assert archive.read(licence) == (ROOT / "LICENSE").read_bytes()


def test_it_names_no_machine(metadata: Message) -> None:
    text = metadata.as_string()
    assert {urlparse(url).hostname for url in re.findall(r"https?://[^\s)>\]\"']+", text)} <= HOSTS
    assert not re.search(r"localhost|127\.0\.0\.1|/(?:home|root|work|Users)/\w|\.internal\b", text)


def test_what_the_code_imports_is_required_and_what_is_required_is_here(metadata: Message) -> None:
    required = {wanted.name.lower().replace("_", "-"): wanted for wanted in map(Requirement, metadata.get_all(
        "Requires-Dist", []))}
    always = {name: wanted for name, wanted in required.items() if wanted.marker is None}
    assert [name for name, wanted in always.items() if version(name) not in wanted.specifier] == []
    nodes = [node for name in PACKAGES for path in (ROOT / name).rglob("*.py")
             for node in ast.walk(ast.parse(path.read_text()))]
    imported = {alias.name.split(".")[0] for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module.split(".")[0] for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    distributions = packages_distributions()
    foreign = imported - {*sys.stdlib_module_names, *PACKAGES}
    missing = {name for name in foreign if not {d.lower().replace("_", "-") for d in distributions.get(name, [name])}
               & {*required}}
    assert missing == set()


# -- a run from it


@pytest.mark.parametrize(("path", "expected"), {
    "a project first": (["/p", "/usr", "{tree}"], ["/usr", "{tree}", "/p"]),
    "an editable install, which is not on the path": (["/p", "/usr"], ["/usr", "{tree}", "/p"]),
    "nothing of that name": (["/usr", "{tree}", "/bin"], ["/usr", "{tree}", "/bin"]),
}.values(), ids=lambda value: None)
def test_places_with_packages_of_our_names_go_behind_ours(tmp_path: Path, path: list[str], expected: list[str]) -> None:
    (tmp_path / "p" / "tasks").mkdir(parents=True)
    places = {"/p": str(tmp_path / "p"), "{tree}": str(tmp_path / "tree")}
    assert headway.own_packages_first([places.get(p, p) for p in path], places["{tree}"]) == [
        places.get(p, p) for p in expected]


@pytest.mark.parametrize("command", [["headway"], ["python", "-m", "headway"]], ids=["command", "module"])
def test_a_plan_beside_own_packages(installed: Installed, home: Home, command: list[str]) -> None:
    """PYTHONPATH=. as many projects have it; `python -m` puts the working directory first as well."""
    done = installed.run(home, *command, "plan", "--preset", "tiny-cpu", "--set", "data.size=64", PYTHONPATH=".")
    assert done.returncode == 0, done.stderr
    assert "training steps     180 x 16 groups x 8 answers" in done.stdout
    assert installed.importers() == []


@pytest.mark.slow
def test_a_run_beside_own_packages(installed: Installed, home: Home) -> None:
    """Command, Prefect's server, Ray and its workers import Headway's packages; the reward child the person's own."""
    small = ("total_steps=3", "groups_per_step=4", "data.size=64", "data.validation=null", "model.warmup_steps=0",
             "reward=./reward.py:score")
    sets = [word for setting in small for word in ("--set", setting)]
    done = installed.run(home, "headway", "train", "--preset", "tiny-cpu", *sets, "--run-key", "wheel", "--json",
                         PYTHONPATH=str(installed.work))
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert recorded_steps(home.run("wheel")) == [0, 1, 2]
    importers = installed.importers()
    assert importers and all("rl_core.rollout.rewards.child" in line for line in importers), importers
    assert wait_until_gone(home, 10) == {}
