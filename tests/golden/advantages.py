"""Every advantage estimator once more, in plain Python, one answer at a time, from docs/algorithms.md 3.

A reference gets a `Claim` and the settings of the estimator, and returns one number per answer, or a list per answer
with one per loss token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Claim:
    """Answers in claim order, with what the proximal policy says of their loss tokens."""

    reward: list[float]
    group: list[int]
    length: list[int]
    tokens: list[int]
    """Of each answer in the loss."""
    parts: dict[str, list[float]] = field(default_factory=dict)
    position: list[list[int]] = field(default_factory=list)
    """Places of each answer's loss tokens in it."""
    logprob: list[list[float]] = field(default_factory=list)
    squares: list[list[float]] = field(default_factory=list)
    weight: list[list[float]] = field(default_factory=list)
    greedy: dict[int, float] = field(default_factory=dict)
    """Group -> reward of a greedy answer to its prompt."""
    value: list[list[float]] = field(default_factory=list)
    """What a critic says before every token of each answer, also before those that are not in the loss."""
    behind: list[float] = field(default_factory=list)
    """And behind its last loss token."""
    cut: list[bool] = field(default_factory=list)
    """At the limit."""


def random_claim(seed: int, answers: int = 40, groups: int = 9) -> Claim:
    """Groups of several sizes, of one among them; tokens masked here and there, and an answer with none left."""
    rng = np.random.default_rng(seed)
    group = np.unique(np.concatenate([rng.integers(0, groups, answers), [groups]]), return_inverse=True)[1].tolist()
    length = rng.integers(1, 9, len(group)).tolist()
    position = [sorted(rng.choice(n, rng.integers(1, n + 1), replace=False).tolist()) for n in length]
    position[3] = []
    logprob = [(-rng.exponential(1.0, len(p))).tolist() for p in position]
    parts = {"format": rng.normal(size=len(group)).round(3).tolist(),
             "length": [math.nan if i % 7 == 0 else float(v) for i, v in enumerate(rng.integers(0, 2, len(group)))]}
    return Claim(reward=rng.integers(0, 4, len(group)).astype(float).tolist(), group=group, length=length,
                 tokens=[len(p) for p in position], parts=parts, position=position, logprob=logprob,
                 squares=[rng.uniform(0.1, 1.0, len(p)).tolist() for p in position],
                 weight=[rng.uniform(0.5, 2.0, len(p)).tolist() for p in position],
                 greedy={g: float(r) for g, r in enumerate(rng.integers(0, 4, max(group) + 1))},
                 value=[rng.normal(size=n).tolist() for n in length], behind=rng.normal(size=len(group)).tolist(),
                 cut=rng.integers(0, 2, len(group)).astype(bool).tolist())


def mates(claim: Claim, i: int) -> list[int]:
    return [j for j in range(len(claim.group)) if claim.group[j] == claim.group[i]]


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def sigma(values: list[float]) -> float:
    """Sample standard deviation; 0 of one value."""
    m = mean(values)
    return math.sqrt(math.fsum((v - m) ** 2 for v in values) / max(1, len(values) - 1))


def by_group(rule: Callable[[Claim, int, list[int], dict[str, Any]], float]) -> Callable[..., list[float]]:
    """An estimator whose groups of one are 0 or raw."""
    def reference(claim: Claim, group_of_one: str = "zero", **settings: Any) -> list[float]:
        out = []
        for i, s in enumerate(claim.reward):
            group = mates(claim, i)
            alone = s if group_of_one == "raw" else 0.0
            out.append(rule(claim, i, group, settings) if len(group) > 1 else alone)
        return out
    return reference


def whitened(values: list[float], counts: list[int]) -> list[float]:
    """Values whitened over tokens: value i stands at `counts[i]` of them."""
    tokens = [v for v, n in zip(values, counts, strict=True) for _ in range(n)]
    if len(tokens) < 2:
        return values
    m, deviation = mean(tokens), sigma(tokens)
    return [(v - m) / math.sqrt(deviation**2 + 1e-8) for v in values]


