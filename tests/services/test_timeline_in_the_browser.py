"""The timeline in a real browser: 200,000 spans at once, zoom, pan, what a pointer is told, versions, groups.

Pages are files that are opened as such: no server, and no other host is asked for anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rl_core.looking.timeline import Bar, Counter, Lane, Mark, Timeline
from rl_core.pages.timeline import as_page
from tests.browser import listened, pictured

pytestmark = [pytest.mark.slow, pytest.mark.services, pytest.mark.browser]

T = 1_790_000_000_000_000
OPENS_MS = 1500
REDRAWN_MS = 100
"""Median of a frame with everything in view, without a graphics card."""
LABELS, AXIS, PART, LANE = 150, 34, 22, 17
"""Of timeline.js, pixels."""
HOSTILE = "</script><script>document.title = 'ran'</script><img src=x onerror=\"document.title = 'ran'\">"


def small() -> Timeline:
    """A learner over ten seconds, a worker with three groups at once."""
    def bar(name: str, begin_s: float, end_s: float, of: int | None = None, about: str = "") -> Bar:
        return Bar(name, T + int(begin_s * 1e6), T + int(end_s * 1e6), of, about)

    return Timeline("night", [
        Lane("learner", "state", [bar("wait", 0, 2), bar("learn", 2, 6, 7, "step 7"), bar("wait", 6, 10)]),
        Lane("rollout-0", "engine", [bar("generate", 0, 4, 3, "by version 3"), bar("swap", 4, 4.5, 4, "to version 4"),
                                     bar("generate", 4.5, 10, 4, "by version 4")]),
        *[Lane("rollout-0", f"groups {i}", [bar("generate", i, 8, None, f"e0-p{i}-t0 {HOSTILE}")]) for i in range(3)],
    ], [Mark("version", T + 4_000_000, 4, "version 4 is published")],
        [Counter("reward/mean", "reward", [(T + 2_000_000, 0.25), (T + 6_000_000, 0.5)])], [HOSTILE])


def large(lanes: int = 100, bars: int = 2000) -> Timeline:
    """200,000 bars of one to three milliseconds."""
    names = ("generate", "reward")
    made = [Lane(f"rollout-{i // 25}", f"groups {i % 25}", [
        Bar(names[k % 2], T + k * 4000 + i * 7, T + k * 4000 + i * 7 + 1000 + (k * i) % 2000, None,
            f"e0-p{k // 2 * lanes + i}-t0: 8 answers, 240 tokens, sampled by publication 3; trained in step {k // 50}")
        for k in range(bars)]) for i in range(lanes)]
    return Timeline("long", made, [Mark("version", T + k * 40_000, k, f"version {k}") for k in range(200)], [])


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with listened() as page:
        yield page


def opened(browser: Any, path: Path, of: Timeline) -> None:
    path.write_text(as_page(of), encoding="utf-8")
    browser.said.clear()
    browser.got.clear()
    browser.goto(path.as_uri())
    browser.wait_for_selector("body[data-ready]")


@pytest.fixture
def night(browser: Any, tmp_path: Path) -> Any:
    opened(browser, tmp_path / "night.html", small())
    return browser


def view(browser: Any) -> tuple[float, float]:
    """First and last moment in view, seconds, when what was asked for is drawn."""
    browser.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    shown = browser.evaluate("({...document.documentElement.dataset})")
    return int(shown["from"]) / 1e6, int(shown["to"]) / 1e6


def place(browser: Any, second: float, down: float) -> tuple[float, float]:
    """Where a moment is on the screen, `down` pixels below the axis."""
    box, (first, last) = browser.locator("#canvas").bounding_box(), view(browser)
    return box["x"] + LABELS + (second - first) / (last - first) * (box["width"] - LABELS), box["y"] + AXIS + down


STATE = PART + LANE / 2
"""The learner's lane."""
ENGINE = 2 * PART + 1.5 * LANE
"""The worker's."""
FLIGHT = 2 * PART + 2 * LANE + 20


def told(browser: Any) -> str:
    tip = browser.locator("#tip")
    return tip.text_content() if tip.is_visible() else ""


