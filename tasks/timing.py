"""The timeline of a run by its key, as a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rl_core.errors import ConfigError
from rl_core.looking.timeline import as_trace, timeline
from rl_core.pages.timeline import as_page
from rl_core.run_dir import replace_file
from tasks.inspection import open_run
from tasks.paths import run_dir

KINDS = (".html", ".json")


def draw_timeline(run_key: str, out: str) -> dict[str, Any]:
    """Write it as a page (.html) or as a trace (.json); a file that is there is replaced. Returns what was written.

    Raises ConfigError for an unknown key or another kind of file, OSError where it cannot be written.
    """
    place = Path(out).expanduser()
    if place.suffix not in KINDS:
        raise ConfigError(f"--out {out!r}: a timeline is a file whose name ends in {' or '.join(KINDS)}")
    run = run_dir(run_key)
    open_run(run, run_key)
    found = timeline(run)
    written = as_page(found) if place.suffix == ".html" else json.dumps(as_trace(found), allow_nan=False)
    try:
        replace_file(place, written.encode())
    except OSError as error:
        raise OSError(f"--out {out!r}: nothing was written ({error.strerror or error})") from error
    return {"run_key": run_key, "file": str(place), "spans": sum(len(lane.bars) for lane in found.lanes),
            "lanes": len(found.lanes), "seconds": (found.end_us - found.begin_us) / 1e6, "gaps": found.gaps}
