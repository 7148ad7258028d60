"""Every policy loss once more, in plain NumPy and Python, one token at a time, from docs/algorithms.md 4.

A reference gets `p`, the policy's log-probs, and `held`, the same numbers where the formula says sg: finite differences
by `p` with `held` fixed are then the gradient that the formula means. `Case` holds the rest, by token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Case:
    """Loss tokens of some answers; anchor is prox, or mu in bypass mode."""

    policy: np.ndarray
    anchor: np.ndarray
    behavior: np.ndarray
    advantage: np.ndarray
    reward: np.ndarray
    sequence: np.ndarray
    draw: np.ndarray


def random_case(seed: int, tokens: int = 48, sequences: int = 7, spread: float = 0.5) -> Case:
    """Tokens of several answers in mixed order; the advantage and the reward are those of the answer."""
    rng = np.random.default_rng(seed)
    sequence = rng.permutation(np.arange(tokens) % sequences)
    behavior = -rng.exponential(1.0, tokens) - 0.05
    anchor = behavior + rng.normal(0, spread, tokens)
    policy = anchor + rng.normal(0, spread, tokens)
    return Case(policy=np.minimum(policy, -0.01), anchor=np.minimum(anchor, -0.01), behavior=behavior,
                advantage=rng.normal(0, 2, sequences)[sequence], reward=rng.integers(0, 2, sequences)[sequence] * 1.0,
                sequence=sequence, draw=rng.random(tokens))


def clamp(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def ratio(p: float, q: float) -> float:
    return math.exp(clamp(p - q, -20, 20))


def mates(case: Case, t: int) -> list[int]:
    """Tokens of the same answer."""
    return [u for u in range(len(case.sequence)) if case.sequence[u] == case.sequence[t]]


def ppo(r: float, a: float, low: float, high: float, dual: float | None, delta: float | None = None) -> float:
    """One token of ppo_clip."""
    loss = max(-a * (min(r, delta) if delta else r), -a * clamp(r, 1 - low, 1 + high))
    return min(loss, -a * dual) if dual is not None and a < 0 else loss


def ppo_clip(p, held, case: Case, clip_low=0.2, clip_high=0.2, dual_clip: float | None = 3.0, delta=None, **_: Any):
    return [ppo(ratio(p[t], case.anchor[t]), a, clip_low, clip_high, dual_clip, delta)
            for t, a in enumerate(case.advantage)]


def written_out(p, held, case: Case, **_: Any):
    """What the example of a user's loss computes."""
    return ppo_clip(p, held, case, dual_clip=None)


def without(name: str) -> Callable[..., list[float]]:
    """ppo_clip, 0 at the tokens that the selection of this name takes."""
    def reference(p, held, case: Case, **settings: Any) -> list[float]:
        chosen = SELECTIONS[name](held, case, **settings)
        return [0.0 if chosen[t] else loss for t, loss in enumerate(ppo_clip(p, held, case, **settings))]
    return reference


def covariances(held, case: Case) -> list[float]:
    mean_a, mean_p = sum(case.advantage) / len(held), sum(held) / len(held)
    return [(a - mean_a) * (x - mean_p) for a, x in zip(case.advantage, held, strict=True)]


def clip_cov_tokens(held, case: Case, share=2e-4, cov_low=1.0, cov_high=5.0, clip_low=0.2, clip_high=0.2, **_: Any):
    cov, eligible = covariances(held, case), []
    for t, a in enumerate(case.advantage):
        r = ratio(held[t], case.anchor[t])
        clipped = (a < 0 and r < 1 - clip_low) or (a > 0 and r > 1 + clip_high)
        if not clipped and cov_low < cov[t] < cov_high:
            eligible.append(t)
    winners = sorted(eligible, key=lambda t: case.draw[t])[:max(1, int(share * len(held)))]
    return [t in winners for t in range(len(held))]


def kl_cov_tokens(held, case: Case, share=2e-4, **_: Any):
    cov = covariances(held, case)
    winners = sorted(range(len(held)), key=lambda t: -cov[t])[:max(1, int(share * len(held)))]
    return [t in winners for t in range(len(held))]


def m2po_tokens(held, case: Case, tau=0.04, **_: Any):
    left = list(range(len(held)))

    def square(t: int) -> float:
        return (case.behavior[t] - case.anchor[t]) ** 2

    while len(left) > 1 and sum(map(square, left)) / len(left) > tau:
        left.remove(max(left, key=square))
    return [t not in left for t in range(len(held))]


SELECTIONS: dict[str, Callable[..., list[bool]]] = {
    "clip_cov": clip_cov_tokens, "kl_cov": kl_cov_tokens, "m2po": m2po_tokens}


def kl_cov(p, held, case: Case, coef=0.1, **settings: Any):
    chosen = kl_cov_tokens(held, case, **settings)
    return [-a * ratio(p[t], case.anchor[t]) + coef * abs(p[t] - case.anchor[t]) * chosen[t]
            for t, a in enumerate(case.advantage)]


def opsm(p, held, case: Case, opsm_delta=0.1, anchor="behavior", **settings: Any):
    other = case.behavior if anchor == "behavior" else case.anchor
    out = []
    for t, loss in enumerate(ppo_clip(p, held, case, **settings)):
        mean = np.mean([other[u] - held[u] for u in mates(case, t)])
        out.append(0.0 if case.advantage[t] < 0 and mean > opsm_delta else loss)
    return out


