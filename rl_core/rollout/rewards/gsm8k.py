"""GSM8K's convention: the answer is the number after `####`, or else the last number of the text.

Cobbe et al., arXiv 2110.14168: solutions end with `#### 42`; commas and dollar signs do not count, nor do zeros at the
ends (`42.0` is `42`).
"""

from __future__ import annotations

import re

from rl_core.errors import RewardError
from rl_core.types import Prompt, Score

MARK = "####"
NUMBER = re.compile(r"(?:(?<![\w).])-)?\$?(?:(?<![\w).])-)?(\d{1,3}(?:,\d{3})+(?![\d,])|\d+)?(\.\d+)?")
"""A sign (no minus of a difference like `10-5`), a dollar sign on either side of it, digits with or without commas."""


def final_number(text: str) -> str | None:
    """`"so 40 + 2 = $42.\\n#### 1,042"` -> `"1042"`; None where the text has no number."""
    marked = text.rpartition(MARK)[2].partition("\n")[0] if MARK in text else ""
    numbers = _numbers(marked)[:1] or _numbers(text)[-1:]
    return numbers[0] if numbers else None


def gsm8k(prompt: Prompt, text: str) -> Score:
    """`gsm8k(prompt with answer "... #### 42", "it is 42")` -> `Score(reward=1.0, correct=1.0, extracted="42")`.

    The ground truth is a number or a whole solution. Raises RewardError where it holds no number.
    """
    truth = final_number(prompt.answer)
    if truth is None:
        raise RewardError(f"reward gsm8k: the ground truth {prompt.answer[:80]!r} holds no number; it must be one, or "
                          "a solution that ends with one, as in `#### 42`")
    extracted = final_number(text)
    reward = float(extracted == truth)
    return Score(reward=reward, correct=reward, extracted=extracted)


def _numbers(text: str) -> list[str]:
    return [_plain(match) for match in NUMBER.finditer(text) if match[1] or match[2]]


def _plain(match: re.Match[str]) -> str:
    """One way of writing each number: `-$1,000.50` as `-1000.5`."""
    whole = (match[1] or "").replace(",", "").lstrip("0") or "0"
    number = whole + (match[2] or "").rstrip("0").rstrip(".")
    return f"-{number}" if "-" in match[0] and number != "0" else number
