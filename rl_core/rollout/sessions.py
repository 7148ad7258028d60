"""The session function of a user's (`rollout.session`): whether a session goes on behind an answer, and with what.

A session is one of the answers of a group that are compared: it begins with the group's prompt, and the function is
asked behind every answer. Each answer is a trajectory of its own, with what it was asked; the session has one score,
that of its last answer, which all of them carry. The function runs in a child of the rollout worker, with a deadline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_core.config import Config
from rl_core.errors import DataError, SessionError, SessionTimeout
from rl_core.rollout.data_rows import Row, read_prompt
from rl_core.rollout.encoder import Encoder, Limits, Tokenizer
from rl_core.rollout.rewards.child import Task
from rl_core.rollout.rewards.function import allowed_imports, check_target
from rl_core.rollout.rewards.process import FunctionProcess
from rl_core.types import Lease

FIELD = "rollout.session"


@dataclass(frozen=True, slots=True)
class Next:
    """What a session goes on with: `Next("again, please", array([5, 6]))`."""

    prompt: Any
    """As the function returned it: JSON values."""
    token_ids_P: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Said:
    """One answer of a session so far."""

    prompt: Any
    """What it answers."""
    text: str
    finish_reason: str


class SessionFunction(FunctionProcess):
    """`go_on(lease, session, said)` -> what is asked next, or None where the session is over.

    Raises SessionError, SessionTimeout by its deadline.
    """

    def __init__(self, target: str, *, cwd: Path, deadline_s: float, tokenizer: Tokenizer, limits: Limits,
                 allowed: Sequence[str] = (), quiet: bool = False) -> None:
        """Raises ConfigError for a path that may not be run."""
        check_target(target, cwd, allowed, FIELD)
        task: Task = {"kind": "session", "target": target, "cwd": str(cwd.resolve()), "signature": "auto",
                      "answer_key": "answer", "pattern": None, "code": None, "watch": False}
        super().__init__(f"{FIELD} {target}", task, deadline_s=deadline_s, quiet=quiet, failed=SessionError,
                         timeout=SessionTimeout)
        self._encode, self._target = Encoder(tokenizer, limits), target

    def go_on(self, lease: Lease, session: int, said: Sequence[Said]) -> Next | None:
        """What the session is asked behind these answers; None where it is over."""
        prompt = self.ask({"session": facts_of(lease, session, said)})["prompt"]
        return None if prompt is None else Next(prompt, self._ids(prompt))

    def _ids(self, prompt: Any) -> NDArray[np.int32]:
        where = f"{FIELD} {self._target}"
        try:
            text, form = read_prompt(prompt, where)
            (ids,) = self._encode([Row(prompt=text, answer="", data_source="", where=where, form=form)])
        except DataError as error:
            raise SessionError(str(error)) from error
        if len(ids) > self._encode.limits.max_tokens:
            raise SessionError(f"{where}: what it asks next has {len(ids)} tokens; at most data.max_prompt_tokens = "
                               f"{self._encode.limits.max_tokens}")
        return ids


def facts_of(lease: Lease, session: int, said: Sequence[Said]) -> dict[str, Any]:
    """What the function is given, plain JSON values."""
    prompt = lease.prompt
    columns = {name: value for name, value in prompt.columns.items() if name != "prompt"}
    return {"group_id": lease.group_id, "session": session, "data_source": prompt.data_source, "truth": prompt.answer,
            "columns": columns, "prompts": [each.prompt for each in said], "answers": [each.text for each in said],
            "finish_reasons": [each.finish_reason for each in said]}


def make_session(config: Config, tokenizer: Tokenizer, *, vocab_size: int | None = None, cwd: Path | None = None,
                 allowed: Sequence[str] | None = None, quiet: bool = False) -> SessionFunction | None:
    """The run's session function, or None; a run on another run's shards asks none. `cwd` is the working directory of
    the command. Raises ConfigError."""
    if config.rollout.session is None or config.offline:
        return None
    limits = Limits(max_tokens=config.data.max_prompt_tokens, vocab_size=vocab_size)
    return SessionFunction(config.rollout.session, cwd=cwd or Path.cwd(), deadline_s=config.deadlines.reward_s,
                           tokenizer=tokenizer, limits=limits, quiet=quiet,
                           allowed=allowed_imports() if allowed is None else allowed)


def check_session(config: Config, tokenizer: Tokenizer, *, cwd: Path | None = None) -> None:
    """Load the run's session function once, in a process of its own. Raises ConfigError where that fails."""
    if (made := make_session(config, tokenizer, cwd=cwd, quiet=True)) is not None:
        try:
            made.load()
        finally:
            made.close()