def dppo(kind: str) -> Callable[..., list[float]]:
    def reference(p, held, case: Case, clip_low=0.2, clip_high=0.2, ratio_cap=20.0, **_: Any) -> list[float]:
        out = []
        for t, a in enumerate(case.advantage):
            now, prox = math.exp(held[t]), math.exp(case.anchor[t])
            if kind == "tv":
                keep = now - prox <= clip_high if a > 0 else now - prox >= -clip_low
            else:
                kl = prox * math.log(prox / now) + (1 - prox) * math.log((1 - prox) / (1 - now))
                keep = (kl <= clip_high or now <= prox) if a > 0 else (kl <= clip_low or now >= prox)
            out.append(-a * min(ratio(held[t], case.anchor[t]), ratio_cap) * p[t] if keep else 0.0)
        return out
    return reference


def gspo(p, held, case: Case, clip_low=3e-4, clip_high=4e-4, **_: Any):
    out = []
    for t, a in enumerate(case.advantage):
        mean = np.mean([held[u] - case.anchor[u] for u in mates(case, t)])
        out.append(ppo(math.exp(mean + p[t] - held[t]), a, clip_low, clip_high, None))
    return out


def sapo(p, held, case: Case, tau_positive=1.0, tau_negative=1.05, **_: Any):
    out = []
    for t, a in enumerate(case.advantage):
        tau = tau_positive if a > 0 else tau_negative
        out.append(-a * 4 / tau / (1 + math.exp(-tau * (ratio(p[t], case.anchor[t]) - 1))))
    return out


def gpg(p, held, case: Case, **_: Any):
    return [-a * p[t] for t, a in enumerate(case.advantage)]


def gmpo(p, held, case: Case, clip_low=0.2, clip_high=0.2, **_: Any):
    out = []
    for t in range(len(p)):
        logs = []
        for u in mates(case, t):
            d = p[u] - case.anchor[u]
            logs.append(min(d, clip_high) if case.advantage[u] > 0 else max(d, -clip_low))
        out.append(-np.mean([case.advantage[u] for u in mates(case, t)]) * math.exp(np.mean(logs)))
    return out


def dro(p, held, case: Case, beta=0.5, **_: Any):
    return [-(a * p[t] - beta / 2 * (p[t] - case.anchor[t]) ** 2) for t, a in enumerate(case.advantage)]


def cispo(p, held, case: Case, ratio_low=0.0, ratio_high=1.2, **_: Any):
    return [-a * clamp(ratio(held[t], case.anchor[t]), ratio_low, ratio_high) * p[t]
            for t, a in enumerate(case.advantage)]


def tis_reinforce(p, held, case: Case, ratio_low=0.0, ratio_high=2.0, **_: Any):
    return [-a * clamp(ratio(held[t], case.behavior[t]), ratio_low, ratio_high) * p[t]
            for t, a in enumerate(case.advantage)]


def topr(p, held, case: Case, **_: Any):
    return [-a * p[t] * (1.0 if case.reward[t] > 0 else clamp(ratio(held[t], case.behavior[t]), 0, 1))
            for t, a in enumerate(case.advantage)]


REFERENCES: dict[str, tuple[Callable[..., list[float]], list[dict[str, Any]]]] = {
    # name: the reference, and the settings that it is compared under
    "ppo_clip": (ppo_clip, [{}, {"clip_low": 0.1, "clip_high": 0.28, "dual_clip": None}, {"delta": 1.1}]),
    "decoupled_ppo": (ppo_clip, [{}]),
    "clip_cov": (without("clip_cov"), [{"share": 0.1, "cov_low": 0.0}, {"cov_low": 0.5, "cov_high": 2.0}]),
    "m2po": (without("m2po"), [{}, {"tau": 0.1}, {"tau": 1e-9}]),
    "opsm": (opsm, [{"opsm_delta": 0.1}, {"opsm_delta": 0.02, "anchor": "proximal"}]),
    "kl_cov": (kl_cov, [{"share": 0.1}, {"coef": 1.0}]),
    "dppo_tv": (dppo("tv"), [{}, {"clip_low": 0.01, "clip_high": 0.05, "ratio_cap": 1.3}]),
    "dppo_kl": (dppo("kl"), [{}, {"clip_low": 0.01, "clip_high": 0.02}]),
    "gspo": (gspo, [{}, {"clip_low": 0.2, "clip_high": 0.3}]),
    "sapo": (sapo, [{}, {"tau_positive": 0.5, "tau_negative": 2.0}]),
    "gmpo": (gmpo, [{}, {"clip_low": 0.4, "clip_high": 0.05}]),
    "gpg": (gpg, [{}]),
    "topr": (topr, [{}]),
    "dro": (dro, [{"beta": 0.5}]),
    "cispo": (cispo, [{}, {"ratio_low": 0.8, "ratio_high": 3.0}]),
    "tis_reinforce": (tis_reinforce, [{}, {"ratio_low": 0.5, "ratio_high": 1.5}]),
    "function": (written_out, [{"path": "./docs/examples/hooks.py:loss"}]),
}


def slopes(name: str, case: Case, settings: dict[str, Any]) -> np.ndarray:
    """Derivative of the sum of the token losses by each token's log-prob, by central differences."""
    reference, found, step = REFERENCES[name][0], np.zeros(len(case.policy)), 1e-6
    for t in range(len(found)):
        up, down = case.policy.copy(), case.policy.copy()
        up[t] += step
        down[t] -= step
        found[t] = (sum(reference(up, case.policy, case, **settings))
                    - sum(reference(down, case.policy, case, **settings))) / (2 * step)
    return found
