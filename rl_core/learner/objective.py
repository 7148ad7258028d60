"""From the loss tokens of a micro-batch to what is summed: the chosen loss, corrected. Pure functions of tensors.

    token loss of its file -> weights prox/mu -> 0 at low entropy -> penalty on pi/mu -> 0 at rejected tokens

`_S` loss tokens of one micro-batch; whole sequences only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rl_core.config import LearnerConfig
from rl_core.correction_settings import CorrectionConfig
from rl_core.learner.correction import correction_weights, log_ratio
from rl_core.learner.losses import decoupled_ppo
from rl_core.learner.losses.tokens import TokenLoss, Tokens, loss_module
from rl_core.learner.rejection import keep_tokens


@dataclass(frozen=True, slots=True)
class Corrected:
    """What the correction does with the loss tokens: `[S]`, None where it does nothing."""

    weight_S: Tensor | None
    kept_S: Tensor | None
    """bool"""


def correction_of(learner: LearnerConfig) -> CorrectionConfig:
    """The correction as it is applied: decoupled_ppo brings its weights along."""
    if learner.loss.name != "decoupled_ppo":
        return learner.correction
    return learner.correction.model_copy(update={"weights": "token_truncate", "cap": decoupled_ppo.CAP})


def possible(tokens: Tokens) -> tuple[Tokens, Tensor]:
    """The tokens with log-probs of 0 where one of theirs is minus infinity, and where that is, `[S]` bool.

    Such a token has no ratio: it stays in the denominators, with loss 0, and is counted.
    """
    impossible_S = torch.isneginf(tokens.policy_S.detach()) | torch.isneginf(tokens.anchor_S) \
        | torch.isneginf(tokens.behavior_S)
    return replace(tokens, policy_S=tokens.policy_S.masked_fill(impossible_S, 0.0),
                   anchor_S=tokens.anchor_S.masked_fill(impossible_S, 0.0),
                   behavior_S=tokens.behavior_S.masked_fill(impossible_S, 0.0)), impossible_S


def difference(tokens: Tokens) -> Tensor:
    """d = log prox - log mu; in bypass mode log pi - log mu. `[S]`, detached."""
    return (tokens.policy_S.detach() if tokens.bypass else tokens.anchor_S) - tokens.behavior_S


def corrected(tokens: Tokens, settings: CorrectionConfig, mean: Tensor | None = None) -> Corrected:
    """Weights and rejection of the tokens; `mean`: what the weights are divided by (`normalize`)."""
    d_S = difference(tokens)
    weight_S = correction_weights(d_S, tokens.sequence_S, tokens.sequences, settings)
    if weight_S is not None and mean is not None:
        weight_S = weight_S / mean
    kept_S = keep_tokens(d_S, tokens.sequence_S, tokens.sequences, settings.rejection) if settings.rejection else None
    return Corrected(weight_S, kept_S)


def chosen_loss(tokens: Tokens, learner: LearnerConfig) -> TokenLoss:
    """The token losses of `learner.loss.name`."""
    return loss_module(learner.loss.name).token_loss(tokens, learner.loss)


def composed(found: TokenLoss, tokens: Tokens, correction: Corrected, impossible_S: Tensor, learner: LearnerConfig,
             uncertain_S: Tensor | None = None) -> Tensor:
    """What is aggregated, `[S]`. `uncertain_S`: tokens of high entropy (`top_entropy_quantile`); None = all."""
    loss_S = found.loss_S
    if correction.weight_S is not None:
        loss_S = loss_S * correction.weight_S
    if uncertain_S is not None:
        loss_S = loss_S.masked_fill(~uncertain_S, 0.0)
    if learner.loss.behavior_penalty:
        loss_S = loss_S + learner.loss.behavior_penalty * log_ratio(tokens.policy_S, tokens.behavior_S).square()
    if correction.kept_S is not None:
        loss_S = loss_S.masked_fill(~correction.kept_S, 0.0)
    return loss_S.masked_fill(impossible_S, 0.0)
