"""Exact match: 1 where the answer equals the ground truth, blanks around both left aside."""

from __future__ import annotations

from rl_core.types import Prompt, Score


def exact(prompt: Prompt, text: str) -> Score:
    """`exact(prompt with answer "12345", " 12345\\n")` -> `Score(reward=1.0, correct=1.0, extracted="12345")`."""
    extracted = text.strip()
    reward = float(extracted == prompt.answer.strip())
    return Score(reward=reward, correct=reward, extracted=extracted)
