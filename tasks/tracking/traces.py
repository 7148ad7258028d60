"""What a person reads of an answer as an MLflow trace: one span for it, and one below it for each of its turns.

Ids of traces, spans and assessments are made of the run and the place of the answer in it: written again, they are the
same rows of MLflow's database.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlflow.entities import Span, TraceInfo

PREVIEW_CHARACTERS = 1000
REQUEST, KIND, INPUTS, OUTPUTS = ("mlflow.traceRequestId", "mlflow.spanType", "mlflow.spanInputs", "mlflow.spanOutputs")
"""MLflow's names of a span's attributes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedRun:
    """Whose traces they are."""

    run_uuid: str
    run_id: str
    """Of the MLflow run."""
    experiment_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """`Turn(prompt="sort 31", text="13", facts={"length": 2})`."""

    prompt: str
    text: str
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Attributes of its span."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """One answer, or a session of several, and where it stands in the run."""

    of: TracedRun
    place: str
    """Of all traces of the run no other has it: `20/3`, `training 19/e0-p7-t0/0`."""
    name: str
    """`validation 20: sampled`, `training 19`."""
    turns: Sequence[Turn]
    """At least one."""
    truth: str | None
    outputs: Mapping[str, Any]
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Attributes of its span."""
    tags: Mapping[str, str]
    """What traces are filtered by."""
    judged: Mapping[str, float]
    """By name: columns of MLflow's list."""
    ts_us: int
    """When the validation or the step ended. What each answer took is not kept: spans have no length."""

    def id(self, what: str, digits: int) -> str:
        """`digits` hex digits that are the same at each start."""
        key = f"{self.of.run_uuid}/{self.place}/{what}"
        return hashlib.sha256(key.encode()).hexdigest()[:digits]

    @property
    def trace_id(self) -> str:
        return f"tr-{self.id('trace', 32)}"


def put_traces(uri: str, traces: Sequence[Trace]) -> None:
    """Write them; those that are there already stay the same. Raises what MLflow raises."""
    from mlflow.tracing.client import TracingClient

    if not traces:
        return
    client = TracingClient(uri)
    for trace in traces:
        client.start_trace(_info(trace))
    client.log_spans(traces[0].of.experiment_id, [span for trace in traces for span in _spans(trace)])


def _info(trace: Trace) -> TraceInfo:
    """What MLflow lists of the trace: prompt, answer, step, reward, whether it is right."""
    from mlflow.entities import TraceInfo, TraceLocation, TraceState

    return TraceInfo(
        trace_id=trace.trace_id, trace_location=TraceLocation.from_experiment_id(trace.of.experiment_id),
        request_time=trace.ts_us // 1000, state=TraceState.OK,
        request_preview=trace.turns[0].prompt[:PREVIEW_CHARACTERS],
        response_preview=trace.turns[-1].text[:PREVIEW_CHARACTERS], execution_duration=0,
        trace_metadata={"mlflow.sourceRun": trace.of.run_id, "mlflow.trace_schema.version": "3"},
        tags={"mlflow.traceName": trace.name, **trace.tags, "mlflow.trace.spansLocation": "TRACKING_STORE"},
        assessments=_assessments(trace))


def _assessments(trace: Trace) -> list[Any]:
    from mlflow.entities import AssessmentSource, Feedback

    made: list[Any] = []
    for name, value in trace.judged.items():
        feedback = Feedback(name=name, value=value, source=AssessmentSource(source_type="CODE", source_id="reward"),
                            trace_id=trace.trace_id, create_time_ms=trace.ts_us // 1000,
                            last_update_time_ms=trace.ts_us // 1000)
        feedback.assessment_id = f"a-{trace.id(name, 32)}"
        made.append(feedback)
    return made


def _spans(trace: Trace) -> list[Span]:
    """The answer, and below it its turns."""
    root = _span(trace, "answer", None, trace.name, "CHAIN", {**trace.facts,
        INPUTS: {"prompt": trace.turns[0].prompt, "answer": trace.truth}, OUTPUTS: trace.outputs})
    turns = [_span(trace, f"turn {n}", "answer", f"turn {n + 1}", "LLM", {**turn.facts,
        INPUTS: {"messages": [{"role": "user", "content": turn.prompt}]},
        OUTPUTS: {"choices": [{"message": {"role": "assistant", "content": turn.text}}]}})
        for n, turn in enumerate(trace.turns)]
    return [root, *turns]


def _span(trace: Trace, what: str, parent: str | None, name: str, kind: str, facts: Mapping[str, Any]) -> Span:
    from mlflow.entities import Span

    attributes = {REQUEST: trace.trace_id, KIND: kind, **facts}
    return Span.from_dict({
        "trace_id": _base64(trace.id("trace", 32)), "span_id": _base64(trace.id(what, 16)),
        "parent_span_id": None if parent is None else _base64(trace.id(parent, 16)), "name": name,
        "start_time_unix_nano": trace.ts_us * 1000, "end_time_unix_nano": trace.ts_us * 1000,
        "status": {"code": "STATUS_CODE_OK", "message": ""}, "events": [],
        "attributes": {key: json.dumps(value) for key, value in attributes.items()}})


def _base64(digits: str) -> str:
    return base64.b64encode(bytes.fromhex(digits)).decode()
