"""Settings of the off-policy correction and of the KL term. Importable without torch."""

from __future__ import annotations

from typing import Literal

from rl_core.settings import Part, training

Weights = Literal["none", "token_truncate", "sequence_truncate", "geometric_truncate", "token_icepop",
                  "sequence_icepop", "geometric_icepop", "function"]
RuleName = Literal["token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3", "seq_mean_k1",
                   "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3"]
DECOUPLED_CAP = 5.0
"""Cap of the token weights prox/mu that decoupled_ppo brings along."""


class RejectionRule(Part):
    """One rule of rejection: `RejectionRule(rule="token_k1", high=2.0)` keeps tokens with a ratio in [0.5, 2]."""

    rule: RuleName = training(..., "Level (token, or the sum, mean or maximum over an answer) and statistic.")
    high: float = training(..., "Upper bound: of the ratio for k1, of the statistic for k2 and k3.", gt=0)
    low: float | None = training(None, "k1: lower bound of the ratio; null = 1 / high.", gt=0)


class CorrectionConfig(Part):
    """How tokens count that another policy sampled (docs/algorithms.md 5)."""

    mode: Literal["decoupled", "bypass"] = training(
        "decoupled", "Three policies, ratios policy/proximal and weights proximal/behavior; or two (bypass), the "
        "behavior policy in place of the proximal one, ratios and weights policy/behavior.")
    weights: Weights = training(
        "none", "Weights proximal/behavior of tokens or answers, detached, multiplied to the loss (at most once): cut "
        "at cap (truncate), or 0 outside [icepop_low, icepop_high] (icepop); or those of a function (path).")
    path: str | None = training(None, "weights=function: the function, `./file.py:function` or "
                                      "`package.module:function` (docs/hooks.md).", min_length=1)
    cap: float = training(2.0, "Upper bound of a truncated weight; decoupled_ppo has its own.", gt=0)
    icepop_low: float = training(0.5, "icepop: smallest weight that counts.", ge=0)
    icepop_high: float = training(5.0, "icepop: largest weight that counts.", gt=0)
    normalize: bool = training(False, "Divide the weights by their mean over the minibatch.")
    rejection: tuple[RejectionRule, ...] = training((), "Rules that every token must pass to have a loss, as in "
                                                        "[{rule: seq_mean_k1, high: 1.01}].")
    rejected: Literal["count", "exclude"] = training(
        "count", "Rejected tokens stay in the denominators of the loss, or leave them.")


class KlConfig(Part):
    """A KL term against the reference policy."""

    use: Literal["none", "loss", "reward"] = training("none", "Where the KL against the reference policy acts.")
    estimator: Literal["k1", "abs", "k2", "k3", "k1+", "abs+", "k2+", "k3+"] = training(
        "k3", "Its estimator; with +, that value and the gradient of k2.")
    coef: float = training(0.001, "Its coefficient beta, at first.", ge=0)
    unbiased: bool = training(False, "use=loss: weight the term by policy/behavior, detached.")
    target: float | None = training(None, "use=reward: KL per token that an adaptive controller holds; null = beta is "
                                          "fixed.", gt=0)
    horizon: int = training(10_000, "Answers over which the adaptive controller corrects beta.", ge=1)
