"""gspo: the ratio of a whole answer, per token. `_S` loss tokens of whole sequences, float32."""

from __future__ import annotations

from torch import Tensor

from rl_core.learner.correction import clamp_log
from rl_core.learner.losses.ppo_clip import ppo_clip
from rl_core.learner.losses.tokens import TokenLoss, Tokens
from rl_core.learner.sequences import sequence_mean
from rl_core.loss_settings import GspoLoss


def gspo(policy_S: Tensor, anchor_S: Tensor, advantage_S: Tensor, sequence_S: Tensor, sequences: int, *,
         low: float = 3e-4, high: float = 4e-4) -> TokenLoss:
    """max(-A s, -A clip(s, 1 - low, 1 + high)), s = exp(mean over the answer of log pi/prox).

    The value is that of the answer, the gradient goes through the own token: log s_t = sg(mean) + log pi - sg(log pi).
    Zheng et al. (arXiv 2507.18071), GSPO-token. All `[S]`.
    """
    mean_M = sequence_mean(clamp_log((policy_S - anchor_S).detach()), sequence_S, sequences)
    own_S = policy_S - policy_S.detach()
    return ppo_clip(mean_M[sequence_S] + own_S, own_S.detach(), advantage_S, low=low, high=high, dual=None)


def token_loss(tokens: Tokens, settings: GspoLoss) -> TokenLoss:
    """`gspo` by its settings."""
    return gspo(tokens.policy_S, tokens.anchor_S, tokens.advantage_S, tokens.sequence_S, tokens.sequences,
                low=settings.clip_low, high=settings.clip_high)
