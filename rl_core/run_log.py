"""What the processes of a run log: `logs/<component>.jsonl`, one JSON object a line (docs/operations.md).

    {"time": "2026-01-31T07:45:12.123456Z", "level": "INFO", "run_key": "sort-2", "attempt": 1, "step": 42,
     "component": "owner", "message": "step 42 trained in 0.412 s"}

A file has one writer, the process of that name. Each line is given to the kernel when it is logged, so a kill loses
none (at most it tears the last one). What a run tells of itself goes to STORY and to these files alone; what the parts
warn of (`headway.learner` and so on) goes to stderr, too. Secrets are masked. Imports nothing heavy.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

STORY = logging.getLogger("headway.run")
"""For what people look up later: never on a terminal."""
PARTS = logging.getLogger("headway")
MAX_BYTES, OLDER_FILES = 16 * 2**20, 4
"""A line is about 200 bytes: a file holds some 80,000 steps. Of one component at most 80 MiB lie in a run directory, 2
% of the default quota; the oldest go first (`owner.jsonl.4`)."""
SECRET_NAME = re.compile(r"AUTH_STRING|PASSWORD|PASSWD|SECRET|TOKEN|API_KEY|CREDENTIAL|CONNECTION_URL", re.IGNORECASE)
"""Variables of the environment whose values are masked, but for paths."""
SHORTEST_SECRET = 8
LAST_LINES, LINE_CHARACTERS, TAIL_BYTES = 10, 300, 64 * 2**10
"""Of what a process wrote, as an error shows it: so many lines, each cut to so many characters, of the last bytes."""
URL_PASSWORD = re.compile(r"(\b[a-zA-Z][\w+.-]*://[^\s:/@]*:)[^\s@/]+(?=@)")
MASK = "***"

_step: ContextVar[int | None] = ContextVar("step", default=None)


@contextmanager
def at_step(step: int | None) -> Generator[None]:
    """What this thread logs inside the block is of this training step; None: of none in particular."""
    before = _step.set(step)
    try:
        yield
    finally:
        _step.reset(before)


class RunLog:
    """Writes the lines of this process until `close`.

        log = RunLog(run.component_log("owner"), run_key="sort-2", component="owner", attempt=lambda: 1)
        STORY.info("attempt 1 begins")
        log.close()

    `attempt()` is asked for each line: an actor that is adopted has another one. Raises OSError where no file can be.
    """

    def __init__(self, path: Path, *, run_key: str, component: str, attempt: Callable[[], int],
                 max_bytes: int = MAX_BYTES) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._handlers: list[tuple[logging.Logger, logging.Handler]] = []
        lines = _Lines(path, maxBytes=max_bytes, backupCount=OLDER_FILES, encoding="utf-8")
        lines.setFormatter(_Json(run_key, component, attempt))
        for logger in (STORY, PARTS):
            self._add(logger, lines)
        STORY.setLevel(logging.INFO)
        STORY.propagate = False
        if not logging.getLogger().handlers and logging.lastResort is not None:
            self._add(PARTS, logging.lastResort)  # which Python leaves out where there is any other handler

    def _add(self, logger: logging.Logger, handler: logging.Handler) -> None:
        logger.addHandler(handler)
        self._handlers.append((logger, handler))

    def close(self) -> None:
        """Idempotent."""
        handlers, self._handlers = self._handlers, []
        for logger, handler in handlers:
            logger.removeHandler(handler)
            if isinstance(handler, _Lines):
                with suppress(OSError):  # of a full disk
                    handler.close()


class _Lines(RotatingFileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """A full disk must not end the run through its log, nor be told of each line."""


class _Json(logging.Formatter):
    def __init__(self, run_key: str, component: str, attempt: Callable[[], int]) -> None:
        super().__init__()
        self._run_key, self._component, self._attempt = run_key, component, attempt
        self._secrets = secrets_of(os.environ)

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{moment}.{int(record.created % 1 * 1e6):06d}Z", "level": record.levelname,
            "run_key": self._run_key, "attempt": self._attempt(), "step": getattr(record, "step", _step.get()),
            "component": self._component, "message": masked(record.getMessage(), self._secrets)}
        if record.exc_info:
            line["traceback"] = masked(self.formatException(record.exc_info), self._secrets)
        return json.dumps(line)


def secrets_of(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Values that are not for logs, the longest first: `secrets_of({"MY_API_KEY": "correct-horse", "A_TOKEN_PATH":
    "/run/x"})` -> `("correct-horse",)`."""
    found = {value for name, value in environ.items() if SECRET_NAME.search(name) and not name.endswith(
        ("_PATH", "_FILE")) and len(value) >= SHORTEST_SECRET}
    return tuple(sorted(found, key=len, reverse=True))


def last_lines(log: Path) -> list[str]:
    """The end of what a process wrote to stdout and stderr, without secrets and blank lines; the last line is last.

    Raises OSError for a file that cannot be read.
    """
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL_BYTES))
        text = file.read().decode(errors="replace")
    lines = [line.rstrip() for line in masked(text, secrets_of(os.environ)).splitlines() if line.strip()]
    return [line[:LINE_CHARACTERS] for line in lines[-LAST_LINES:]]


def masked(text: str, secrets: tuple[str, ...] = ()) -> str:
    """Without these secrets, and without passwords of URLs: `masked("postgresql://me:word@host/db")` ->
    `"postgresql://me:***@host/db"`."""
    for secret in secrets:
        text = text.replace(secret, MASK)
    return URL_PASSWORD.sub(rf"\1{MASK}", text)
