"""opsm: ppo_clip without bad answers that the policy has left. `_S` loss tokens of whole sequences, float32."""

from __future__ import annotations

from torch import Tensor

from rl_core.learner.correction import clamp_log
from rl_core.learner.losses import ppo_clip
from rl_core.learner.losses.tokens import TokenLoss, Tokens
from rl_core.learner.sequences import sequence_mean
from rl_core.loss_settings import OpsmLoss


def left_behind(policy_S: Tensor, anchor_S: Tensor, advantage_S: Tensor, sequence_S: Tensor, sequences: int, *,
                delta: float) -> Tensor:
    """bool `[S]`: tokens with A < 0 of answers whose mean of log mu - log pi is above `delta`.

    Off-policy sequence masking: DeepSeek-V3.2 (arXiv 2512.02556).
    """
    mean_M = sequence_mean(clamp_log((anchor_S - policy_S).detach()), sequence_S, sequences)
    return (advantage_S < 0) & (mean_M > delta)[sequence_S]


def token_loss(tokens: Tokens, settings: OpsmLoss) -> TokenLoss:
    """`ppo_clip`, 0 at the tokens of those answers."""
    found = ppo_clip.token_loss(tokens, settings)
    anchor_S = tokens.behavior_S if settings.anchor == "behavior" else tokens.anchor_S
    left_S = left_behind(tokens.policy_S, anchor_S, tokens.advantage_S, tokens.sequence_S, tokens.sequences,
                         delta=settings.opsm_delta)
    return TokenLoss(found.loss_S * ~left_S, found.ratio_S, found.low_S | left_S, found.high_S)
