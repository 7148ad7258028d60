"""What goes over the wire to a SGLang server and back: every route and field that Headway relies on, named once.

Pure: bodies out of requests, facts out of answers. Shapes are those of 0.5.23; the contract test asks a real server for
each (`tests/contract/sglang_faults.py` serves the same shapes, broken).

An answer is streamed in parts (`--incremental-streaming-output`): each event holds the tokens since the last one.
Which weights sampled which token is said once, in the last event of an answer (`weight_versions`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from rl_core.errors import DeadPart
from rl_core.types import Sampling

GENERATE = "/generate"
ABORT = "/abort_request"
PAUSE = "/pause_generation"
RESUME = "/continue_generation"
UPDATE_FROM_DISK = "/update_weights_from_disk"
CHECKSUMS = "/weights_checker"
MODEL_INFO = "/model_info"
SERVER_INFO = "/server_info"
LOADS = "/v1/loads"
ROUTES = (GENERATE, ABORT, PAUSE, RESUME, UPDATE_FROM_DISK, CHECKSUMS, MODEL_INFO, SERVER_INFO, LOADS)
JOIN_GROUP = "/init_weights_update_group"
BEGIN_UPDATE = "/begin_weight_update"
UPDATE_FROM_GROUP = "/update_weights_from_distributed"
END_UPDATE = "/end_weight_update"
COLLECTIVE_ROUTES = (JOIN_GROUP, BEGIN_UPDATE, UPDATE_FROM_GROUP, END_UPDATE)
"""Of transport `collective` alone (collective.py)."""

NO_VERSION = -1
"""Tokens sampled before the first swap: the server calls its weights then "default"."""
UNNAMED = "default"
DONE = b"[DONE]"
EVENT = b"data:"
FRAMING_BYTES = len(b"data: \n\n")
MAX_EVENT_BYTES = 64 * 2**20
"""A stream that never ends its line is no stream of events."""


class ReplicaFailed(DeadPart):
    """One server died, was silent, or said what no sound server says. The engine goes on with the others."""


class BadAnswer(ReplicaFailed):
    """An answer that is not of the known shape: half a JSON, a field that is absent, tokens that are missing."""


class ServerRefused(Exception):
    """The server answered, and said no. `status` is that of HTTP."""

    def __init__(self, what: str, status: int, message: str) -> None:
        super().__init__(f"{what}: refused with status {status}: {message}")
        self.status, self.message = status, message


# -- requests


def refused_sampling(sampling: Sampling) -> str | None:
    """Why the server's log-probs would not be those of the sampled distribution, or None. For training alone.

    The server divides by the temperature before its softmax, and renormalizes nothing: what is cut off afterwards, or
    picked greedily, is reported with the log-prob of the whole distribution.
    """
    for field, good in (("temperature", sampling.temperature > 0), ("top_p", sampling.top_p == 1),
                        ("top_k", sampling.top_k == 0), ("min_p", sampling.min_p == 0)):
        if not good:
            return f"sampling.{field} cannot be {getattr(sampling, field)!r} with engine sglang: its log-probs would " \
                   "not be those of the sampled distribution"
    return None


def generate_body(rid: str, token_ids: Sequence[int], sampling: Sampling, *, max_new: int, seed: int,
                  end_token_ids: Sequence[int], stream_interval: int, cache_key: str) -> dict[str, Any]:
    """Body of `/generate`. `max_new` is what is left of the budget; `cache_key` keeps cached prefixes of other weights
    from being read (they were computed by other weights). The seed acts on servers in deterministic mode only, where
    one seed for all would make the answers of a group copies."""
    ends = sorted({*end_token_ids, *sampling.stop_token_ids})
    settings: dict[str, Any] = {
        "temperature": sampling.temperature, "max_new_tokens": max_new, "stream_interval": stream_interval,
        "skip_special_tokens": False, "no_stop_trim": True, "sampling_seed": seed & (2**63 - 1),
        # Said although they may be off: what is left out, a server may take from the model's generation_config.json.
        "top_p": sampling.top_p, "top_k": sampling.top_k or -1, "min_p": sampling.min_p,
        "repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
    if ends:
        settings["stop_token_ids"] = ends
    else:
        settings["ignore_eos"] = True
    if sampling.stop:
        settings["stop"] = list(sampling.stop)
    return {"rid": rid, "input_ids": list(token_ids), "sampling_params": settings, "return_logprob": True,
            "stream": True, "extra_key": cache_key}


def update_body(path: str, version: int, *, flush_cache: bool) -> dict[str, Any]:
    """Body of `/update_weights_from_disk`."""
    return {"model_path": path, "weight_version": str(version), "flush_cache": flush_cache,
            "abort_all_requests": False}


# -- streamed answers


class Events:
    """Cuts the bytes of a stream into payloads of events: `feed(b'data: {"a":1}\\n\\nda')` -> `[b'{"a":1}']`."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        """Payloads that this chunk completed. Raises BadAnswer for lines that are no events."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise BadAnswer(f"an event of more than {MAX_EVENT_BYTES} bytes")
        payloads: list[bytes] = []
        for line in lines:
            text = line.strip()
            if text.startswith(EVENT):
                payloads.append(text[len(EVENT):].strip())
            elif text and not text.startswith(b":"):
                raise BadAnswer(f"no event: {text[:100]!r}")
        return payloads


