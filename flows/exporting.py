"""`headway export`: trained weights of a run as a Hugging Face directory."""

from __future__ import annotations

import json
import os
import signal
import sys
from types import FrameType
from typing import Any

from flows.console import Console
from flows.launch import FAILED, INTERRUPTED, QUIET, REFUSED, TERMINATED
from rl_core.errors import BrokenFile, ConfigError


def export_model(run_key: str, out: str, *, step: int | None, best: bool, by: str | None, dtype: str,
                 as_json: bool) -> int:
    """Run `headway export`; returns its exit code. What does not end well leaves nothing under `out`."""
    os.environ.update(QUIET)
    signal.signal(signal.SIGTERM, _terminated)
    from tasks.exporting import export_run

    try:
        report = export_run(run_key, out, step=step, best=best or by is not None, by=by, dtype=dtype)
    except (ConfigError, BrokenFile) as error:
        return _failed(str(error), REFUSED)
    except OSError as error:
        return _failed(f"--out {out!r}: nothing was written ({error.strerror or error})", FAILED)
    except KeyboardInterrupt:
        return _failed("stopped; nothing was written", INTERRUPTED)
    if as_json:
        print(json.dumps(report, allow_nan=False), file=sys.stdout)
    else:
        Console().lines(_lines(report))
    return 0


def _failed(why: str, code: int) -> int:
    for line in why.splitlines():
        print(f"error: {line}", file=sys.stderr)
    return code


def _lines(report: dict[str, Any]) -> list[str]:
    step, best = report["step"], report["best"]
    rows = [("run", report["run_key"]), ("weights", f"after {step} training steps ({report['source']})"),
            ("digest", report["weights_digest"]), ("dtype", report["dtype"]), ("directory", report["directory"])]
    if best is not None:
        where = "" if best["step"] == step else f"; no weights of it are left, the checkpoint before it is after {step}"
        rows.insert(2, ("best", f"{best['field']} {best['value']:.4g} after {best['step']} steps{where}"))
    return [f"{name:<12}{value}" for name, value in rows]


def _terminated(number: int, frame: FrameType | None) -> None:
    """Leave by way of the export, which clears up."""
    raise SystemExit(TERMINATED)