def rewards(claim: Claim, group: list[int]) -> list[float]:
    return [claim.reward[j] for j in group]


@by_group
def grpo(claim, i, group, settings):
    centred = claim.reward[i] - mean(rewards(claim, group))
    if not settings.get("normalize_by_std", True):
        return centred
    return centred / (sigma(rewards(claim, group)) + settings.get("eps", 1e-6))


@by_group
def rloo(claim, i, group, settings):
    return claim.reward[i] - mean([claim.reward[j] for j in group if j != i])


@by_group
def grpo_passk(claim, i, group, settings):
    first, second = sorted(rewards(claim, group), reverse=True)[:2]
    if claim.reward[i] < first or first == second:
        return 0.0
    return (first - second) / (sigma(rewards(claim, group)) + settings.get("eps", 1e-6)
                               if settings.get("normalize_by_std", True) else 1.0)


@by_group
def opo(claim, i, group, settings):
    total = sum(claim.length[j] for j in group)
    return claim.reward[i] - sum(claim.length[j] * claim.reward[j] for j in group) / total


@by_group
def gpg(claim, i, group, settings):
    alpha = len(claim.reward) / sum(s != 0 for s in claim.reward)
    return alpha * (claim.reward[i] - mean(rewards(claim, group))) / settings.get("f_norm", 1.0)


@by_group
def lite_ppo(claim, i, group, settings):
    return (claim.reward[i] - mean(rewards(claim, group))) / (sigma(claim.reward) + settings.get("eps", 1e-6))


@by_group
def maxrl(claim, i, group, settings):
    m = mean(rewards(claim, group))
    return (claim.reward[i] - m) / m if m > 0 else 0.0


def reinforce_plus_plus_baseline(claim: Claim, **settings: Any) -> list[float]:
    return whitened(grpo(claim, normalize_by_std=False, **settings), claim.tokens)


def gdpo(claim: Claim, parts: Any = (), **settings: Any) -> list[float]:
    weights = {one["part"]: one["weight"] for one in parts} or dict.fromkeys(claim.parts, 1.0)
    total = [0.0] * len(claim.reward)
    for name, weight in weights.items():
        there = [i for i, v in enumerate(claim.parts[name]) if not math.isnan(v)]
        part = Claim(reward=[claim.parts[name][i] for i in there], group=[claim.group[i] for i in there], length=[],
                     tokens=[])
        for i, a in zip(there, grpo(part, **settings), strict=True):
            total[i] += weight * a
    return whitened(total, claim.tokens)


def reinforce_plus_plus(claim: Claim, gamma: float = 1.0) -> list[list[float]]:
    returns = []
    for s, n in zip(claim.reward, claim.tokens, strict=True):
        g, out = 0.0, []
        for t in reversed(range(n)):
            g = (s if t == n - 1 else 0.0) + gamma * g
            out.insert(0, g)
        returns.append(out)
    flat = iter(whitened([g for out in returns for g in out], [1] * sum(claim.tokens)))
    return [[next(flat) for _ in out] for out in returns]


def token_baseline(claim: Claim, position: list[list[int]], length: list[int]) -> list[list[float]]:
    out = []
    for i, places in enumerate(position):
        group = mates(claim, i)
        second = sorted(length[j] for j in group)[-2] if len(group) > 1 else 0
        found = []
        for t in places:
            above = below = 0.0
            for j in group:
                norm = sum((1 - 2 * math.exp(lp) + sq) * w**2 for u, lp, sq, w in
                           zip(position[j], claim.logprob[j], claim.squares[j], claim.weight[j], strict=True) if u <= t)
                above += (claim.reward[j] if t < length[j] else 0.0) * norm
                below += norm
            baseline = above / (below + 1e-8) if len(group) > 1 and t < second else 0.0
            found.append(claim.reward[i] - baseline)
        out.append(found)
    return out