@dataclass(frozen=True, slots=True)
class Finish:
    """How the server ended an answer."""

    kind: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    """The end token, or the stop string."""
    message: str = ""
    status: int | None = None
    """Of an abort that is an error."""


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [.., end) up to `end` of one answer, sampled by `version`."""

    end: int
    version: int


@dataclass(frozen=True, slots=True)
class Delta:
    """One event of a stream: the tokens since the last one; with `finish`, the last event."""

    token_ids: list[int]
    logprobs: list[float]
    cached: int
    """Tokens of the context that the server had in its prefix cache."""
    finish: Finish | None
    spans: tuple[Span, ...]
    """Of the whole answer of this request; empty before the end."""
    retractions: int
    """Times that the server gave up this request's cache and read the context again."""


def read_event(payload: bytes, have: int, vocabulary: int) -> Delta:
    """The event behind `have` tokens of this answer. Raises BadAnswer; ServerRefused for an error in place of tokens.

    Ids and log-probs are taken together from `output_token_logprobs`, and as many as `completion_tokens` counts beyond
    `have`: an answer that is aborted while it waits repeats its last id, and all its log-probs.
    """
    event = as_object(payload)
    if "error" in event:
        raise ServerRefused(GENERATE, *read_error(event))
    try:
        meta = cast("dict[str, Any]", event["meta_info"])
        finish = _finish(meta["finish_reason"])
        total = int(meta["completion_tokens"])
        entries = cast("list[list[Any]]", meta.get("output_token_logprobs") or [])
        new = total - have
        if new < 0 or new > len(entries):
            raise BadAnswer(f"{total} tokens behind {have} with {len(entries)} log-probs: tokens are missing")
        entries = entries[len(entries) - new:]
        ids, logprobs = [int(entry[1]) for entry in entries], [float(entry[0]) for entry in entries]
        spans = _spans(meta.get("weight_versions"), total) if finish is not None else ()
        delta = Delta(ids, logprobs, int(meta.get("cached_tokens") or 0), finish, spans,
                      int(meta.get("num_retractions") or 0))
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise BadAnswer(f"an event of another shape ({error!r}): {payload[:300]!r}") from error
    if any(not 0 <= token < vocabulary for token in ids):
        raise BadAnswer(f"sampled ids outside the vocabulary of {vocabulary}: {max(ids)}")
    if any(math.isnan(value) for value in logprobs):
        raise BadAnswer("a log-prob that is no number")
    return delta


def _finish(reason: Any) -> Finish | None:
    if reason is None:
        return None
    kind = reason["type"]
    if kind not in ("stop", "length", "abort"):
        raise ValueError(f"finish_reason {kind!r}")
    return Finish(kind, reason.get("matched"), str(reason.get("message") or ""), reason.get("status_code"))


