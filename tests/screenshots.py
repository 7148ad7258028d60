"""`make screenshots`: the pictures of docs/images, of two short runs with real services in a headless Chromium.

    python tests/screenshots.py docs/images
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from PIL import Image

from rl_core.pages import answers, timeline
from rl_core.records import read_record
from rl_core.run_dir import RunDir
from rl_core.validation import validated_steps
from tests.browser import chromium
from tests.kept import KeptHome
from tests.pages import (
    Shown,
    local_page,
    mlflow_artifact,
    mlflow_charts,
    mlflow_traces,
    prefect_artifacts,
    prefect_form,
    run_to_show,
)

STEPS = 60
LARGEST = 200_000
"""Bytes of a picture."""
COLOURS = (256, 128, 64, 32, 16)
SETTLE_MS = 2500
"""Charts are drawn, and move, for a while after they are there."""


def main(place: Path) -> int:
    """Take all pictures; 1 where one could not be taken."""
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="headway-screenshots-") as name:
        home = KeptHome.at(Path(name) / "home")
        home.up()
        try:
            assert home.call("deploy").process.returncode == 0
            runs = [run_to_show(home, f"night-{seed}", total_steps=STEPS, seed=seed) for seed in (1, 2)]
            wanted = pictures(home, runs, Path(name))
            taken = [picture for picture, show in wanted.items() if take(place, Path(name), picture, show)]
            return int(len(taken) < len(wanted))
        finally:
            home.down()


def pictures(home: KeptHome, runs: list[Shown], aside: Path) -> dict[str, Callable[[Any], Any]]:
    """Name of each picture, and what opens its page."""
    shown = runs[0]
    run = home.run(shown.key)
    step = most_mixed(run)
    (aside / "viewer.html").write_text(answers.step_page(run, step))
    (aside / "timeline.html").write_text(timeline.timeline_page(run))
    return {
        "mlflow-charts": lambda page: mlflow_charts(page, *runs),
        "mlflow-artifacts": lambda page: artifact(page, shown, f"viewer/step-{step:09d}.html"),
        "mlflow-traces": lambda page: mlflow_traces(page, shown),
        "prefect-run": lambda page: prefect_artifacts(page, shown),
        "prefect-form": lambda page: prefect_form(page, home, "train/adhoc"),
        "viewer": lambda page: local_page(page, aside / "viewer.html"),
        "timeline": lambda page: local_page(page, aside / "timeline.html"),
    }


def most_mixed(run: RunDir) -> int:
    """Of the training steps that have a page, the one whose rewards differ most."""
    paged = [step - 1 for step in validated_steps(run) if step > 0]
    return max(paged, key=lambda step: read_record(run, step).metrics["reward/std"])


def artifact(page: Any, shown: Shown, path: str) -> None:
    """An artifact on its page, without the line that says where on this machine it lies."""
    mlflow_artifact(page, shown, path)
    page.get_by_text("Path: file:").first.evaluate("line => { line.style.visibility = 'hidden'; }")


def take(place: Path, aside: Path, name: str, show: Callable[[Any], Any]) -> bool:
    """One picture, in a browser of its own. False where its page did not show what it is for: it is taken all the same,
    to `aside`."""
    with chromium() as page:
        try:
            show(page)
        except Exception as error:
            sys.stderr.write(f"{name}: {type(error).__name__}: {error}\n")
            page.screenshot(path=str(aside / f"{name}.png"))
            return False
        page.wait_for_timeout(SETTLE_MS)
        page.screenshot(path=str(aside / f"{name}.png"))
    written = shrink(aside / f"{name}.png", place / f"{name}.png")
    sys.stdout.write(f"{name}.png: {written} bytes\n")
    return True


def shrink(source: Path, target: Path) -> int:
    """Write the picture with as many colours as LARGEST allows; returns its bytes."""
    with Image.open(source) as picture:
        for colours in COLOURS:
            picture.convert("RGB").quantize(colours).save(target, optimize=True)
            if (size := target.stat().st_size) <= LARGEST:
                return size
    raise SystemExit(f"{target}: {size} bytes with {COLOURS[-1]} colours; make the window smaller")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
