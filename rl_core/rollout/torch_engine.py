"""The embedded engine: continuous batching inside the rollout worker's process, one thread of its own.

One turn of the loop: install new weights if some are offered, end what was cancelled, admit waiting requests (prompts
read together, equal ones once) and sample their first token, then one more token for every running row.

    consumes: submitted requests and offered weight versions
    waits for: either, when no row is running
    unblocked by: submit, cancel, swap, close

Tokens of a request are decided by (weights, prompt, sampling, seed): see decoder.py for the arithmetic and sampling.py
for the noise. Requests in flight keep their tokens and their key/value cache over a swap; every token carries the
version that sampled it.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_core.errors import DeadPart, WeightsDamaged
from rl_core.lora.tensors import is_adapter, merged
from rl_core.model_setup import eos_token_ids
from rl_core.rollout.models import Dtype, Prepared, load_model, read_model_tensors
from rl_core.rollout.requests import check_request, empty_completion
from rl_core.rollout.rows import NO_VERSION, Rows, StopStrings, Work
from rl_core.rollout.sampling import sample
from rl_core.types import Completion, GenerateRequest, Sampling, WeightVersion
from rl_core.weights import load_weights

PREFILL_TOKENS = 8192
"""Padded prompt tokens read in one forward pass."""
ADMIT_SHARE = 8
"""With more waiting than fits, 1/8 of the slots must be free before prompts are read: few large prefills, not many."""


@dataclass(slots=True, eq=False)
class _Swap:
    version: WeightVersion
    prepared: Prepared
    done: Future[None]


class TorchEngine:
    """See rl_core/rollout/engine.py for the promises. `served` is None, and tokens carry version -1, before a swap."""

    def __init__(self, model_dir: Path, *, slots: int = 64, threads: int = 1, dtype: Dtype = "float32",
                 device: str = "cpu", max_context: int | None = None, adapter_scale: float = 0.0) -> None:
        """Loads the weights of `model_dir`. `max_context`: longest prompt and answer together, tokens; null = the
        model's own. `adapter_scale`: what the product of an adapter is multiplied by, where versions are adapters to
        the weights of `model_dir`. Raises ConfigError for a model that cannot be run."""
        self._model_dir = model_dir
        self._scale = adapter_scale
        self._base: dict[str, Tensor] = {}
        """Of `model_dir`, mapped files: from the first adapter on."""
        self._model = load_model(model_dir, slots=slots, dtype=dtype, device=device, max_context=max_context)
        self._rows = Rows(slots, self._model.vocabulary, eos_token_ids(model_dir), self._model.context)
        self._threads = threads
        self._tokenizer: Any = None
        self._changed = threading.Condition()
        # All below is guarded by `_changed`; `_model` and `_rows` belong to the engine's thread.
        self._served: WeightVersion | None = None
        self._live: dict[str, Work] = {}
        self._waiting: deque[Work] = deque()
        self._cancelled: set[str] = set()
        self._swaps: deque[_Swap] = deque()
        self._closed = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="torch-engine", daemon=True)
        self._thread.start()

    # -- called from any thread

    @property
    def served(self) -> WeightVersion | None:
        return self._served

    @property
    def running(self) -> int:
        return len(self._live)

    @property
    def context(self) -> int:
        """Longest prompt and answer together, tokens."""
        return self._model.context

    @property
    def vocabulary(self) -> int:
        """Token ids are below this."""
        return self._model.vocabulary

    def submit(self, request: GenerateRequest) -> Future[Completion]:
        future: Future[Completion] = Future()
        future.set_running_or_notify_cancel()
        try:
            check_request(request, self._model.vocabulary, self._model.context)
        except ValueError as error:
            future.set_exception(error)
            return future
        work = Work(request, future, self._watch(request.sampling))
        with self._changed:
            if self._closed or self._error is not None:
                future.set_exception(self._dead())
            elif request.request_id in self._live:
                future.set_exception(ValueError(f"request {request.request_id!r} is running already"))
            else:
                self._live[request.request_id] = work
                self._waiting.append(work)
                self._changed.notify()
        return future

    def cancel(self, request_id: str) -> None:
        with self._changed:
            if request_id in self._live:
                self._cancelled.add(request_id)
                self._changed.notify()

    def swap(self, version: WeightVersion, weights_dir: Path) -> str:
        """Read, verified and prepared in the caller's thread; generation pauses only for the copy."""
        if version == self._served:
            return version.digest
        swap = _Swap(version, self._model.prepare(self._whole(load_weights(weights_dir, version))), Future())
        with self._changed:
            if self._closed or self._error is not None:
                raise self._dead()
            self._swaps.append(swap)
            self._changed.notify()
        swap.done.result()
        return version.digest

    def _whole(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """All weights of a version: its own, or those of the model directory with its adapter in them."""
        if not is_adapter(tensors):
            return tensors
        if not self._scale:
            raise WeightsDamaged("a version is an adapter, and this engine was opened without the scale of one")
        if not self._base:
            self._base = read_model_tensors(self._model_dir)
        return merged(self._base, tensors, self._scale)

    def counters(self) -> dict[str, dict[str, float]]:
        return {}

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _dead(self) -> DeadPart:
        return DeadPart("torch engine: closed" if self._error is None else f"torch engine: died of {self._error!r}")

    def _watch(self, sampling: Sampling) -> StopStrings | None:
        if not sampling.stop:
            return None
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            self._tokenizer = cast(Any, AutoTokenizer).from_pretrained(
                self._model_dir, local_files_only=True, trust_remote_code=False)
        return StopStrings(sampling.stop, self._decode)

    def _decode(self, ids: list[int]) -> str:
        return cast(str, self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    # -- the engine's thread

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        try:
            with torch.inference_mode():
                while self._turn():
                    pass
        except BaseException as error:  # the thread's edge: whoever waits must hear of it
            self._error = error
        self._end()

    def _turn(self) -> bool:
        """One turn of the loop; False once closed."""
        with self._changed:
            while not (self._closed or self._swaps or self._cancelled or self._waiting or self._rows.n):
                self._changed.wait()
            if self._closed:
                return False
            swaps, cancelled = list(self._swaps), self._cancelled
            self._cancelled = set()
        for swap in swaps:
            self._install(swap)
        if cancelled:
            self._cancel(cancelled)
        works = self._admissible()
        if works:
            self._admit(works)
        if self._rows.n:
            logits = self._model.decode(self._rows.token[:self._rows.n], self._rows.position[:self._rows.n])
            self._record(0, logits)
        return True

    def _install(self, swap: _Swap) -> None:
        self._model.install(swap.prepared)
        self._served = swap.version
        with self._changed:
            self._swaps.popleft()  # not before: whoever waits for one that cannot be installed must hear of it
        swap.done.set_result(None)

    def _cancel(self, request_ids: set[str]) -> None:
        with self._changed:
            waiting = [work for work in self._waiting if work.request.request_id in request_ids]
            self._waiting = deque(work for work in self._waiting if work.request.request_id not in request_ids)
        for work in waiting:
            self._resolve(work, empty_completion(work.request))
        rows = [i for i, work in enumerate(self._rows.work) if work.request.request_id in request_ids]
        self._finish(np.array(rows, np.int64), cancelled=True)

    def _admissible(self) -> list[Work]:
        """Waiting requests to take now, oldest first."""
        with self._changed:
            free = self._rows.slots - self._rows.n
            few = free < len(self._waiting) and free < max(1, self._rows.slots // ADMIT_SHARE)
            if few and self._rows.n:
                return []
            return [self._waiting.popleft() for _ in range(min(free, len(self._waiting)))]

    def _admit(self, works: list[Work]) -> None:
        """Read prompts, by like length and at most PREFILL_TOKENS at once, and sample each request's first token."""
        works.sort(key=lambda work: len(work.request.token_ids_P))
        while works:
            contexts: dict[bytes, NDArray[np.int32]] = {}
            owners: list[int] = []
            order: dict[bytes, int] = {}
            for work in works:
                context = work.request.token_ids_P
                key = context.tobytes()
                if key not in order:
                    if contexts and (len(contexts) + 1) * len(context) > PREFILL_TOKENS:
                        break
                    order[key] = len(contexts)
                    contexts[key] = context
                owners.append(order[key])
            taken, works = works[:len(owners)], works[len(owners):]
            first = self._rows.n
            self._rows.append(taken)
            self._record(first, self._model.prefill(list(contexts.values()), owners, first))

    def _record(self, lo: int, logits_NV: Tensor) -> None:
        """Sample the next token of rows lo..n-1 and let those go that ended."""
        rows = self._rows
        token, logprob = sample(logits_NV, rows.temperatures(lo), rows.uniforms(lo), rows.truncation(lo))
        ended = rows.record(lo, token, logprob, NO_VERSION if self._served is None else self._served.v)
        if len(ended):
            self._finish(ended)

    def _finish(self, rows: NDArray[np.int64], *, cancelled: bool = False) -> None:
        done = [(self._rows.work[row], self._rows.completion(row, cancelled=cancelled)) for row in map(int, rows)]
        source, target = self._rows.remove(rows)
        if len(source):
            self._model.move(source, target, self._rows.longest())
        for work, completion in done:
            self._resolve(work, completion)

    def _resolve(self, work: Work, completion: Completion) -> None:
        with self._changed:
            del self._live[work.request.request_id]
            self._cancelled.discard(work.request.request_id)
        work.future.set_result(completion)

    def _end(self) -> None:
        """Everything that waits hears the end: the tokens so far after `close`, DeadPart after an error."""
        with self._changed:
            works, swaps = list(self._live.values()), list(self._swaps)
            self._live.clear()
            self._waiting.clear()
            self._swaps.clear()
        rows = {work.request.request_id: row for row, work in enumerate(self._rows.work)}
        for swap in swaps:
            swap.done.set_exception(self._dead())
        for work in works:
            row = rows.get(work.request.request_id)
            if self._error is not None:
                work.future.set_exception(self._dead())
            elif row is None:
                work.future.set_result(empty_completion(work.request))
            else:
                work.future.set_result(self._rows.completion(row, cancelled=True))