def _spans(spans: Any, total: int) -> tuple[Span, ...]:
    """From `[{"version": "3", "start": 0, "end": 498}, ...]`; they must tile [0, total)."""
    if spans is None and not total:  # ended while it waited
        return ()
    read: list[Span] = []
    at = 0
    for span in spans or ():
        if int(span["start"]) != at:
            raise ValueError(f"weight_versions {spans!r} leave tokens out")
        at = min(int(span["end"]), total)
        if not read or at > read[-1].end:
            read.append(Span(at, version_number(span["version"])))
    if at < total:
        raise ValueError(f"weight_versions {spans!r} of {total} tokens")
    return tuple(span for span in read if span.end > 0)


def version_number(name: str) -> int:
    """`"7"` -> 7; the name of weights that were never swapped -> NO_VERSION. ValueError for any other."""
    return NO_VERSION if name == UNNAMED else int(name)


# -- control


def as_object(payload: bytes) -> dict[str, Any]:
    """A JSON object. Raises BadAnswer."""
    try:
        value = json.loads(payload)
    except ValueError as error:
        raise BadAnswer(f"no JSON ({error}): {payload[:200]!r}") from error
    if not isinstance(value, dict):
        raise BadAnswer(f"no JSON object: {payload[:200]!r}")
    return cast("dict[str, Any]", value)


def read_error(answer: Mapping[str, Any]) -> tuple[int, str]:
    """`(status, message)` of an error: `{"error": {"message": ..., "code": ...}}`, or only a text."""
    error = answer.get("error", answer)
    if isinstance(error, dict):
        known = cast("dict[str, Any]", error)
        code = known.get("code")
        return code if isinstance(code, int) else 400, str(known.get("message") or known.get("detail") or known)[:1000]
    return 400, str(error)[:1000]


def read_message(answer: Mapping[str, Any]) -> str:
    """The words beside `success` of a control answer."""
    return str(answer.get("message") or answer.get("error") or answer)[:1000]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Answer of `/model_info`, which is also how Headway asks whether a server lives."""

    model_path: str
    version: str


def read_model_info(answer: Mapping[str, Any]) -> ModelInfo:
    """Raises BadAnswer for what no server of SGLang says."""
    try:
        return ModelInfo(str(answer["model_path"]), str(answer["weight_version"]))
    except KeyError as error:
        raise BadAnswer(f"{MODEL_INFO} without {error}: this is no SGLang server") from error


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What the engine needs of `/server_info`; the checks at start read more of it."""

    version: str
    """Of SGLang."""
    capacity: int
    """Tokens that the key/value cache holds."""
    incremental: bool
    overlap: bool
    """The server has sampled one token more than it has counted when it pauses in place."""
    tensor_parallel: int


def read_server_info(answer: Mapping[str, Any]) -> ServerInfo:
    """Raises BadAnswer for what no server of SGLang says."""
    try:
        return ServerInfo(str(answer["version"]), int(answer["max_total_num_tokens"]),
                          bool(answer["incremental_streaming_output"]), not answer["disable_overlap_schedule"],
                          int(answer["tp_size"]))
    except (KeyError, TypeError, ValueError) as error:
        raise BadAnswer(f"{SERVER_INFO} without {error}: no server of SGLang, or one of another version") from error


def read_checksums(answer: Mapping[str, Any]) -> dict[str, str]:
    """`name -> 16 hex digits` of `/weights_checker`; names of rank r > 0 begin with `r:`."""
    try:
        ranks = cast("list[dict[str, Any]]", answer["ranks"])
        return {name if rank == 0 else f"{rank}:{name}": str(digits)
                for rank, info in enumerate(ranks)
                for name, digits in cast("dict[str, Any]", info["checksums"]).items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise BadAnswer(f"{CHECKSUMS} without {error}: {str(answer)[:200]}") from error


@dataclass(frozen=True, slots=True)
class Load:
    """What a server holds now, over its data-parallel ranks."""

    running: int
    queued: int


def read_loads(answer: Mapping[str, Any]) -> Load:
    """Answer of `/v1/loads`. Raises BadAnswer."""
    try:
        loads = cast("list[dict[str, Any]]", answer["loads"])
        return Load(sum(int(load["num_running_reqs"]) for load in loads),
                    sum(int(load["num_waiting_reqs"]) for load in loads))
    except (KeyError, TypeError, ValueError) as error:
        raise BadAnswer(f"{LOADS} without {error}: {str(answer)[:200]}") from error
