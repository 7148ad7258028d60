"""One SGLang server as a process of this machine: `SglangServer(...).start()` gives its address, `stop()` ends it.

The server runs in an interpreter, or an environment, of its own; nothing of it is imported here. It is the child of a
warden (warden.py), which ends it when this process is gone, however it went. Its stdout and stderr go to a log of its
own, whose tail every error holds.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rl_core.config import SglangEngineConfig
from rl_core.errors import EngineStartFailed
from rl_core.rollout.sglang import warden
from rl_core.rollout.sglang.asking import ask
from rl_core.rollout.sglang.scratch import make_scratch, note_shared, remove_scratch

HOST = "127.0.0.1"
MARGIN = 8
"""Tokens of its context that a server keeps to itself: it takes prompts of 6 fewer, and makes answers of 2 fewer."""
PORTS = 3
"""Tries with another port, where somebody else took the one that was free a moment before."""
LOOK_S = 0.1
STOP_S = warden.GRACE_S + 2.0
KILL_S = 2.0
"""For a warden to kill its server, and to say how it ended."""
TAIL_BYTES = 1 << 16
TAIL_CHARACTERS = 300
"""Of one line in an error."""
PORT_TAKEN = re.compile(r"address already in use|port \d+ is (?:not available|in use|already)|Errno 98", re.IGNORECASE)
NO_MEMORY = re.compile(r"out of memory|OutOfMemory|MemoryError|not enough memory|Cannot allocate memory|"
                       r"ended: signal 9", re.IGNORECASE)


class SglangServer:
    """A server that may be started again after its death, each time on a new port. Not thread-safe but for `stop`.

        server = SglangServer(run.model, config=config.rollout.engine, log=run.server_log("rollout-0", 0))
        url = server.start()        # "http://127.0.0.1:41234"

    `context`: longest prompt and answer together, tokens; None = the model's own. `gpus`: which of the GPUs that this
    process sees; None = all.
    """

    def __init__(self, model_dir: Path, *, config: SglangEngineConfig, log: Path, context: int | None = None,
                 gpus: Sequence[int] | None = None) -> None:
        self._model_dir, self._config, self._log = model_dir, config, log
        self._context, self._gpus = context, gpus
        self._warden: subprocess.Popen[bytes] | None = None
        self._log_begins = 0
        self._scratch: Path | None = None
        self.url = ""
        """Empty before the first start."""
        self.pid = 0
        """Of the server's main process."""

    def start(self) -> str:
        """Start a process and wait until it serves: it has answered for a token. Returns its address.

        Raises EngineStartFailed, with the tail of the log, for a process that ends or that does not answer in
        `start_s`; it is gone then.
        """
        if self.alive():
            raise AssertionError(f"server {self.url} (pid {self.pid}) is started already")
        self.stop(grace_s=0.0)  # what one before it may have left
        until = time.monotonic() + self._config.start_s
        for left in reversed(range(PORTS)):
            name = f"headway-{secrets.token_hex(8)}"
            scratch = self._scratch = make_scratch()
            try:
                self._launch(_free_port(), name, scratch)
                self._wait(name, until)
                if self._warden is not None:
                    note_shared(scratch, self._warden.pid)
                return self.url
            except EngineStartFailed:
                if self._warden is not None:
                    note_shared(scratch, self._warden.pid)
                taken = PORT_TAKEN.search(self._said())
                self.stop(grace_s=0.0)
                if not (taken and left):
                    raise
        raise AssertionError("the last try returns or raises")

    def alive(self) -> bool:
        """Whether the process is there: whether it answers is for its client to say."""
        if self._warden is None or self._warden.poll() is not None:
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def stop(self, grace_s: float = STOP_S) -> None:
        """SIGTERM, then SIGKILL to whatever is left of its process group; without grace SIGKILL at once. Idempotent.

        The warden does it, and its last line in the log says how the server ended: a server that is dead already has a
        cause, which whoever reads the log looks for.
        """
        process, scratch = self._warden, self._scratch
        self._warden = self._scratch = None
        if process is not None:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM if grace_s else signal.SIGUSR1)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(grace_s or KILL_S)
            with contextlib.suppress(ProcessLookupError, PermissionError):  # a dead warden may have left its group
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if scratch is not None:
            remove_scratch(scratch)

    def log_tail(self, lines: int = 20) -> str:
        """The last lines that this process, not one before it, has said; long ones are cut."""
        kept = [line[:TAIL_CHARACTERS] for line in self._said().splitlines() if line.strip()]
        return "\n".join(kept[-lines:])

    # -- starting

    def _launch(self, port: int, name: str, scratch: Path) -> None:
        command = self._command(port, name)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        reading, writing = os.pipe()
        try:
            with self._log.open("ab") as log:
                self._log_begins = log.tell()
                self._warden = subprocess.Popen(
                    [sys.executable, "-I", "-S", warden.__file__, str(os.getpid()), str(writing), *command],
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment(scratch),
                    pass_fds=(writing,),
                    process_group=0)  # and not a session: what a run started is found by the session of its services
            os.close(writing)
            writing = -1
            said = os.read(reading, 32)
        finally:
            os.close(reading)
            if writing >= 0:
                os.close(writing)
        if not said:
            self._warden.wait()
            raise EngineStartFailed(f"server of SGLang: {command[0]} could not be started; rollout.engine.python names "
                                    f"the interpreter:\n{self.log_tail(5)}")
        self.pid, self.url = int(said), f"http://{HOST}:{port}"

    def _command(self, port: int, name: str) -> list[str]:
        config = self._config
        python = shutil.which(config.python)
        if python is None:
            raise EngineStartFailed(f"rollout.engine.python: there is no such program (got {config.python!r} in "
                                    f"{os.getcwd()}); `make sglang` makes an environment for a CPU server, and "
                                    "docs/sglang.md says what a GPU one takes")
        if config.script is not None and not Path(config.script).is_file():
            raise EngineStartFailed(f"rollout.engine.script: there is no such file (got {config.script!r} in "
                                    f"{os.getcwd()})")
        program = ["-m", "sglang.launch_server"] if config.script is None else [os.path.abspath(config.script)]
        context = [] if self._context is None else ["--context-length", str(self._context + MARGIN)]
        return [os.path.abspath(python), *program, "--model-path", str(self._model_dir), "--host", HOST,
                "--port", str(port), "--served-model-name", name, "--device", config.device, "--dtype", config.dtype,
                "--tp-size", str(config.tensor_parallel), *context, "--max-running-requests", str(config.max_running),
                "--stream-interval", str(config.stream_interval), "--incremental-streaming-output",
                # Its own warm-up is a text, which a tokenizer without an unknown token refuses: then the server ends.
                "--skip-server-warmup", "--sleep-on-idle",  # else its scheduler keeps a core busy while it waits
                "--sampling-defaults", "openai", "--log-level-http", "warning",
                *config.server_args]

    def _environment(self, scratch: Path) -> dict[str, str]:
        """That of this process, without what belongs to its own interpreter."""
        environ = {name: value for name, value in os.environ.items()
                   if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "SGLANG_RETURN_ORIGINAL_LOGPROB")}
        environ |= {"HF_HUB_OFFLINE": "1", "TMPDIR": str(scratch)}
        if self._context is not None:  # with the margin it may be longer than the model's, which is never used
            environ["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
        if self._config.device == "cpu":
            environ["OMP_NUM_THREADS"] = str(self._config.threads)
        if self._gpus is not None:
            seen = os.environ.get("CUDA_VISIBLE_DEVICES")
            names = seen.split(",") if seen else None
            environ["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpu) if names is None else names[gpu] for gpu in self._gpus)
        return environ

    def _wait(self, name: str, until: float) -> None:
        """Until the server that was given this name, and no other on its port, has answered for a token."""
        while True:
            if not self.alive():
                raise EngineStartFailed(self._ended())
            if ask(self.url, "/model_info").status == 200 and _served_name(self.url) == name and _one_token(self.url):
                return
            if time.monotonic() >= until:
                raise EngineStartFailed(f"server of SGLang (pid {self.pid}): did not serve in {self._config.start_s:g} "
                                        f"s; raise rollout.engine.start_s. Its log {self._log} ends with:\n"
                                        f"{self.log_tail()}")
            time.sleep(LOOK_S)

    def _ended(self) -> str:
        if self._warden is not None:  # its last line says how
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._warden.wait(KILL_S)
        told = f"server of SGLang (pid {self.pid}): ended before it served. Its log {self._log} ends with:\n" \
               f"{self.log_tail()}"
        if NO_MEMORY.search(self._said()):
            told = "out of memory? rollout.engine.server_args takes [--mem-fraction-static, '0.7'] or " \
                   f"[--max-total-tokens, '65536']; tensor_parallel spreads the weights. {told}"
        return told

    def _said(self) -> str:
        try:
            with self._log.open("rb") as log:
                end = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_begins, end - TAIL_BYTES))
                return log.read().decode(errors="replace")
        except FileNotFoundError:
            return ""


def _free_port() -> int:
    with socket.socket() as free:
        free.bind((HOST, 0))
        return int(free.getsockname()[1])


def _served_name(url: str) -> str | None:
    models = ask(url, "/v1/models").fields
    try:
        return str(models["data"][0]["id"])
    except (TypeError, KeyError, IndexError):
        return None


def _one_token(url: str) -> bool:
    """`/health` says less: it answers before the first forward pass, or generates by itself."""
    body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}}
    return ask(url, "/generate", body, timeout_s=60.0).status == 200
