"""`make screenshots`: the pictures of docs/images, of two nights with real services in a headless Chromium.

    python tests/screenshots.py docs/images [NAME ...]

The second night is compared with the first one. Names of this machine's directories are replaced on the pages: the home
is `~/.headway` of somebody.
"""

from __future__ import annotations

import io
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from PIL import Image
from rich.console import Console
from rich.terminal_theme import DIMMED_MONOKAI as TERMINAL

from flows.watching_text import picture
from rl_core.pages import comparison
from rl_core.records import read_record
from rl_core.run_dir import RunDir
from rl_core.validation import validated_steps
from tasks.watching import Watcher
from tests.browser import chromium
from tests.kept import KeptHome, wait_until
from tests.pages import (
    Shown,
    local_page,
    mlflow_artifact,
    mlflow_charts,
    mlflow_model,
    mlflow_traces,
    night_to_show,
    prefect_artifacts,
    prefect_form,
    prefect_report,
)

ROOT = Path(__file__).resolve().parents[1]
NAME, STEPS = "sorter", 60
RATES = (5e-4, 2e-4)
"""`learner.lr` of the nights."""
BUSY = {"throughput_loss": 1.0}
"""Thresholds of a machine that does other things besides."""
SORTING = '''
def score(answer, truth):
    """Right or wrong, and a little for what is nearly right."""
    text = answer.strip()
    right, ordered, same = text == truth, list(text) == sorted(text), sorted(text) == sorted(truth)
    return {"reward": 0.8 * right + 0.1 * ordered + 0.1 * same, "correct": right, "extracted": text,
            "in_order": ordered, "same_digits": same}
'''
SHOWN_HOME = "/home/me/.headway"
LARGEST = 200_000
"""Bytes of a picture."""
COLOURS = (256, 128, 64, 32, 16)
SETTLE_MS = 2500
"""Charts are drawn, and move, for a while after they are there."""
RENAMED = """names => {
  const walker = document.createTreeWalker(document.documentElement, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    let text = walker.currentNode.data;
    for (const [name, shown] of names) text = text.replaceAll(name, shown);
    if (text !== walker.currentNode.data) walker.currentNode.data = text;
  }
}"""


def main(place: Path, only: list[str]) -> int:
    """Take all pictures, or those of these names; 1 where one could not be taken."""
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="headway-screenshots-") as directory:
        aside = Path(directory)
        home = KeptHome.at(aside / "home")
        os.environ["HEADWAY_HOME"] = str(home.path)
        try:
            home.up()
            nights = two_nights(home, aside)
            wanted = {name: show for name, show in pictures(home, nights, aside).items()
                      if not only or name in only}
            taken = [name for name, show in wanted.items() if take(place, aside, home, name, show)]
            return int(len(taken) < len(wanted))
        finally:
            home.down()


