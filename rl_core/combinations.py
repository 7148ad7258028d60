"""Estimator, loss, correction and KL: what makes no sense together is refused, by field, with its reason.

Nothing that was chosen is ever replaced. Importable without torch.
"""

from __future__ import annotations

from rl_core.config import Config, LearnerConfig
from rl_core.correction_settings import KlConfig, RejectionRule
from rl_core.errors import refuse
from rl_core.loss_settings import CispoLoss, ClipCovLoss, TisLoss
from rl_core.roles.plan import check_roles

OWN_WEIGHTS = {"decoupled_ppo": "prox/mu", "tis_reinforce": "pi/mu", "topr": "pi/mu"}
"""Losses that bring token weights along."""
TAKES_WEIGHTS_IN_BYPASS = ("gpg", "dro")
"""Losses on log-probs without weights of their own; all others have the ratio pi/mu in them."""
TOKEN_BASELINES = ("optimal_token_baseline", "tir_optimal_token_baseline")
NEEDS = {"remax": "the reward of a greedy answer to every prompt"}
"""Estimators that need a role which is not there yet."""


def check_combination(learner: LearnerConfig) -> None:
    """Raises ConfigError for an estimator, a loss, a correction and a KL term that make no sense together."""
    _check_estimator(learner)
    check_roles(learner)
    _check_loss(learner)
    _check_correction(learner)
    _check_kl(learner.kl)


def check_lengths(config: Config) -> None:
    """Raises ConfigError for an overlong penalty that does not fit the longest answer."""
    loss, longest = config.learner.loss, config.sampling.max_new_tokens
    if (loss.truncated == "penalty") != (loss.overlong_buffer is not None):
        refuse("learner.loss.overlong_buffer", loss.overlong_buffer,
               "belongs to learner.loss.truncated=penalty, which needs it; set both or none")
    if loss.overlong_buffer is not None and loss.overlong_buffer >= longest:
        refuse("learner.loss.overlong_buffer", loss.overlong_buffer,
               f"every answer would be penalised; use less than sampling.max_new_tokens = {longest}")


def _check_estimator(learner: LearnerConfig) -> None:
    name, loss = learner.advantage.name, learner.loss
    if name in NEEDS:
        refuse("learner.advantage.name", name, f"needs {NEEDS[name]}, which Headway does not have yet; use grpo, rloo "
                                               "or another estimator of docs/algorithms.md 3")
    if name in TOKEN_BASELINES and (learner.correction.mode == "bypass" or loss.proximal == "loglinear"):
        refuse("learner.advantage.name", name, "needs the proximal policy's distribution at every token; use "
                                               "learner.correction.mode=decoupled and learner.loss.proximal=recompute")


def _check_loss(learner: LearnerConfig) -> None:
    loss, bypass = learner.loss, learner.correction.mode == "bypass"
    if loss.proximal == "loglinear" and loss.name != "decoupled_ppo":
        refuse("learner.loss.proximal", "loglinear", "belongs to learner.loss.name=decoupled_ppo")
    if loss.name == "decoupled_ppo" and bypass:
        refuse("learner.correction.mode", "bypass", "decoupled_ppo is the loss of three policies, and bypass has two; "
                                                    "use mode=decoupled, or learner.loss.name=ppo_clip")
    if loss.name == "gspo" and loss.aggregation in ("token_mean", "token_sum"):
        refuse("learner.loss.aggregation", loss.aggregation, "gspo has one ratio for a whole answer, and a sum over "
               "tokens would count it once a token; use seq_mean_token_mean")
    if loss.name == "gmpo" and loss.aggregation != "seq_mean_token_mean":
        refuse("learner.loss.aggregation", loss.aggregation, "gmpo is one number per answer, averaged over answers; "
                                                             "use seq_mean_token_mean")
    if isinstance(loss, CispoLoss | TisLoss) and loss.ratio_low >= loss.ratio_high:
        refuse("learner.loss.ratio_low", loss.ratio_low, f"not below ratio_high = {loss.ratio_high}")
    if isinstance(loss, ClipCovLoss) and loss.cov_low >= loss.cov_high:
        refuse("learner.loss.cov_low", loss.cov_low, f"not below cov_high = {loss.cov_high}")


def _check_correction(learner: LearnerConfig) -> None:
    name, correction = learner.loss.name, learner.correction
    if correction.weights != "none":
        if name in OWN_WEIGHTS:
            refuse("learner.correction.weights", correction.weights, f"{name} has its own token weights "
                   f"{OWN_WEIGHTS[name]}; weights are applied at most once: use none")
        if correction.mode == "bypass" and name not in TAKES_WEIGHTS_IN_BYPASS:
            refuse("learner.correction.weights", correction.weights, f"with mode=bypass the ratio of {name} is pi/mu "
                   "already; weights are applied at most once: use none, or mode=decoupled")
    elif correction.normalize:
        refuse("learner.correction.normalize", True, "there are no weights to normalise; set "
                                                     "learner.correction.weights, too")
    if (correction.weights == "function") != (correction.path is not None):
        refuse("learner.correction.path", correction.path,
               "belongs to learner.correction.weights=function, which needs it; set both or none")
    if correction.icepop_low >= correction.icepop_high:
        refuse("learner.correction.icepop_low", correction.icepop_low,
               f"not below icepop_high = {correction.icepop_high}")
    for rule in correction.rejection:
        _check_rule(rule)
    if correction.rejected == "exclude" and not correction.rejection:
        refuse("learner.correction.rejected", "exclude", "nothing is rejected; set learner.correction.rejection, too")


def _check_rule(rule: RejectionRule) -> None:
    field, shown = "learner.correction.rejection", rule.model_dump(exclude_none=True)
    if not rule.rule.endswith("_k1"):
        if rule.low is not None:
            refuse(field, shown, f"{rule.rule} is never negative and has an upper bound only; leave out low")
    elif (1 / rule.high if rule.low is None else rule.low) >= rule.high:
        refuse(field, shown, "nothing lies between the bounds of the ratio; without low they are [1 / high, high], and "
                             "high is above 1")


def _check_kl(kl: KlConfig) -> None:
    if kl.use == "none":
        return
    if kl.use == "loss" and kl.estimator in ("k1", "abs"):
        why = "k1 has no expected gradient on-policy" if kl.estimator == "k1" else "abs has a gradient of one size only"
        refuse("learner.kl.estimator", kl.estimator, f"{why}; in the loss use k2, k3, k1+ or k3+")
    if kl.use == "reward" and kl.estimator.endswith("+"):
        refuse("learner.kl.estimator", kl.estimator, "a reward has no gradient that + could change; use "
                                                     f"{kl.estimator[:-1]}")
    if kl.use == "reward" and kl.unbiased:
        refuse("learner.kl.unbiased", True, "weights the KL of the loss; use learner.kl.use=loss")
    if kl.use == "loss" and kl.target is not None:
        refuse("learner.kl.target", kl.target, "the controller is for the KL in the reward; use learner.kl.use=reward")
