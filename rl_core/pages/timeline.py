"""The timeline as one HTML page: a canvas that is zoomed and panned, drawn by the timeline*.js beside this.

The page holds numbers, not elements: a lane is a flat list, five numbers a bar, so that 200,000 bars open at once.
"""

from __future__ import annotations

from collections.abc import Iterable

from rl_core.looking.timeline import Lane, Timeline, timeline
from rl_core.pages.page import asset, page, text
from rl_core.run_dir import RunDir

SCRIPTS = ("timeline_data.js", "timeline_layout.js", "timeline_draw.js", "timeline.js")


def timeline_page(run: RunDir) -> str:
    """The timeline of a run, read from its directory, as one HTML file. A run of which nothing is known gives a page
    that says so."""
    return as_page(timeline(run))


def as_page(of: Timeline) -> str:
    """`timeline_page` of a timeline that was read."""
    title = f"{of.run_key}: timeline"
    gaps = "".join(f"<li>{text(gap)}</li>" for gap in of.gaps)
    body = f"""<header><h1>{text(title)}</h1><p id="facts"></p>
<p id="controls"><button id="fit" type="button">all</button> <button id="nearer" type="button">+</button>
<button id="farther" type="button">-</button> <label>colours <select id="colours"><option value="kind">by what is done
</option><option value="version">by weight version</option></select></label>
<label><input id="claims" type="checkbox"> claims</label> <span id="view"></span></p>
<p id="legend"></p></header>
<div id="scroll" tabindex="0"><div id="tall"><canvas id="canvas"></canvas></div></div>
<div id="tip" hidden></div>
<p id="help">Wheel: up and down. Ctrl and wheel, or w and s: zoom. Drag, shift and wheel, or a and d: earlier and later.
Double click: zoom to a bar. Click on a worker's groups: open and close. Times are seconds since the first moment of the
page.</p>
{f'<details id="gaps"><summary>gaps: {len(of.gaps)}</summary><ul>{gaps}</ul></details>' if gaps else ''}"""
    return page(title, body=body, style=asset("timeline.css"), script="\n".join(map(asset, SCRIPTS)), data=_data(of))


def _data(of: Timeline) -> dict[str, object]:
    begin = min([of.begin_us, *(counter.points[0][0] for counter in of.counters)]) if of.lanes else of.begin_us
    names = _numbered(bar.name for lane in of.lanes for bar in lane.bars)
    texts = _numbered(bar.about for lane in of.lanes for bar in lane.bars)
    kinds = _numbered(mark.kind for mark in of.marks)
    end = max([of.end_us, *(counter.points[-1][0] for counter in of.counters)])
    return {
        "begin_us": begin, "length_us": end - begin, "names": list(names), "texts": list(texts),
        "lanes": [{"part": lane.part, "name": lane.name, "bars": _flat(lane, begin, names, texts)}
                  for lane in of.lanes],
        "kinds": list(kinds),
        "marks": [[kinds[mark.kind], mark.at_us - begin, mark.of, mark.about] for mark in of.marks],
        "counters": [{"name": counter.name, "unit": counter.unit, "at": [at - begin for at, _ in counter.points],
                      "values": [float(f"{value:.6g}") for _, value in counter.points]} for counter in of.counters]}


def _numbered(words: Iterable[str]) -> dict[str, int]:
    return {word: number for number, word in enumerate(dict.fromkeys(words))}


def _flat(lane: Lane, begin: int, names: dict[str, int], texts: dict[str, int]) -> list[int]:
    """Five numbers a bar: since the end of the one before, how long (microseconds), name, `of` (-1: none), text."""
    flat: list[int] = []
    before = begin
    for bar in lane.bars:
        flat += (bar.begin_us - before, bar.end_us - bar.begin_us, names[bar.name], -1 if bar.of is None else bar.of,
                 texts[bar.about])
        before = bar.end_us
    return flat
