"""The timeline of a run made in a process of its own, at low priority.

Of a long run it is a small object for each span, group and claim. Made in the process that owns the run, again and
again over its thousands of steps, they would leave that process larger for good.

    consumes: a run directory, whole; waits for: the process, DEADLINE_S at most; unblocked by: its end, the deadline
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from rl_core.errors import DeadlinePassed, DeadPart
from rl_core.looking.timeline import as_trace, timeline
from rl_core.pages.timeline import as_page
from rl_core.rollout.rewards.process import child_environment
from rl_core.run_dir import RunDir

DEADLINE_S = 300.0
NICE = 10
PR_SET_PDEATHSIG = 1


def timeline_texts(run: RunDir, deadline_s: float = DEADLINE_S) -> dict[str, str]:
    """`timeline.html`, the page, and `trace.json`, the trace for Perfetto or Chrome, of the run as it is now.

    Raises DeadPart with the process's last word where it fails, DeadlinePassed where it takes too long. It does not
    outlive the thread that asked.
    """
    try:
        done = subprocess.run([sys.executable, "-P", "-m", __name__, str(run.root), str(os.getpid())],
                              env=child_environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              timeout=deadline_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise DeadlinePassed(f"the timeline of {run.root} was not made within {deadline_s:g} s") from error
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["no word of why"]
        raise DeadPart(f"the process that makes the timeline ended with exit code {done.returncode}: {said[-1][:400]}")
    return json.loads(done.stdout)


def main() -> None:
    """The process: prints the texts as one JSON object."""
    run, owner = RunDir(Path(sys.argv[1])), int(sys.argv[2])
    os.nice(NICE)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != owner:
            return  # it went before it could be asked about
    of = timeline(run)
    json.dump({"timeline.html": as_page(of), "trace.json": json.dumps(as_trace(of))}, sys.stdout)


if __name__ == "__main__":
    main()
