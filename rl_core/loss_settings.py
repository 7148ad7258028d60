"""Settings of the policy losses: one class for those that take the same ones, chosen by `name`.

The loss of a name is in the file of that name in rl_core/learner/losses. Importable without torch.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from rl_core.settings import Part, training
from rl_core.variants import named

Aggregation = Literal["token_mean", "token_sum", "seq_mean_token_sum", "seq_mean_token_sum_norm", "seq_mean_token_mean"]
Scope = Literal["minibatch", "micro_batch"]
AGGREGATION = "How token losses become one number."
NAME = "Policy loss (algorithms.md)."
SCOPE = "What a choice of tokens is made from: the whole minibatch, or each micro-batch by itself, which then counts."


class LossCommon(Part):
    """What every loss has."""

    proximal: Literal["recompute", "loglinear"] = training(
        "recompute", "Proximal log-probs: a no-gradient pass, or the log-linear approximation (decoupled_ppo only).")
    aggregation: Aggregation = training("token_mean", AGGREGATION)
    entropy_coef: float = training(0.0, "Entropy bonus, nats per token.")
    truncated: Literal["score", "mask", "exclude", "penalty"] = training(
        "score", "Answers cut at the limit: scored, loss masked but still in the group mean, or as if absent; or every "
        "answer loses reward by how far it reaches into the last overlong_buffer tokens (penalty).")
    overlong_buffer: int | None = training(None, "truncated=penalty: tokens before sampling.max_new_tokens over which "
                                                 "the penalty grows from 0 to overlong_factor.", ge=1)
    overlong_factor: float = training(1.0, "truncated=penalty: reward lost by an answer of sampling.max_new_tokens.",
                                      gt=0)
    top_entropy_quantile: float = training(1.0, "Share of the minibatch's loss tokens, those of highest entropy, that "
                                                "the policy loss counts; the others have loss 0.", gt=0, le=1)
    behavior_penalty: float = training(0.0, "tau of the penalty tau (log pi - log mu)^2 of a token.", ge=0)


class PpoClipLoss(LossCommon):
    """ppo_clip, and decoupled_ppo, which is ppo_clip with token weights proximal/behavior."""

    name: Literal["ppo_clip", "decoupled_ppo"] = training("ppo_clip", NAME)
    clip_low: float = training(0.2, "Lower clip of the ratio: 1 - clip_low.", gt=0, lt=1)
    clip_high: float = training(0.2, "Upper clip of the ratio: 1 + clip_high.", gt=0)
    dual_clip: float | None = training(3.0, "Bound c on -A c for negative advantages; null = off.", gt=1)
    delta: float | None = training(None, "Upper bound of the ratio on both sides of the clip; null = off.", gt=1)


class ClipCovLoss(PpoClipLoss):
    """clip_cov: ppo_clip without some tokens of high covariance."""

    name: Literal["clip_cov"] = training("clip_cov", NAME)  # pyright: ignore[reportIncompatibleVariableOverride]
    share: float = training(2e-4, "Share of the loss tokens (at least one) that lose their loss.", gt=0, lt=1)
    cov_low: float = training(1.0, "Covariance above which an unclipped token may be chosen.")
    cov_high: float = training(5.0, "Covariance below which an unclipped token may be chosen.")
    scope: Scope = training("minibatch", SCOPE)


class M2poLoss(PpoClipLoss):
    """m2po: ppo_clip without the tokens that the two policies differ most in."""

    name: Literal["m2po"] = training("m2po", NAME)  # pyright: ignore[reportIncompatibleVariableOverride]
    tau: float = training(0.04, "Bound on the mean of (log behavior - log proximal)^2, nats^2.", gt=0)
    scope: Scope = training("minibatch", SCOPE)


class OpsmLoss(PpoClipLoss):
    """opsm: ppo_clip without bad answers that the policy has left."""

    name: Literal["opsm"] = training("opsm", NAME)  # pyright: ignore[reportIncompatibleVariableOverride]
    opsm_delta: float = training(..., "Answers with a negative advantage whose mean log anchor - log policy is above "
                                      "this lose their loss, nats per token.", gt=0)
    anchor: Literal["behavior", "proximal"] = training("behavior", "The policy that this mean is taken against.")


class KlCovLoss(LossCommon):
    """kl_cov: the plain ratio, with a penalty on tokens of highest covariance."""

    name: Literal["kl_cov"] = training("kl_cov", NAME)
    share: float = training(2e-4, "Share of the loss tokens (at least one) that are penalised.", gt=0, lt=1)
    coef: float = training(0.1, "Penalty on |log ratio| of those tokens.", gt=0)
    scope: Scope = training("minibatch", SCOPE)


class DppoLoss(LossCommon):
    """dppo_tv and dppo_kl: a mask by the divergence of a token's probability in place of a clip."""

    name: Literal["dppo_tv", "dppo_kl"] = training(..., NAME)
    clip_low: float = training(0.2, "Divergence allowed where the probability falls.", gt=0)
    clip_high: float = training(0.2, "Divergence allowed where the probability rises.", gt=0)
    ratio_cap: float = training(20.0, "Upper bound of the ratio.", gt=1)


