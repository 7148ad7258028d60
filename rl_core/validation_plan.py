"""What cannot work about a validation, known before anything starts: named fields, the value got, what to do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rl_core.config import Config, SglangEngineConfig, ValidationConfig
from rl_core.errors import refuse

BYTES_PER_ANSWER = 1024
"""Of a scored answer (token count, score, parts) until its validation is added up; its text only in the table."""
LIMIT_BYTES = 2 * 2**30
"""Of all scored answers of one validation."""
OF_SAMPLED: dict[str, Any] = {"n": 1, "k": (), "temperature": None, "top_p": None, "top_k": None}
"""Settings of `validation` that only sampled answers have, with the value that asks for nothing."""


def of_sampled(validation: ValidationConfig, named: Iterable[str] = tuple(OF_SAMPLED)) -> list[str]:
    """Those of the `named` settings that ask something of sampled answers: `validation.n=8` -> `["n"]`."""
    return [name for name in named if name in OF_SAMPLED and getattr(validation, name) != OF_SAMPLED[name]]


def check_validation(config: Config) -> None:
    """Refuse settings of a validation that cannot work together, whatever the inputs. Raises ConfigError."""
    v = config.validation
    if v.only and config.data.validation is None:
        refuse("validation.only", True, "there is nothing to validate on: set data.validation")
    if config.validates_lent:
        _check_replica(config)
    for name in () if v.sampled else of_sampled(v):
        refuse(f"validation.{name}", getattr(v, name), "belongs to sampled answers, and validation.sampled is false; "
               "set it to true")
    for k in v.k:
        if k > v.n:
            refuse("validation.k", list(v.k), f"pass@{k} needs {k} answers, and validation.n is {v.n}; use at most "
                   "that, or raise n")
    if v.sampled and v.n > 1 and v.temperature is None and config.sampling.temperature == 0:
        refuse("validation.n", v.n, "all answers would be the greedy one, since sampling.temperature is 0; set "
               "validation.temperature")


def _check_replica(config: Config) -> None:
    """Whether rollout has a server that it can do without for a validation."""
    engine = config.rollout.engine
    if not isinstance(engine, SglangEngineConfig):
        refuse("validation.engine", "replica", f"takes one of rollout's servers, and engine {engine.type} has none; "
               "use embedded")
    if config.validation.only or config.offline:
        refuse("validation.engine", "replica", "takes one of rollout's servers, and this start has no rollout; use "
               "embedded")
    if engine.servers < 2:
        refuse("validation.engine", "replica", "takes one server of a rollout worker, which has no other one to go on "
               "with; use embedded, or two servers or more (rollout.engine.replicas, rollout.engine.urls)")


def check_validation_inputs(config: Config, *, rows: int, longest: int, context: int) -> None:
    """Refuse what the held-out prompts and the model do not allow. `rows` prompts, the longest of `longest` tokens, a
    model that takes `context` tokens in all. Raises ConfigError."""
    v = config.validation
    answers = rows * v.answers
    if answers * BYTES_PER_ANSWER > LIMIT_BYTES:
        name, value = ("validation.n", v.n) if v.answers > 2 else ("data.validation_size", config.data.validation_size)
        refuse(name, value, f"{rows} held-out prompts with {v.answers} answers each are {answers} answers to hold in "
               f"memory until they are added up, {answers * BYTES_PER_ANSWER / 2**30:.1f} GiB; the limit is "
               f"{LIMIT_BYTES // 2**30} GiB: use fewer answers, or fewer prompts (data.validation_size)")
    if rows and longest + config.validation_tokens > context:
        own = v.max_new_tokens is not None
        name = "validation.max_new_tokens" if own else "sampling.max_new_tokens"
        room = f"use at most {context - longest}" if context > longest else "shorten the prompt"
        refuse(name, config.validation_tokens, f"the longest held-out prompt has {longest} tokens and the model takes "
               f"{context} in all; {room}" + ("" if own else ", or set validation.max_new_tokens"))
