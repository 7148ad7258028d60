"""The procedural task `sort`: put digits in ascending order (`sort 31245` -> `12345`, 3 to 6 digits).

Questions are drawn by length first (uniform over 3 to 6), then uniformly among the numbers of that length, each
question at most once. Held-out questions do not depend on the run's seed: every seed is validated on the same ones, and
no training or warm-up row is among them.
"""

from __future__ import annotations

import random
from collections.abc import Collection

from rl_core.errors import ConfigError
from rl_core.seeds import derive

MIN_DIGITS = 3
MAX_DIGITS = 6
QUESTIONS = sum(10**digits for digits in range(MIN_DIGITS, MAX_DIGITS + 1))
"""Distinct questions of the task: 1 111 000."""
MAX_ROWS = QUESTIONS // 4
"""Most rows of one data set: room for distinct draws stays even when the short lengths are used up."""


def sort_rows(size: int, seed: int, exclude: Collection[str] = ()) -> list[dict[str, str]]:
    """`size` distinct rows `{"prompt": "sort 31245", "answer": "12345"}`, none whose prompt is in `exclude`.

    A pure function of its arguments; a smaller size is a prefix of a larger one. Raises ConfigError for a size that the
    task cannot give.
    """
    seen = set(exclude)
    if not 1 <= size <= MAX_ROWS - len(seen):
        raise ConfigError(f"task `sort`: {size} rows asked for (data.size or data.validation_size) beside {len(seen)} "
                          f"excluded ones; it has {MAX_ROWS} rows in all")
    generator = random.Random(derive(seed, "sort", "rows"))
    rows: list[dict[str, str]] = []
    while len(rows) < size:
        digits = generator.randint(MIN_DIGITS, MAX_DIGITS)
        number = f"{generator.randrange(10**digits):0{digits}d}"
        prompt = f"sort {number}"
        if prompt in seen:
            continue
        seen.add(prompt)
        rows.append({"prompt": prompt, "answer": "".join(sorted(number))})
    return rows


def held_out_rows(size: int) -> list[dict[str, str]]:
    """The first `size` held-out rows; the same for every run."""
    return sort_rows(size, derive("sort", "held out"))
