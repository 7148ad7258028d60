"""Step records: what training step k did. Written once by learner rank 0, before the step returns."""

from __future__ import annotations

from dataclasses import asdict

from rl_core.run_dir import RunDir, check_attempt, file_numbers, numbers, put_if_absent, read_json, to_json
from rl_core.spans import as_rows, as_spans
from rl_core.types import StepRecord, WeightVersion


def put_record(run: RunDir, record: StepRecord) -> StepRecord:
    """Write the record, or return the stored one, which wins.

    A stored record with another digest of the weights, or of those of a model beside the policy, is a divergence: the
    recomputed one goes to `records/step-<k>.divergent-<a>.json` beside it. Raises StaleAttempt if a newer attempt than
    the record's owns the run: then nothing is written.
    """
    check_attempt(run, record.attempt)
    payload = asdict(record) | {"spans": as_rows(record.spans)}
    if put_if_absent(run.record(record.step), to_json(payload)):
        return record
    stored = read_record(run, record.step)
    if (stored.weights_digest, stored.roles) != (record.weights_digest, record.roles):
        put_if_absent(run.divergent_record(record.step, record.attempt), to_json(payload))
    return stored


def read_record(run: RunDir, step: int) -> StepRecord:
    """Raises FileNotFoundError where step k has no record. A metric that does not exist in the step is NaN."""
    payload = read_json(run.record(step))
    payload.pop("format")
    published = payload.pop("published")
    payload["spans"] = as_spans(payload.get("spans", ()))
    for name in ("metrics", "seconds", "parts"):
        payload[name] = numbers(payload.get(name, {}))
    payload["by_source"] = {source: numbers(of) for source, of in payload.get("by_source", {}).items()}
    return StepRecord(**payload, published=None if published is None else WeightVersion(**published))


def recorded_steps(run: RunDir) -> list[int]:
    """Steps with a record, ascending."""
    return file_numbers(run.records, r"step-(\d{9})\.json")
