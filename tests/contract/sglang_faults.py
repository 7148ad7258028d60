"""A server that is SGLang's in its shapes, and broken in one way: what a test asks it to do wrong, it does.

It serves only faults: what a sound server does is asked of a real one (test_sglang_engine.py), which also has these
shapes compared with its own (`shapes`, `unlike`). Its tokens are a function of their place alone (`token_at`), so that
an answer put together from several tries shows whether a token was lost or came twice.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aiohttp import web

from rl_core.rollout.sglang import wire
from rl_core.rollout.sglang.fingerprints import tensor_hash
from rl_core.weights import WEIGHTS_FILE, read_tensors

HOST = "127.0.0.1"
PART = 4
"""Tokens of one event."""
FOREVER_S = 3600.0


def token_at(place: int) -> int:
    """The token at this place of a context, an ordinary character of the tiny vocabulary."""
    return 6 + (place * 7) % 50


def model_info(version: str) -> dict[str, Any]:
    return {"model_path": "/model", "is_generation": True, "weight_version": version}


def server_info(**over: Any) -> dict[str, Any]:
    return {"version": "0.5.23", "max_total_num_tokens": 8192, "incremental_streaming_output": True,
            "disable_overlap_schedule": True, "tp_size": 1} | over


def event(rid: str, ids: Sequence[int], total: int, *, prompt: int, version: str,
          finish: Mapping[str, Any] | None = None, spans: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """One event of a streamed answer: `ids` since the last one, `total` of the answer."""
    meta: dict[str, Any] = {
        "id": rid, "finish_reason": finish, "prompt_tokens": prompt, "completion_tokens": total, "cached_tokens": 0,
        "weight_version": version, "num_retractions": 0,
        "output_token_logprobs": [[-0.5, token, None] for token in ids]}
    if finish is not None:
        meta["weight_versions"] = list(spans) or [{"version": version, "start": 0, "end": total}]
    return {"text": "", "output_ids": list(ids), "meta_info": meta}


def shapes() -> dict[str, dict[str, Any]]:
    """A sample of every answer that this server gives, by route; of `/generate` the last event of a stream."""
    return {
        wire.MODEL_INFO: model_info("3"), wire.SERVER_INFO: server_info(),
        wire.LOADS: {"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0}]},
        wire.UPDATE_FROM_DISK: {"success": True, "message": "", "num_paused_requests": 0},
        wire.CHECKSUMS: {"success": True, "message": "", "ranks": [{"checksums": {}}]},
        wire.PAUSE: {"message": "", "status": "ok"}, wire.RESUME: {"message": "", "status": "ok"},
        wire.GENERATE: event("r", [7], 1, prompt=3, version="3", finish={"type": "length", "length": 1})}


def unlike(ours: Any, theirs: Any, at: str = "") -> list[str]:
    """Where `theirs` lacks what `ours` has, or has it in another type. Lists are compared by their first items."""
    if isinstance(ours, Mapping):
        if not isinstance(theirs, Mapping):
            return [f"{at}: no object but {theirs!r}"]
        return [word for name, value in ours.items() for word in
                ([f"{at}.{name} is absent"] if name not in theirs else unlike(value, theirs[name], f"{at}.{name}"))]
    if isinstance(ours, list) and ours and isinstance(theirs, list) and theirs:
        return unlike(ours[0], theirs[0], f"{at}[0]")
    same = type(ours) is type(theirs) or (isinstance(ours, int | float) and isinstance(theirs, int | float))
    return [] if same else [f"{at}: {ours!r} is no {type(theirs).__name__}"]


class FaultyServer:
    """`with FaultyServer(model_dir) as server: server.fault["drop"] = 2` breaks off the next two answers.

    Faults are counted down as they happen; what is not in `fault` is answered soundly:

        generate: 500, refuse, hang, silent (after one part), drop (after one part), half_json, outside (a wrong id),
                  backwards (versions), abort (as if another client had), eat (a part without its tokens)
        update:   update_500, update_refused, update_ignored (says yes, keeps its weights), update_hangs
        always, while they stand: foreign (no SGLang at all), cumulative (streams from the beginning), deaf (no look)
    """

    def __init__(self, model_dir: Path, *, delay_s: float = 0.0) -> None:
        self.fault: Counter[str] = Counter()
        self.delay_s = delay_s
        """Between two parts of an answer."""
        self.asked: list[dict[str, Any]] = []
        """Bodies of `/generate`."""
        self.aborted: list[str] = []
        self.version = wire.UNNAMED
        self.paused = False
        self._base = self._checksums(model_dir)
        self.checksums = self._base
        self._loop = asyncio.new_event_loop()
        self._runner: web.AppRunner | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.url = ""
        self._alive = False

    def __enter__(self) -> FaultyServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # -- as a process (supervision.Process)

    def start(self) -> str:
        """On a new port, with the weights that it had at first."""
        self.version, self.checksums, self.paused = wire.UNNAMED, self._base, False
        if self.fault["start"] > 0:
            self.fault["start"] -= 1
            from rl_core.errors import EngineStartFailed

            raise EngineStartFailed("ended before it served")
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)
        self._alive = True
        return self.url

    def alive(self) -> bool:
        return self._alive

    def stop(self, grace_s: float = 0.0) -> None:
        """Every connection breaks off."""
        self._alive = False
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(10)

    def log_tail(self, lines: int = 20) -> str:
        return "the last line of its log"

    async def _start(self) -> None:
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{route:.*}", self._answer)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, HOST, 0)
        await site.start()
        self.url = f"http://{HOST}:{self._runner.addresses[0][1]}"

    async def _stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        self._runner = None

    # -- answers

    def _happens(self, name: str) -> bool:
        if self.fault[name] <= 0:
            return False
        self.fault[name] -= 1
        return True

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if self.fault["foreign"]:
            return web.Response(text="<html>It works!</html>", content_type="text/html")
        body = await request.json() if request.can_read_body else {}
        route = request.path
        if route in (wire.MODEL_INFO, wire.SERVER_INFO, wire.LOADS) and self.fault["deaf"]:
            await asyncio.sleep(FOREVER_S)
        if route == wire.MODEL_INFO:
            return web.json_response(model_info(self.version))
        if route == wire.SERVER_INFO:
            return web.json_response(server_info(incremental_streaming_output=not self.fault["cumulative"]))
        if route == wire.LOADS:
            return web.json_response(shapes()[route])
        if route in (wire.PAUSE, wire.RESUME):
            self.paused = route == wire.PAUSE
            return web.json_response(shapes()[route])
        if route == wire.CHECKSUMS:
            return web.json_response({"success": True, "message": "", "ranks": [{"checksums": self.checksums}]})
        if route == wire.ABORT:
            self.aborted += [each["rid"] for each in self.asked] if body.get("abort_all") else [body["rid"]]
            return web.Response()
        if route == wire.UPDATE_FROM_DISK:
            return await self._update(body)
        if route == wire.GENERATE:
            return await self._generate(request, body)
        return web.Response(status=404)

    async def _update(self, body: dict[str, Any]) -> web.Response:
        if self._happens("update_500"):
            return web.Response(status=500, text="Internal Server Error")
        if self._happens("update_hangs"):
            await asyncio.sleep(FOREVER_S)
        if self._happens("update_refused"):
            return web.json_response({"success": False, "message": "Failed to get weights iterator"}, status=400)
        if not self._happens("update_ignored"):
            self.checksums = self._checksums(Path(body["model_path"]))
        self.version = body["weight_version"]
        return web.json_response(shapes()[wire.UPDATE_FROM_DISK])

    async def _generate(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        self.asked.append(body)
        if self._happens("500"):
            return web.Response(status=500, text="Internal Server Error")
        if self._happens("refuse"):
            return web.json_response({"error": {"message": "The input is longer than the model's context length"}},
                                     status=400)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if self._happens("hang"):
            await asyncio.sleep(FOREVER_S)
        begin, most, rid = len(body["input_ids"]), body["sampling_params"]["max_new_tokens"], body["rid"]
        made = 0
        while made < most:
            while self.paused:
                await asyncio.sleep(0.005)
            size = min(PART, most - made)
            ids = [token_at(begin + made + i) for i in range(size)]
            if self._happens("eat"):
                made += size
                continue
            made += size
            if self._happens("outside"):
                ids[-1] = 10**6
            last = made == most
            finish: dict[str, Any] | None = {"type": "length", "length": most} if last else None
            spans: list[dict[str, Any]] = []
            if last and self._happens("backwards"):
                spans = [{"version": self.version, "start": 0, "end": 1}, {"version": "0", "start": 1, "end": made}]
            if not last and (rid in self.aborted or self._happens("abort")):
                finish = {"type": "abort", "message": "Abort in waiting queue"}
            payload = json.dumps(event(rid, ids, made, prompt=begin, version=self.version, finish=finish,
                                       spans=spans)).encode()
            if self._happens("half_json"):
                await response.write(b"data: " + payload[:len(payload) // 2] + b"\n\n")
                return response
            await response.write(b"data: " + payload + b"\n\n")
            if self._happens("drop"):
                assert request.transport is not None
                request.transport.abort()
                return response
            if self._happens("silent"):
                await asyncio.sleep(FOREVER_S)
            if finish is not None:
                break
            await asyncio.sleep(self.delay_s)
        await response.write(b"data: [DONE]\n\n")
        return response

    @staticmethod
    def _checksums(directory: Path) -> dict[str, str]:
        return {name: tensor_hash(tensor) for name, tensor in read_tensors(directory / WEIGHTS_FILE).items()}
