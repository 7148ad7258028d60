"""What the read-only commands show, read from the run directory alone: status, audit, inspect.

Reports are JSON values: a number that does not exist is None.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from rl_core.errors import BrokenFile, ConfigError
from rl_core.experience.audit import audit
from rl_core.experience.ledger import claimed_steps, read_claim
from rl_core.experience.reader import read_groups
from rl_core.history import Summary, read_validations, summarize
from rl_core.records import read_record, recorded_steps
from rl_core.rollout.prompts import Tokenizer, load_tokenizer
from rl_core.run_dir import RunDir, json_values, newest_attempt, owner_is_alive, read_json
from rl_core.run_identity import RunIdentity, prompt_rows, read_identity
from rl_core.types import WeightVersion
from rl_core.versions import read_versions
from tasks.paths import run_dir


def open_run(run: RunDir, run_key: str) -> RunIdentity:
    """Raises ConfigError naming the key where there is no such run."""
    try:
        return read_identity(run)
    except FileNotFoundError:
        known = sorted(p.name for p in run.root.parent.iterdir()) if run.root.parent.is_dir() else []
        raise ConfigError(f"run {run_key!r}: there is no such run under {run.root.parent}"
                          + (f"; there are {', '.join(known[-8:])}" if known else "")) from None


def stored_identity(run: RunDir) -> RunIdentity | None:
    """The run's identity, or None where there is no run yet."""
    try:
        return read_identity(run)
    except FileNotFoundError:
        return None


def read_status(run: RunDir) -> dict[str, Any]:
    """The owner's status view; empty before the first start."""
    try:
        return read_json(run.status)
    except FileNotFoundError:
        return {}


def read_result(run: RunDir) -> dict[str, Any]:
    """How the last attempt ended; empty while none has."""
    try:
        return read_json(run.result)
    except FileNotFoundError:
        return {}


def is_completed(run: RunDir) -> bool:
    return read_result(run).get("status") == "completed"


def steps_done(run: RunDir) -> int:
    return len(recorded_steps(run))


def summary_so_far(run_key: str, status: str, wall_s: float) -> dict[str, Any]:
    """The keys of `--json` of a run that did not complete; no numbers where its directory itself is broken."""
    try:
        return summarize(run_dir(run_key), run_key=run_key, status=status, wall_s=wall_s).as_json()
    except (BrokenFile, OSError):
        known = {"run_key": run_key, "status": status, "wall_s": round(wall_s, 3)}
        return {key.name: known.get(key.name) for key in fields(Summary)}


def run_status(run_key: str) -> dict[str, Any]:
    """What the run is doing, or how its last attempt ended, as one JSON object."""
    run = run_dir(run_key)
    identity = open_run(run, run_key)
    view, result = read_status(run), read_result(run)
    alive = owner_is_alive(run)
    if alive:
        state = view.get("state", "starting")
    else:
        state = result.get("status", "stopped") if result.get("attempt") == newest_attempt(run) else "stopped"
    cause = f"{result['error']}: {result['message']}" if state == "failed" else None
    accuracies = [v.greedy_accuracy for v in read_validations(run)]
    return json_values({
        "run_key": run_key, "state": state, "alive": alive, "steps": steps_done(run),
        "total_steps": view.get("total_steps", identity.config.total_steps),
        "accuracy": accuracies[-1] if accuracies else None, "metrics": view.get("metrics", {}),
        "live": view.get("live", {}) if alive else {}, "waiting": view.get("note") if alive else None,
        "cause": cause, "attempt": newest_attempt(run), "directory": str(run.root)})


def run_audit(run_key: str) -> dict[str, Any]:
    """The partition of positions and rows of a run; `holds` is False where something is in no state or in two."""
    run = run_dir(run_key)
    identity = open_run(run, run_key)
    report = audit(run, n_prompts=prompt_rows(run), epochs=identity.config.data.epochs)
    return {"run_key": run_key, **report.as_json()}


def run_step(run_key: str, step: int) -> dict[str, Any]:
    """What training step k consumed, with texts. Raises ConfigError where the step has no claim."""
    run = run_dir(run_key)
    open_run(run, run_key)
    try:
        claim = read_claim(run, step)
    except FileNotFoundError:
        claimed = claimed_steps(run)
        known = f"steps 0 to {claimed[-1]} have one" if claimed else "no step has one yet"
        raise ConfigError(f"--step {step}: step {step} of {run_key} has no claim; {known}") from None
    tokenizer = load_tokenizer(run.model)
    versions = read_versions(run)
    groups = [_group_for_people(group, tokenizer, versions, claim.idx) for group in read_groups(run, claim)]
    rewards = [answer["reward"] for group in groups for answer in group["answers"]]
    recorded = run.record(step).exists()
    return json_values({
        "run_key": run_key, "step": step, "idx": claim.idx, "recorded": recorded, "groups": groups,
        "reward_mean": sum(rewards) / len(rewards), "metrics": read_record(run, step).metrics if recorded else {}})


def _group_for_people(group: dict[str, Any], tokenizer: Tokenizer, versions: Mapping[int, WeightVersion],
                      idx: int) -> dict[str, Any]:
    answers = [{"text": tokenizer.decode(answer["ids"], skip_special_tokens=True), "reward": answer["reward"],
                "correct": answer["correct"], "finish": answer["finish_reason"],
                "versions": [version for _, version in answer["versions"]],
                "tokens": len(answer["ids"])} for answer in group["responses"]]
    return {"group_id": group["group_id"], "position": group["position"], "age": idx - group["idx_min"],
            "prompt": tokenizer.decode(group["prompt_ids"], skip_special_tokens=True), "answers": answers}
