"""clip_cov: ppo_clip without the loss of some tokens of high covariance. `_S` loss tokens, `_K` of the minibatch."""

from __future__ import annotations

from torch import Tensor

from rl_core.learner.losses import ppo_clip
from rl_core.learner.losses.covariance import at_least_one, covariance, first
from rl_core.learner.losses.tokens import TokenLoss, Tokens
from rl_core.loss_settings import ClipCovLoss


def clip_cov_tokens(policy_K: Tensor, advantage_K: Tensor, clipped_K: Tensor, draw_K: Tensor, *, share: float = 2e-4,
                    low: float = 1.0, high: float = 5.0) -> Tensor:
    """bool `[K]`: `share` of all tokens (at least one), by lot among the unclipped ones of covariance in (low, high).

    `draw_K`: a random number for every token; the lowest win.
    """
    cov_K = covariance(policy_K, advantage_K)
    return first(draw_K, ~clipped_K & (cov_K > low) & (cov_K < high), at_least_one(share, len(cov_K)))


def select(whole: Tokens, settings: ClipCovLoss, draw_K: Tensor) -> Tensor:
    """The tokens that lose their loss."""
    found = ppo_clip.token_loss(whole, settings)
    return clip_cov_tokens(whole.policy_S, whole.advantage_S, found.low_S | found.high_S, draw_K, share=settings.share,
                           low=settings.cov_low, high=settings.cov_high)


def token_loss(tokens: Tokens, settings: ClipCovLoss) -> TokenLoss:
    """`ppo_clip`, 0 at the chosen tokens."""
    found = ppo_clip.token_loss(tokens, settings)
    assert tokens.chosen_S is not None
    return TokenLoss(found.loss_S * ~tokens.chosen_S, found.ratio_S, found.low_S, found.high_S)