def two_nights(home: KeptHome, aside: Path) -> list[Shown]:
    """Both trained and judged; their reward is a function in the directory of the deployment. What a terminal showed of
    the second one in its middle lies at `watch.html`."""
    (aside / "sorting.py").write_text(SORTING)
    deployed = home.start("deploy", cwd=aside)
    assert deployed.wait() == 0, deployed.said
    nights: list[Shown] = []
    for rate in RATES:
        night = night_to_show(home, name=NAME, preset="tiny-cpu", overrides={
            "total_steps": STEPS, "learner.lr": rate, "reward": "./sorting.py:score"}, **BUSY)
        wait_until(home.run(night.key).record(2 * STEPS // 3).exists, 600, f"{night.key}: two thirds of its steps")
        (aside / "watch.html").write_text(terminal(night.key))
        night.wait()
        nights.append(night)
    return nights


def terminal(key: str) -> str:
    """What `headway status KEY --watch` shows of a run now, as a page."""
    console = Console(record=True, file=io.StringIO(), force_terminal=True, width=116)
    console.print(picture(Watcher(key).look()))
    return console.export_html(theme=TERMINAL)


def pictures(home: KeptHome, nights: list[Shown], aside: Path) -> dict[str, Callable[[Any], Any]]:
    """Name of each picture, and what opens its page."""
    shown = nights[-1]
    run = home.run(shown.key)
    step, report = most_mixed(run), home.path / "nights" / shown.key / "report.html"
    for verb, *words in (("inspect", "--step", str(step), "--logprobs", "--html", str(aside / "viewer.html")),
                         ("timeline", "--out", str(aside / "timeline.html"))):
        done = home.call(verb, shown.key, *words)
        assert done.process.returncode == 0, done.said
    (aside / "compare.html").write_text(comparison.comparison_page([home.run(night.key) for night in nights]))
    return {
        "mlflow-charts": lambda page: mlflow_charts(page, *nights),
        "mlflow-artifacts": lambda page: mlflow_artifact(page, shown, f"viewer/step-{step:09d}.html"),
        "mlflow-traces": lambda page: mlflow_traces(page, shown),
        "mlflow-model": lambda page: mlflow_model(page, home, NAME, len(nights)),
        "prefect-run": lambda page: sized(page, 1400, 1040, prefect_artifacts, shown),
        "prefect-report": lambda page: prefect_report(page, shown),
        "prefect-form": lambda page: sized(page, 1400, 1500, prefect_form, home, "nightly/nightly"),
        "nightly-report": lambda page: sized(page, 1300, 960, local_page, report),
        "viewer": lambda page: viewer(page, aside / "viewer.html"),
        "viewer-groups": lambda page: viewer_groups(page, aside / "viewer.html"),
        "timeline": lambda page: local_page(page, aside / "timeline.html"),
        "compare": lambda page: sized(page, 1000, 1240, local_page, aside / "compare.html"),
        "watch": lambda page: sized(page, 980, 380, local_page, aside / "watch.html"),
    }


def most_mixed(run: RunDir) -> int:
    """Of the training steps that have a page, the one whose rewards differ most."""
    paged = [step - 1 for step in validated_steps(run) if step > 0]
    return max(paged, key=lambda step: read_record(run, step).metrics["reward/std"])


def sized(page: Any, width: int, height: int, show: Callable[..., Any], *args: Any) -> None:
    """In a window of its own size, pixels."""
    page.set_viewport_size({"width": width, "height": height})
    show(page, *args)


def viewer(page: Any, path: Path) -> None:
    """With the pointer at a token."""
    local_page(page, path)
    page.locator("[data-token]").nth(2).hover()


def viewer_groups(page: Any, path: Path) -> None:
    """The answers of a group beside each other, each token by its log-prob."""
    local_page(page, path)
    page.locator("input[name=layout][value=groups]").check()
    page.locator("input[name=colour][value=logprob]").check()


def take(place: Path, aside: Path, home: KeptHome, name: str, show: Callable[[Any], Any]) -> bool:
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
        rename(page, {str(home.path): SHOWN_HOME, str(aside): "/home/me", str(ROOT): "/home/me/headway"})
        page.screenshot(path=str(aside / f"{name}.png"))
    written = shrink(aside / f"{name}.png", place / f"{name}.png")
    sys.stdout.write(f"{name}.png: {written} bytes\n")
    return True


def rename(page: Any, names: Mapping[str, str]) -> None:
    """Show others in place of these, also in pages within the page."""
    for frame in page.frames:
        frame.evaluate(RENAMED, list(names.items()))


def shrink(source: Path, target: Path) -> int:
    """Write the picture with as many colours as LARGEST allows; returns its bytes."""
    with Image.open(source) as picture:
        for colours in COLOURS:
            fewer = picture.convert("RGB").quantize(colours, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
            fewer.save(target, optimize=True)  # a small thing of a colour of its own, as in a legend, keeps it
            if (size := target.stat().st_size) <= LARGEST:
                return size
    raise SystemExit(f"{target}: {size} bytes with {COLOURS[-1]} colours; make the window smaller")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
