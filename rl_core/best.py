"""Which validation is the best one, by a named field of its record (export.md 4). Importable without torch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from rl_core.config import Config
from rl_core.errors import ConfigError
from rl_core.run_dir import RunDir, numbered, read_json

OF_GREEDY = ("greedy_accuracy", "greedy_reward")
OF_SAMPLED = ("sampled_accuracy", "sampled_reward", "mean_at_n", "maj_at_n")
BY_K = ("pass_at_k", "maj_at_k")
"""By k: `pass_at_k.4`. With the others, the fields of a record, and of each source in it, of which more is better."""
BY_SOURCE = "by_source"
FIELD = re.compile(rf"(?:{BY_SOURCE}\..+\.)?(?:({'|'.join(OF_GREEDY)})|"
                   rf"({'|'.join(OF_SAMPLED)}|(?:{'|'.join(BY_K)})\.(\d+)))")
WORDS = ", ".join([*OF_GREEDY, *OF_SAMPLED, *(f"{name}.K" for name in BY_K), f"{BY_SOURCE}.NAME.<one of them>"])


@dataclass(frozen=True, slots=True)
class Best:
    """The best validation so far: `Best(step=120, value=0.83)`. `step`: training steps behind the weights."""

    step: int
    value: float


def check_best(config: Config) -> None:
    """Refuse a `checkpoint.best` that no validation of these settings can have. The name of a source is not checked:
    only records have it. Raises ConfigError."""
    name, validation = config.checkpoint.best, config.validation
    if name is None:
        return
    found = FIELD.fullmatch(name)
    if found is None:
        raise ConfigError(f"checkpoint.best: no field of a validation of which more is better; there are {WORDS} "
                          f"(got {name!r})")
    of_sampled = found.group(2)
    if of_sampled is not None and not validation.sampled:
        raise ConfigError("checkpoint.best: comes of sampled answers, and validation.sampled is false; set that to "
                          f"true, or take greedy_accuracy (got {name!r})")
    k = found.group(3)
    if k is not None and int(k) not in validation.passes:
        raise ConfigError("checkpoint.best: a validation has pass@k and maj@k for k = "
                          f"{', '.join(map(str, validation.passes))} (validation.n, validation.k); use one of these "
                          f"(got {name!r})")


def value_of(record: Mapping[str, Any], field: str) -> float | None:
    """The number under a dotted name; None where there is none. A key may have dots itself: `by_source.v1.5.mean_at_n`.

    Example: `{"by_source": {"v1.5": {"mean_at_n": 0.5}}}` -> 0.5.
    """
    parts = field.split(".")
    for cut in range(len(parts), 0, -1):
        if (head := ".".join(parts[:cut])) not in record:
            continue
        found, rest = record[head], ".".join(parts[cut:])
        if rest and isinstance(found, Mapping):
            deeper = value_of(cast(Mapping[str, Any], found), rest)
            if deeper is not None:
                return deeper
        elif not rest and isinstance(found, int | float) and math.isfinite(found):
            return float(found)
    return None


def best_by_field(run: RunDir, field: str) -> Best | None:
    """The validation with the largest value of `field`, the first among equals; None where no record has a number."""
    best: Best | None = None
    for step, path in numbered(run.validations, r"step-(\d{9})\.json"):
        value = value_of(read_json(path), field)
        if value is not None and (best is None or value > best.value):
            best = Best(step, value)
    return best


def known_fields(run: RunDir) -> list[str]:
    """Names that `best_by_field` finds a number for in the newest record, of those that more is better of."""
    newest: dict[str, Any] = {}
    for _, path in numbered(run.validations, r"step-(\d{9})\.json"):
        newest = read_json(path)
    places = [("", newest)] + [(f"{BY_SOURCE}.{name}.", part) for name, part in _parts(newest.get(BY_SOURCE)).items()]
    names = [prefix + name for prefix, part in places
             for name in (*OF_GREEDY, *OF_SAMPLED, *(f"{name}.{k}" for name in BY_K for k in _parts(part.get(name))))]
    return [name for name in names if value_of(newest, name) is not None]


def _parts(found: Any) -> dict[str, Any]:
    return cast(dict[str, Any], found) if isinstance(found, dict) else {}
