"""Weights, rejection rules and KL estimators once more, in plain Python, from docs/algorithms.md 5 and 7.

d is log prox - log mu of every token; `sequence` names its answer.
"""

from __future__ import annotations

import math


def clamp20(x: float) -> float:
    return min(max(x, -20.0), 20.0)


def mates(sequence: list[int], t: int) -> list[int]:
    return [u for u, s in enumerate(sequence) if s == sequence[t]]


def weights(d: list[float], sequence: list[int], level: str) -> list[float]:
    out = []
    for t in range(len(d)):
        values = [clamp20(d[u]) for u in mates(sequence, t)]
        out.append(math.exp(clamp20({"token": clamp20(d[t]), "sequence": sum(values),
                                     "geometric": sum(values) / len(values)}[level])))
    return out


def truncated(w: list[float], cap: float) -> list[float]:
    return [min(x, cap) for x in w]


def icepopped(w: list[float], low: float, high: float) -> list[float]:
    return [x if low <= x <= high else 0.0 for x in w]


def statistic(d: float, name: str) -> float:
    return {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - 1 - d}[name]


def kept(d: list[float], sequence: list[int], rule: str, high: float, low: float | None) -> list[bool]:
    """Tokens that one rule leaves in the loss."""
    level, _, name = rule.rpartition("_")
    out = []
    for t in range(len(d)):
        own = [clamp20(d[u]) for u in mates(sequence, t)]
        values = [statistic(x, name) for x in own] if level != "token" else [statistic(clamp20(d[t]), name)]
        value = {"token": values[0], "seq_sum": sum(values), "seq_mean": sum(values) / len(values),
                 "seq_max": max(values)}[level]
        if name == "k1":  # the bounds are on the ratio prox/mu, whose log is -k1
            out.append(math.log(1 / high if low is None else low) <= -value <= math.log(high))
        else:
            out.append(value <= high)
    return out


def kl(d: float, name: str) -> float:
    """Estimator of d = log p - log q."""
    d = d if name in ("k1", "abs", "k2") else clamp20(d)
    value = {"k1": d, "abs": abs(d), "k2": d * d / 2, "k3": math.exp(-d) + d - 1}[name]
    return min(max(value, -10.0), 10.0) if name == "k3" else value


def kl_slope(d: float, name: str) -> float:
    """Its derivative by d; `+` has that of k2."""
    return {"k1": 1.0, "abs": math.copysign(1.0, d), "k2": d, "k3": 1 - math.exp(-d)}.get(name, d)
