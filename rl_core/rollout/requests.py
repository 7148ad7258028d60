"""What every engine asks of a request before it samples anything, and the answer of one that never began."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rl_core.types import Completion, GenerateRequest, Sampling, VersionRuns


def empty_completion(request: GenerateRequest) -> Completion:
    """The answer of a request that was cancelled before its first token."""
    none = np.zeros(0, np.int32)
    return Completion(request_id=request.request_id, token_ids_L=none, logprobs_L=np.zeros(0, np.float32),
                      version_runs=VersionRuns(end_R=none, version_R=none), finish_reason="cancelled")


def check_request(request: GenerateRequest, vocabulary: int, context: int) -> None:
    """Raises ValueError naming the request and what cannot be sampled."""
    ids, sampling = request.token_ids_P, request.sampling
    name = f"request {request.request_id!r}"
    if not len(ids):
        raise ValueError(f"{name}: the prompt has no token")
    if len(ids) >= context:
        raise ValueError(f"{name}: a prompt of {len(ids)} tokens leaves no room in a context of {context}")
    if ids.min() < 0 or ids.max() >= vocabulary:
        wrong = ids[(ids < 0) | (ids >= vocabulary)][0]
        raise ValueError(f"{name}: token id {wrong} is outside the vocabulary of {vocabulary}")
    for field, good in _limits(sampling):
        if not good:
            raise ValueError(f"{name}: sampling.{field} cannot be {getattr(sampling, field)!r}")


def _limits(sampling: Sampling) -> Sequence[tuple[str, bool]]:
    """Fields with whether their value can be sampled; written so that NaN is refused."""
    return (("temperature", 0 <= sampling.temperature < float("inf")), ("top_p", 0 < sampling.top_p <= 1),
            ("top_k", sampling.top_k >= 0), ("min_p", 0 <= sampling.min_p <= 1),
            ("max_new_tokens", sampling.max_new_tokens >= 1), ("stop", all(sampling.stop)))
