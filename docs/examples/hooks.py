"""One function of every kind that Headway takes (docs/hooks.md): copy what you need, change it, and try it with
`headway hook test ./hooks.py:loss`."""

from __future__ import annotations

import random
from typing import Any

import numpy as np


def reward(completion, truth):
    """Right or wrong, and a little for an answer that is short."""
    right = completion.strip() == truth
    return {"reward": right - 0.001 * len(completion), "correct": right, "extracted": completion.strip()}


def group_filter(group: dict[str, Any]) -> bool | str:
    """Leave out what is solved, and what is cut: nothing is learned from either."""
    if all(correct == 1.0 for correct in group["correct"]):
        return "solved"
    return "all_cut" if set(group["finish_reasons"]) == {"length"} else True


def sampler(epoch: int, prompts: list[int], rows: list[int], seed: int, history: list[dict[str, Any]]) -> list[int]:
    """A curriculum: at first any order, then the prompts first whose last reward was nearest to a half."""
    last = {group["prompt"]: group["reward"] for group in history}
    order = list(prompts)
    random.Random(f"{seed} {epoch}").shuffle(order)
    return sorted(order, key=lambda prompt: abs(last.get(prompt, 0.5) - 0.5))


def environment(size: int, seed: int, held_out: bool) -> list[dict[str, Any]]:
    """Sums of two numbers; an even first number is held out."""
    draw = random.Random(f"sums {held_out}" if held_out else f"sums {seed}")
    found: dict[str, dict[str, Any]] = {}
    while len(found) < size:
        a, b = 2 * draw.randrange(500) + (not held_out), draw.randrange(1000)
        found[f"{a} + {b} = "] = {"prompt": f"{a} + {b} = ", "answer": str(a + b)}
    return list(found.values())


def session(session: dict[str, Any]) -> str | None:
    """One more try where the first answer was wrong, with that answer in the question."""
    if len(session["answers"]) > 1 or session["answers"][0].strip() == session["truth"]:
        return None
    return f"{session['prompts'][0]} not {session['answers'][0].strip() or 'nothing'} "


def advantage(answers) -> np.ndarray:
    """The reward against the median of its group: an outlier moves it less than the mean."""
    found = np.zeros(len(answers.reward_N))
    for group in np.unique(answers.group_N):
        mine = answers.group_N == group
        found[mine] = answers.reward_N[mine] - np.median(answers.reward_N[mine])
    return found


def loss(tokens):
    """The clipped ratio of PPO, written out: the same numbers as `ppo_clip` without its dual clip."""
    ratio = (tokens.policy_S - tokens.anchor_S).clamp(-20.0, 20.0).exp()
    clipped = ratio.clamp(0.8, 1.2)
    return -(tokens.advantage_S * ratio).minimum(tokens.advantage_S * clipped)


def correction(d, sequence, sequences: int):
    """Weights between 1/2 and 2: truncated on both sides."""
    return d.clamp(-20.0, 20.0).exp().clamp(0.5, 2.0)


def metrics(step: dict[str, Any]) -> dict[str, float]:
    """The share of prompts of which some answer is right, and how much longer wrong answers are."""
    right, group = step["correct_N"] == 1.0, step["group_N"]
    lengths = step["lengths_N"]
    longer = lengths[~right].mean() - lengths[right].mean() if right.any() and not right.all() else float("nan")
    return {"solved": np.unique(group[right]).size / max(1, np.unique(group).size), "longer_when_wrong": longer}