def test_two_hundred_thousand_spans_open_at_once_and_are_redrawn_while_one_zooms(browser: Any, tmp_path: Path) -> None:
    opened(browser, tmp_path / "night.html", small())  # the browser itself has started
    of = large()
    assert sum(len(lane.bars) for lane in of.lanes) == 200_000
    opened(browser, tmp_path / "long.html", of)
    with pictured(browser, tmp_path / "long.png"):
        drawn_ms = browser.evaluate("performance.getEntriesByName('timeline drawn')[0].startTime")
        assert "200,000 spans in 100 lanes" in browser.locator("#facts").text_content()
        assert (tmp_path / "long.html").stat().st_size < 20 * 2**20
        for part in range(3):  # group lanes are open: the most there is to draw at once
            browser.mouse.click(*place(browser, 1.0, PART * (part + 1) + 20 + part * (46 + 25 * 9)))
        frames_ms = browser.evaluate("""async () => {
            const took = [];
            for (let i = 0; i < 12; i++) {
                dispatchEvent(new KeyboardEvent("keydown", { key: i % 2 ? "s" : "w", bubbles: true }));
                await new Promise(requestAnimationFrame);
                const begun = performance.now();
                await new Promise(requestAnimationFrame);
                took.push(performance.now() - begun);
            }
            return took.sort((a, b) => a - b);
        }""")
    assert drawn_ms <= OPENS_MS, drawn_ms
    assert frames_ms[6] <= REDRAWN_MS, frames_ms
    assert browser.said == [] and browser.got == [(tmp_path / "long.html").as_uri()]


def test_a_pointer_is_told_what_and_how_long(night: Any, tmp_path: Path) -> None:
    with pictured(night, tmp_path / "night.png"):
        night.mouse.move(*place(night, 4.0, STATE))
        assert told(night) == "learner, state: learn\n4.00 s, from 2.0000 s to 6.0000 s\nstep 7"
        night.mouse.move(*place(night, 4.25, ENGINE))
        assert told(night) == "rollout-0, engine: swap\n500 ms, from 4.0000 s to 4.5000 s\nto version 4"
        night.mouse.move(*place(night, 2.5, FLIGHT))
        assert told(night) == "rollout-0\n3 groups in flight"
        night.mouse.move(*place(night, 2.5, -10))
        assert told(night) == ""
    assert night.said == [] and len(night.got) == 1, "no policy was broken, no other host asked"


def test_a_wheel_zooms_where_the_pointer_is_and_dragging_pans(night: Any) -> None:
    first, last = view(night)
    assert (round(first), round(last)) == (0, 10)
    night.mouse.move(*place(night, 4.0, STATE))
    night.keyboard.down("Control")
    night.mouse.wheel(0, -600)
    night.keyboard.up("Control")
    near = view(night)
    assert near[1] - near[0] == pytest.approx((last - first) * 0.3679, rel=0.01)
    assert (4.0 - near[0]) / (near[1] - near[0]) == pytest.approx(0.4, abs=0.01), "what is under the pointer stays"
    x, y = place(night, 4.0, STATE)
    night.mouse.down()
    night.mouse.move(x + 200, y, steps=4)
    night.mouse.up()
    after = view(night)
    assert after[0] < near[0] and after[1] - after[0] == pytest.approx(near[1] - near[0], rel=0.001)
    assert place(night, 4.0, STATE)[0] == pytest.approx(x + 200, abs=2)
    night.keyboard.press("w")
    assert view(night)[1] - view(night)[0] == pytest.approx(0.7 * (after[1] - after[0]), rel=0.01)
    night.keyboard.press("d")
    assert view(night)[0] > after[0]
    night.locator("#fit").click()
    assert view(night) == (first, last)
    night.mouse.dblclick(*place(night, 4.25, ENGINE))
    assert view(night) == pytest.approx((3.95, 4.55), abs=0.01), "a double click goes to the bar"


def pixel(browser: Any, second: float, down: float) -> list[int]:
    x, y = place(browser, second, down)
    box = browser.locator("#canvas").bounding_box()
    return browser.evaluate("([x, y]) => Array.from(document.getElementById('canvas').getContext('2d')"
                            ".getImageData(x, y, 1, 1).data)", [x - box["x"], y - box["y"]])


def test_weight_versions_have_colours_of_their_own(night: Any) -> None:
    below = ENGINE + 4  # beside the bar's text
    assert pixel(night, 1, below) == pixel(night, 8, below), "both generate"
    night.locator("#colours").select_option("version")
    view(night)
    assert pixel(night, 1, below) != pixel(night, 8, below), "by versions 3 and 4"
    assert pixel(night, 4.42, below) == pixel(night, 8, below), "the swap to version 4"


def test_groups_open_and_close_and_what_they_say_stays_text(night: Any) -> None:
    tall = "document.getElementById('tall').offsetHeight"
    opened_px = night.evaluate(tall)
    night.mouse.click(*place(night, 2.5, FLIGHT))
    view(night)
    assert night.evaluate(tall) == opened_px - 3 * 9
    night.mouse.click(*place(night, 2.5, FLIGHT))
    night.mouse.move(*place(night, 5, FLIGHT + 26 + 4))
    assert HOSTILE in told(night) and night.title() == "night: timeline"
    assert HOSTILE in night.locator("#gaps").text_content()


def test_the_dark_scheme_is_another_picture(night: Any) -> None:
    light = pixel(night, 5, 2)
    night.emulate_media(color_scheme="dark")
    view(night)
    dark = pixel(night, 5, 2)
    night.emulate_media(color_scheme="light")
    assert sum(light[:3]) > 600 and sum(dark[:3]) < 200
