"""Some answers of each validation as MLflow traces: one span for the answer, and one below it for each of its turns.

Ids of traces, spans and assessments are made of the run, the step and the place in the table of answers: written again,
they are the same rows of MLflow's database.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlflow.entities import Span, TraceInfo

SHOWN = 6
"""Answers of one validation, evenly over its table."""
PREVIEW_CHARACTERS = 1000
REQUEST, KIND, INPUTS, OUTPUTS = ("mlflow.traceRequestId", "mlflow.spanType", "mlflow.spanInputs", "mlflow.spanOutputs")
"""MLflow's names of a span's attributes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One answer of a validation's table, and where it stands there."""

    run_uuid: str
    run_id: str
    """Of the MLflow run."""
    experiment_id: str
    step: int
    version: int
    place: int
    row: Mapping[str, Any]
    ts_us: int
    """When its validation ended. What each answer took is not kept: its spans have no length."""

    def id(self, what: str, digits: int) -> str:
        """`digits` hex digits that are the same at each start."""
        key = f"{self.run_uuid}/{self.step}/{self.place}/{what}"
        return hashlib.sha256(key.encode()).hexdigest()[:digits]

    @property
    def trace_id(self) -> str:
        return f"tr-{self.id('trace', 32)}"

    @property
    def name(self) -> str:
        return f"validation {self.step}: {self.row['mode']}"


def shown(rows: Sequence[Mapping[str, Any]], most: int = SHOWN) -> list[int]:
    """Places of at most `most` rows, evenly over all. `shown(range(12), 3)` -> [0, 4, 8]."""
    count = min(most, len(rows))
    return [i * len(rows) // count for i in range(count)]


def trace_info(answer: Answer) -> TraceInfo:
    """What MLflow lists of the trace: prompt, answer, step, reward, whether it is right."""
    from mlflow.entities import TraceInfo, TraceLocation, TraceState

    row = answer.row
    tags = {"mlflow.traceName": answer.name, "headway.step": str(answer.step), "headway.version": str(answer.version),
            "headway.mode": str(row["mode"]), "headway.data_source": str(row["data_source"]),
            "mlflow.trace.spansLocation": "TRACKING_STORE"}
    return TraceInfo(
        trace_id=answer.trace_id, trace_location=TraceLocation.from_experiment_id(answer.experiment_id),
        request_time=answer.ts_us // 1000, state=TraceState.OK, request_preview=_preview(row["prompt"]),
        response_preview=_preview(row["text"]), execution_duration=0,
        trace_metadata={"mlflow.sourceRun": answer.run_id, "mlflow.trace_schema.version": "3"}, tags=tags,
        assessments=_assessments(answer))


def _assessments(answer: Answer) -> list[Any]:
    """Reward and verdict, where there are any: columns of MLflow's list."""
    from mlflow.entities import AssessmentSource, Feedback

    found: list[Any] = []
    for name in ("reward", "correct"):
        value = answer.row.get(name)
        if value is not None:
            feedback = Feedback(name=name, value=value, source=AssessmentSource(source_type="CODE", source_id="reward"),
                                trace_id=answer.trace_id, create_time_ms=answer.ts_us // 1000,
                                last_update_time_ms=answer.ts_us // 1000)
            feedback.assessment_id = f"a-{answer.id(name, 32)}"
            found.append(feedback)
    return found


def spans(answer: Answer) -> list[Span]:
    """The answer, and below it its turns. A table's answers have one turn."""
    row = answer.row
    outputs = {name: row.get(name) for name in ("text", "reward", "correct", "extracted", "length", "finish")}
    root = _span(answer, "answer", None, answer.name, "CHAIN",
                 {"prompt": row["prompt"], "answer": row.get("answer")}, outputs)
    turns = [_span(answer, f"turn {n}", "answer", f"turn {n + 1}", "LLM",
                   {"messages": [{"role": "user", "content": asked}]},
                   {"choices": [{"message": {"role": "assistant", "content": said}}]})
             for n, (asked, said) in enumerate([(str(row["prompt"]), str(row["text"]))])]
    return [root, *turns]


def _span(answer: Answer, what: str, parent: str | None, name: str, kind: str, inputs: Mapping[str, Any],
          outputs: Mapping[str, Any]) -> Span:
    from mlflow.entities import Span

    attributes = {REQUEST: answer.trace_id, KIND: kind, INPUTS: inputs, OUTPUTS: outputs}
    return Span.from_dict({
        "trace_id": _base64(answer.id("trace", 32)), "span_id": _base64(answer.id(what, 16)),
        "parent_span_id": None if parent is None else _base64(answer.id(parent, 16)), "name": name,
        "start_time_unix_nano": answer.ts_us * 1000, "end_time_unix_nano": answer.ts_us * 1000,
        "status": {"code": "STATUS_CODE_OK", "message": ""}, "events": [],
        "attributes": {key: json.dumps(value) for key, value in attributes.items()}})


def _base64(digits: str) -> str:
    return base64.b64encode(bytes.fromhex(digits)).decode()


def _preview(value: Any) -> str:
    return str(value)[:PREVIEW_CHARACTERS]
