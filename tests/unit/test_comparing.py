"""`headway compare`: what it prints, its page and its plot."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from flows.comparing import comparison_lines
from rl_core.errors import ConfigError
from rl_core.pages.comparison import comparison_page
from rl_core.run_dir import RunDir
from tasks.comparing import compare_runs
from tests.looking import small_run


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("comparing")
    for name, bonus in (("monday", 0.0), ("tuesday", 0.5), ("wednesday", 3.0)):
        small_run(path / "runs" / name, name, bonus=bonus)
    return path


@pytest.fixture(autouse=True)
def at_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_HOME", str(home))


def test_each_run_has_a_table_against_the_first() -> None:
    report = compare_runs(["monday", "tuesday", "wednesday"])
    json.dumps(report, allow_nan=False)
    assert report["baseline"] == {"run_key": "monday", "steps": 3} and report["plot"] is None
    assert [run["run_key"] for run in report["runs"]] == ["tuesday", "wednesday"]
    last = {of["name"]: of for of in report["runs"][1]["differences"]}["reward_last"]
    assert (last["baseline"], last["value"], last["difference"], last["verdict"]) == (0.25, 3.25, 3.0, "better")
    lines = comparison_lines(report)
    assert lines[0] == "tuesday (3 steps) against monday (3 steps)"
    assert lines[1].split() == ["monday", "tuesday", "difference", "95", "%", "interval"]
    [reward] = [line for line in lines[:lines.index("")] if line.startswith("  reward last")]
    assert re.fullmatch(r"  reward last +0.25 +0.75 +\+0.5 +-0.378\d? to \+1.378 +reward", reward), reward
    [better] = [line for line in lines if line.endswith("better")]
    assert better.startswith("  reward last") and "+3" in better
    assert sum(line.startswith("  note: the validations of monday and") for line in lines) == 2


WRONG = {
    "one key": (["monday"], None, r"two or more runs are compared \(got 1\)"),
    "the same twice": (["monday", "tuesday", "monday"], None, "monday is given twice"),
    "unknown": (["monday", "sunday"], None, "run 'sunday': there is no such run"),
    "another kind of plot": (["monday", "tuesday"], "out.svg", "name ends in .html or .png"),
}


@pytest.mark.parametrize(("keys", "plot", "said"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_compared_is_refused(keys: list[str], plot: str | None, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        compare_runs(keys, plot)


def test_the_page_has_both_curves_of_all_runs_and_the_tables(home: Path, tmp_path: Path) -> None:
    report = compare_runs(["monday", "tuesday", "wednesday"], str(tmp_path / "deep" / "all.html"))
    html = Path(report["plot"]).read_text()
    reward, accuracy = re.findall(r'<svg viewBox="0 0 860.*?</svg>', html, re.DOTALL)
    assert [len(re.findall(f'<g class="c{i}">', html)) for i in range(4)] == [2, 2, 2, 0]
    lines = re.findall(r'<polyline class="raw" points="([^"]+)"', reward)
    assert [len(points.split()) for points in lines] == [3, 3, 3], "three steps each"
    heights = [float(points.split()[0].split(",")[1]) for points in lines]
    assert heights == sorted(heights, reverse=True), "more reward is drawn higher"
    assert accuracy.count("<circle") == 9 and accuracy.count('<polygon class="band"') == 3
    assert html.count("<table>") == 2 and '<td class="better">better</td>' in html
    assert "script-src" not in html and "http" not in html.replace("http-equiv", "")


def test_names_and_settings_are_text_on_the_page(tmp_path: Path) -> None:
    hostile = small_run(tmp_path / "<script>alert(1)</script>".replace("/", "_"))
    assert "<script>" not in comparison_page([hostile, RunDir(small_run(tmp_path / "plain").root)])


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    compare_runs(["monday", "tuesday"], str(tmp_path / "both.png"))
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")
