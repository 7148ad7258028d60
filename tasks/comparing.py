"""Runs compared by their keys: the report of `headway compare`, and its plot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rl_core.errors import ConfigError
from rl_core.gaps import Gaps
from rl_core.looking.comparison import caveats, changed_settings, check_comparable, compare
from rl_core.looking.curves import read_curve
from rl_core.pages.comparison import comparison_page
from rl_core.records import recorded_steps
from rl_core.run_dir import RunDir, json_values, replace_file
from tasks.inspection import open_run
from tasks.paths import run_dir

PLOTS = (".html", ".png")


def compare_runs(keys: Sequence[str], plot: str | None = None) -> dict[str, Any]:
    """Each run against the first (docs/frames.md 7), and one plot of all at `plot`, where given.

    Raises ConfigError for an unknown key, a key that is given twice, fewer than two, or a plot of another kind;
    BrokenFile; OSError where the plot cannot be written.
    """
    if plot is not None and Path(plot).suffix not in PLOTS:
        raise ConfigError(f"--plot {plot!r}: a plot is a file whose name ends in {' or '.join(PLOTS)}")
    runs = [run_dir(key) for key in keys]
    for run, key in zip(runs, keys, strict=True):
        open_run(run, key)
    check_comparable(runs)
    gaps = Gaps()
    report: dict[str, Any] = {
        "baseline": {"run_key": keys[0], "steps": len(recorded_steps(runs[0]))},
        "runs": [_against(runs[0], run) for run in runs[1:]], "plot": None, "gaps": gaps}
    if plot is not None:
        try:
            report["plot"] = str(_draw(runs, Path(plot).expanduser(), gaps))
        except OSError as error:
            raise OSError(f"--plot {plot!r}: nothing was written ({error.strerror or error})") from error
    return json_values(report)


def _against(baseline: RunDir, run: RunDir) -> dict[str, Any]:
    return {"run_key": run.root.name, "steps": len(recorded_steps(run)),
            "differences": [asdict(each) | {"verdict": each.verdict, "said": {
                "difference": each.said.difference, "interval": each.said.interval}}
                            for each in compare(baseline, run)],
            "settings": {name: list(both) for name, both in changed_settings(baseline, run).items()},
            "caveats": list(caveats(baseline, run))}


def _draw(runs: Sequence[RunDir], place: Path, gaps: Gaps) -> Path:
    if place.suffix == ".html":
        replace_file(place, comparison_page(runs).encode())
        return place
    from tasks.figures import compared_curves

    place.parent.mkdir(parents=True, exist_ok=True)
    compared_curves([read_curve(run, gaps) for run in runs]).savefig(place, dpi=144, facecolor="white")
    return place