def optimal_token_baseline(claim: Claim) -> list[list[float]]:
    return token_baseline(claim, claim.position, claim.length)


def tir_optimal_token_baseline(claim: Claim) -> list[list[float]]:
    return token_baseline(claim, [list(range(n)) for n in claim.tokens], claim.tokens)


def remax(claim: Claim) -> list[list[float]]:
    """The reward stands behind the last token: it is what is left of it at all of them."""
    return [[claim.reward[i] - claim.greedy[claim.group[i]] for _ in range(n)] for i, n in enumerate(claim.tokens)]


def gae_of_answer(reward: list[float], value: list[float], mask: list[bool], behind: float, gamma: float,
                  lam: float) -> list[float]:
    """A_t = sum over k of (gamma lam)^k delta_{t+k}, delta_t = r_t + gamma V_{t+1} - V_t, where the token behind t is
    the next one of the mask, and what is behind the last one is worth `behind`; 0 at tokens outside the mask."""
    places = [t for t, there in enumerate(mask) if there]
    after = [*(value[t] for t in places), behind][1:]
    delta = [reward[t] + gamma * v - value[t] for t, v in zip(places, after, strict=True)]
    out = [0.0] * len(mask)
    for n, t in enumerate(places):
        out[t] = math.fsum((gamma * lam) ** k * d for k, d in enumerate(delta[n:]))
    return out


def values_to_go(claim: Claim, gamma: float, lam: float) -> list[tuple[list[float], list[float]]]:
    """Advantages of each answer's loss tokens before they are whitened, and their returns A + V."""
    out = []
    for s, n, places, value, behind, cut in zip(claim.reward, claim.length, claim.position, claim.value, claim.behind,
                                                claim.cut, strict=True):
        reward, mask = [0.0] * n, [t in places for t in range(n)]
        if places:
            reward[places[-1]] = s
        found = gae_of_answer(reward, value, mask, behind if cut else 0.0, gamma, lam)
        out.append(([found[t] for t in places], [found[t] + value[t] for t in places]))
    return out


def gae(claim: Claim, gamma: float = 1.0, lam: float = 1.0) -> list[list[float]]:
    found = [advantage for advantage, _ in values_to_go(claim, gamma, lam)]
    flat = iter(whitened([a for one in found for a in one], [1] * sum(claim.tokens)))
    return [[next(flat) for _ in one] for one in found]


REFERENCES: dict[str, tuple[Callable[..., list[Any]], list[dict[str, Any]]]] = {
    # name: the reference, and the settings that it is compared under
    "grpo": (grpo, [{}, {"eps": 0.5}, {"normalize_by_std": False}, {"group_of_one": "raw"}]),
    "rloo": (rloo, [{}, {"group_of_one": "raw"}]),
    "grpo_passk": (grpo_passk, [{}, {"normalize_by_std": False}]),
    "gdpo": (gdpo, [{}, {"parts": ({"part": "format", "weight": 0.25}, {"part": "length", "weight": 2.0})}]),
    "reinforce_plus_plus": (reinforce_plus_plus, [{}, {"gamma": 0.9}]),
    "reinforce_plus_plus_baseline": (reinforce_plus_plus_baseline, [{}, {"group_of_one": "raw"}]),
    "opo": (opo, [{}]),
    "gpg": (gpg, [{}, {"f_norm": 2.0}]),
    "lite_ppo": (lite_ppo, [{}, {"eps": 0.1}]),
    "maxrl": (maxrl, [{}]),
    "optimal_token_baseline": (optimal_token_baseline, [{}]),
    "tir_optimal_token_baseline": (tir_optimal_token_baseline, [{}]),
    "gae": (gae, [{}, {"gamma": 0.9, "lam": 0.8}, {"lam": 0.0}]),
    "remax": (remax, [{}]),
}
