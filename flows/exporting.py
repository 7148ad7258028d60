"""`headway export`: trained weights of a run as a Hugging Face directory."""

from __future__ import annotations

from typing import Any

from flows.command import answer, hush, leave_on_sigterm


def export_model(run_key: str, out: str, *, step: int | None, best: bool, by: str | None, dtype: str,
                 as_json: bool) -> int:
    """Run `headway export`; returns its exit code. What does not end well leaves nothing under `out`."""
    hush()
    leave_on_sigterm()  # by way of the export, which clears up
    from tasks.exporting import export_run

    def exported() -> dict[str, Any]:
        try:
            return export_run(run_key, out, step=step, best=best or by is not None, by=by, dtype=dtype)
        except OSError as error:
            raise OSError(f"--out {out!r}: nothing was written ({error.strerror or error})") from error

    return answer(exported, _lines, as_json=as_json, stopped="stopped; nothing was written")


def _lines(report: dict[str, Any]) -> list[str]:
    step, best = report["step"], report["best"]
    rows = [("run", report["run_key"]), ("weights", f"after {step} training steps ({report['source']})"),
            ("digest", report["weights_digest"]), ("dtype", report["dtype"]), ("directory", report["directory"])]
    if best is not None:
        where = "" if best["step"] == step else f"; no weights of it are left, the checkpoint before it is after {step}"
        rows.insert(2, ("best", f"{best['field']} {best['value']:.4g} after {best['step']} steps{where}"))
    return [f"{name:<12}{value}" for name, value in rows]
