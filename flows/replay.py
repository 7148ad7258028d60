"""The `replay` flow: recorded steps trained again, offline, and compared. What `headway replay` does, for Prefect."""

from __future__ import annotations

from typing import Any

from prefect import flow
from prefect.artifacts import create_markdown_artifact
from prefect.runtime import flow_run

from flows.presets import nested
from flows.replaying import replayed_lines, tried_lines
from rl_core.errors import RunEnded


def _flow_run_name() -> str:
    given = flow_run.parameters
    return f"{given.get('run_key')} step {given.get('step')}"


@flow(name="replay", flow_run_name=_flow_run_name, log_prints=False, retries=0)
def replay(run_key: str, step: int, steps: int = 1, overrides: dict[str, Any] | None = None) -> dict[str, Any]:
    """Train steps of a run again, each from its claim, and compare metrics and weights with the records. Writes nothing
    into the run; what came out is an artifact of the flow run. A step that differs fails it.

    Args:
        run_key: Key of a run that exists.
        step: The training step, from 0.
        steps: How many from it on.
        overrides: Shows what the step would have been with other training settings, as in {"learner.lr": 1e-3}, and
            compares nothing.
    """  # in Google's form, which Prefect shows beside the fields of its form
    from tasks.replaying import replayed_steps, tried_steps  # import torch

    chosen, tree = list(range(step, step + steps)), nested(overrides or {})
    if tree:
        found = list(tried_steps(run_key, chosen, tree))
        lines = [line for one in found for line in tried_lines(one)]
    else:
        found = list(replayed_steps(run_key, chosen))
        lines = [line for one in found for line in replayed_lines(one)]
    create_markdown_artifact("```\n" + "\n".join(lines).replace("```", "'''") + "\n```", key="replay",
                             description=f"{run_key}, step {step}" + (f" to {step + steps - 1}" if steps > 1 else ""))
    differ = [one["step"] for one in found if one.get("verdict") == "differs"]
    if differ:
        raise RunEnded(f"steps {', '.join(map(str, differ))} of run {run_key} are not what was recorded:\n"
                       + "\n".join(lines))
    return {"run_key": run_key, "steps": found}