class GspoLoss(LossCommon):
    """gspo: the ratio of a whole answer, per token."""

    name: Literal["gspo"] = training("gspo", NAME)
    clip_low: float = training(3e-4, "Lower clip of the answer's ratio: 1 - clip_low.", gt=0, lt=1)
    clip_high: float = training(4e-4, "Upper clip of the answer's ratio: 1 + clip_high.", gt=0)
    aggregation: Aggregation = training("seq_mean_token_mean", AGGREGATION)


class SapoLoss(LossCommon):
    """sapo: a soft gate in place of a clip."""

    name: Literal["sapo"] = training("sapo", NAME)
    tau_positive: float = training(1.0, "Steepness of the gate for positive advantages.", gt=0)
    tau_negative: float = training(1.05, "Steepness of the gate for negative advantages.", gt=0)
    aggregation: Aggregation = training("seq_mean_token_mean", AGGREGATION)


class GmpoLoss(LossCommon):
    """gmpo: the geometric mean of an answer's ratios."""

    name: Literal["gmpo"] = training("gmpo", NAME)
    clip_low: float = training(0.2, "Lower clip of a token's log ratio, nats.", gt=0)
    clip_high: float = training(0.2, "Upper clip of a token's log ratio, nats.", gt=0)
    aggregation: Aggregation = training("seq_mean_token_mean", AGGREGATION)


class PlainLoss(LossCommon):
    """Losses without settings of their own."""

    name: Literal["gpg", "topr"] = training(..., NAME)


class DroLoss(LossCommon):
    """dro: log-probs under a quadratic penalty."""

    name: Literal["dro"] = training("dro", NAME)
    beta: float = training(..., "Weight of (log ratio)^2 / 2.", gt=0)


class CispoLoss(LossCommon):
    """cispo: log-probs weighted by the clipped ratio."""

    name: Literal["cispo"] = training("cispo", NAME)
    ratio_low: float = training(0.0, "Lower bound of the ratio; 0 = none.", ge=0)
    ratio_high: float = training(1.2, "Upper bound of the ratio.", gt=0)


class TisLoss(LossCommon):
    """tis_reinforce: log-probs weighted by the clipped ratio policy/behavior."""

    name: Literal["tis_reinforce"] = training("tis_reinforce", NAME)
    ratio_low: float = training(0.0, "Lower bound of policy/behavior; 0 = none.", ge=0)
    ratio_high: float = training(2.0, "Upper bound of policy/behavior.", gt=0)


class FunctionLoss(LossCommon):
    """function: a loss of your own (docs/hooks.md)."""

    name: Literal["function"] = training("function", NAME)
    path: str = training(..., "The function, `./file.py:function` or `package.module:function`.", min_length=1)


LossConfig = Annotated[
    PpoClipLoss | ClipCovLoss | M2poLoss | OpsmLoss | KlCovLoss | DppoLoss | GspoLoss | SapoLoss | GmpoLoss | PlainLoss
    | DroLoss | CispoLoss | TisLoss | FunctionLoss,
    Field(discriminator="name"), BeforeValidator(named("ppo_clip"))]
