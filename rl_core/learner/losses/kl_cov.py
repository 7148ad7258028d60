"""kl_cov: the plain ratio, with a penalty on tokens of highest covariance. `_S` loss tokens, `_K` of the minibatch."""

from __future__ import annotations

from torch import Tensor

from rl_core.learner.correction import log_ratio
from rl_core.learner.losses.covariance import at_least_one, covariance, first
from rl_core.learner.losses.tokens import TokenLoss, Tokens, unclipped
from rl_core.loss_settings import KlCovLoss


def kl_cov_tokens(policy_K: Tensor, advantage_K: Tensor, *, share: float = 2e-4) -> Tensor:
    """bool `[K]`: the `share` of all tokens (at least one) with the highest covariance."""
    cov_K = covariance(policy_K, advantage_K)
    return first(-cov_K, cov_K == cov_K, at_least_one(share, len(cov_K)))


def kl_cov(policy_S: Tensor, anchor_S: Tensor, advantage_S: Tensor, chosen_S: Tensor, *, coef: float) -> TokenLoss:
    """-A r, plus coef |log r| at the chosen tokens. All `[S]`."""
    log_S = log_ratio(policy_S, anchor_S)
    return unclipped(-advantage_S * log_S.exp() + coef * log_S.abs() * chosen_S, policy_S, anchor_S)


def select(whole: Tokens, settings: KlCovLoss, draw_K: Tensor) -> Tensor:
    """The tokens that are penalised."""
    return kl_cov_tokens(whole.policy_S, whole.advantage_S, share=settings.share)


def token_loss(tokens: Tokens, settings: KlCovLoss) -> TokenLoss:
    """`kl_cov` by its settings."""
    assert tokens.chosen_S is not None
    return kl_cov(tokens.policy_S, tokens.anchor_S, tokens.advantage_S, tokens.chosen_S, coef=settings.coef)
