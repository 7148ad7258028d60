"""tis_reinforce: log-probs weighted by the clipped ratio policy/behavior. `_S` loss tokens, float32."""

from __future__ import annotations

from rl_core.learner.losses.cispo import cispo
from rl_core.learner.losses.tokens import TokenLoss, Tokens
from rl_core.loss_settings import TisLoss


def token_loss(tokens: Tokens, settings: TisLoss) -> TokenLoss:
    """-A log pi sg(clip(pi/mu, low, high)), whatever the proximal policy is. IMPALA (arXiv 1802.01561) section 4.1."""
    return cispo(tokens.policy_S, tokens.behavior_S, tokens.advantage_S, low=settings.ratio_low,
                 high=settings.ratio_high)
