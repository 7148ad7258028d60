"""Estimator, loss, correction and KL: what makes no sense together is refused, by field, with its reason.

Nothing that was chosen is ever replaced. Importable without torch.
"""

from __future__ import annotations

from collections.abc import Iterable

from rl_core.config import Config, LearnerConfig
from rl_core.correction_settings import KlConfig, RejectionRule
from rl_core.errors import refuse
from rl_core.lora.plan import check_lora
from rl_core.loss_settings import CispoLoss, ClipCovLoss, OpsmLoss, TisLoss
from rl_core.reward_settings import MAIN, TASK, estimator_of
from rl_core.roles.plan import check_roles

OWN_WEIGHTS = {"decoupled_ppo": "prox/mu", "tis_reinforce": "pi/mu", "topr": "pi/mu"}
"""Losses that bring token weights along."""
TAKES_WEIGHTS_IN_BYPASS = ("gpg", "dro")
"""Losses on log-probs without weights of their own; all others have the ratio pi/mu in them."""
TOKEN_BASELINES = ("optimal_token_baseline", "tir_optimal_token_baseline")
NO_PENALTY = {
    "gdpo": "gdpo reads the parts of a reward, and the penalty is taken from their sum: nothing would come of it; make "
            "what a long answer loses a part (scoring.parts), or use score, mask or exclude",
    "maxrl": "maxrl is for rewards of at least 0, and the penalty takes from them; use score, mask or exclude",
}
"""Estimators that learner.loss.truncated=penalty makes no sense with."""
PLAIN_AT_RATIO_1 = ("gspo", "gmpo", "sapo", "cispo", "dppo_tv", "dppo_kl", "dro", "kl_cov")
"""Losses of which -A log pi is left, or a multiple of it, where the ratio is 1. Of ppo_clip, too: the default, of which
the document tells (algorithms.md 4)."""
DIAGNOSES = {"code": "passed and ended_...", "judge": "judge_score, judge_nonsense ...", "math_verify": "parsed"}
"""Rewards by name whose parts say how the answer was scored, each with these parts."""
AT_LEAST_0 = ("exact", "regex", "gsm8k", "math_verify", "code", "judge")
"""Rewards by name that are never negative, as those of reasoning_gym are."""


def check_combination(learner: LearnerConfig) -> None:
    """Raises ConfigError for an estimator, a loss, a correction and a KL term that make no sense together."""
    _check_estimator(learner)
    check_roles(learner)
    check_lora(learner)
    _check_loss(learner)
    _check_correction(learner)
    _check_kl(learner.kl)


def check_lengths(config: Config) -> None:
    """Raises ConfigError for an overlong penalty that does not fit the longest answer, or that nothing comes of."""
    loss, longest = config.learner.loss, config.sampling.max_new_tokens
    if loss.truncated == "penalty" and (name := config.learner.advantage.name) in NO_PENALTY:
        refuse("learner.loss.truncated", "penalty", NO_PENALTY[name])
    if (loss.truncated == "penalty") != (loss.overlong_buffer is not None):
        refuse("learner.loss.overlong_buffer", loss.overlong_buffer,
               "belongs to learner.loss.truncated=penalty, which needs it; set both or none")
    if loss.overlong_buffer is not None and loss.overlong_buffer >= longest:
        refuse("learner.loss.overlong_buffer", loss.overlong_buffer,
               f"every answer would be penalised; use less than sampling.max_new_tokens = {longest}")


def check_baseline(config: Config) -> None:
    """Raises ConfigError for settings that cannot have a greedy baseline."""
    if config.greedy_baseline and config.offline and config.data.rescore:
        refuse("data.rescore", True, "remax needs the reward of each prompt's greedy answer, whose text is not in the "
               "shards: it cannot be scored anew; keep the rewards, or use grpo, rloo or another estimator")


def check_rewards(config: Config) -> None:
    """Raises ConfigError for rewards that the estimator cannot learn from as they are weighted."""
    scoring, settings = config.scoring, config.learner.advantage
    if settings.name == "maxrl":
        why = "maxrl is for rewards of at least 0, and a weight below 0 takes from them; use one of at least 0, or grpo"
        if scoring.weight < 0:
            refuse("scoring.weight", scoring.weight, why)
        for part in (part for part in scoring.parts if part.weight < 0):
            refuse("scoring.parts", part.weight, f"of the part {part.part}: {why}")
    if settings.name != "gdpo" or settings.parts or scoring.parts:
        return
    if config.reward in DIAGNOSES:
        refuse("learner.advantage.parts", [], f"gdpo would add up all parts of the reward {config.reward}, and these "
               f"say how it was scored ({DIAGNOSES[config.reward]}); name those to learn from, add rewards in "
               "scoring.parts, or use grpo")
    if scoring.weight != 1:
        refuse("scoring.weight", scoring.weight, "multiplies the sum, and gdpo reads the parts that the reward "
               "returns; give these their weights in learner.advantage.parts, and leave it at 1")


def check_updates(config: Config) -> None:
    """Raises ConfigError for what the updates of a step, or the steps of the run, leave nothing to do for."""
    loss, warmup_steps = config.learner.loss, config.learner.critic.warmup_steps
    if isinstance(loss, OpsmLoss) and loss.anchor == "proximal" and _has_ratio_1(config):
        refuse("learner.loss.anchor", "proximal", "in a step of one update the policy is the proximal one, and no "
               "answer is ever left out; use behavior, or more updates (learner.passes, learner.minibatch_groups)")
    if warmup_steps >= config.total_steps:
        refuse("learner.critic.warmup_steps", warmup_steps, f"the critic would learn alone in all of total_steps = "
               f"{config.total_steps}, and the policy never; use fewer")


def update_warnings(config: Config) -> tuple[str, ...]:
    """What is left of a loss on a ratio in a step of one update: a sentence, for the plan."""
    learner = config.learner
    if learner.loss.name not in PLAIN_AT_RATIO_1 or not _has_ratio_1(config):
        return ()
    stale = config.offline or config.staleness.bound > 0 or config.publish_every > 1
    uncorrected = ", nor does anything correct for stale answers" if stale and learner.correction.weights == "none" \
        else ""
    return (f"learner.loss.name: {learner.loss.name} is the plain policy gradient, -A log pi, in a step of one update: "
            f"its ratio pi/prox is 1 at every token, and no bound of it ever acts{uncorrected}; set "
            "learner.correction.mode=bypass, without weights, for the ratio pi/mu, or more updates (learner.passes, "
            "learner.minibatch_groups)",)


def _has_ratio_1(config: Config) -> bool:
    """Whether every update is the first one of its step, of the very policy that the ratio is taken against."""
    return config.updates_per_step == 1 and config.learner.correction.mode == "decoupled"


def check_sessions(config: Config) -> None:
    """Raises ConfigError for settings that cannot take sessions of several trajectories."""
    rollout, learner = config.rollout, config.learner
    if rollout.session is None:
        return
    if learner.resampling != "none":
        refuse("learner.resampling", learner.resampling, "draws answers again by their rewards, and the trajectories "
               "of a session have one reward together; use none, or no rollout.session")
    longest = config.data.max_prompt_tokens + config.sampling.max_new_tokens
    if learner.token_budget < longest:
        refuse("learner.token_budget", learner.token_budget, f"what a session goes on with may have data."
               f"max_prompt_tokens, and with its answer {longest} tokens; use at least that")
    if config.offline and config.data.rescore:
        refuse("data.rescore", True, "a session is scored by its last answer, and answers of shards are scored one by "
               "one; keep the rewards")


def check_baseline_landed(run_key: str, made_by: Iterable[Config], wanted: Config) -> None:
    """Raises ConfigError where groups of a run are to be trained by their greedy baseline that were sampled without
    one. `made_by`: the settings of all of the run's revisions."""
    others = sorted({config.learner.advantage.name for config in made_by if not config.greedy_baseline})
    if wanted.greedy_baseline and others:
        refuse("learner.advantage.name", wanted.learner.advantage.name, f"run {run_key} has sampled for "
               f"{', '.join(others)}, without a greedy answer to each prompt, and groups of it that have landed would "
               "have no baseline; begin a run with remax, by another --run-key")


def check_rewards_landed(run_key: str, made_by: Iterable[Config], wanted: Config) -> None:
    """Raises ConfigError where rewards of a run are to be learned from that the estimator cannot take: a step would end
    the run behind a claim that stands. `made_by`: the settings of all of the run's revisions."""
    earlier, name = list(made_by), wanted.learner.advantage.name
    if name == "maxrl" and not all(one.learner.advantage.name == name or _is_at_least_0(one) for one in earlier):
        refuse("learner.advantage.name", name, f"takes rewards of at least 0, and those that groups of run {run_key} "
               "have landed with may be less; use another estimator, or begin a run with maxrl, by another --run-key")
    settings = estimator_of(wanted, ())
    if settings.name == "gdpo" and MAIN in {one.part for one in settings.parts} and not all(
            one.scoring.parts or one.scoring.weight != 1 for one in earlier):
        refuse("learner.advantage.name", name, f"takes the part `{MAIN}` of the rewards, which groups of run {run_key} "
               "have landed without; use another estimator, or begin a run with scoring.parts, by another --run-key")


def _is_at_least_0(config: Config) -> bool:
    """Whether no reward by these settings is negative."""
    rewards = [(config.reward, config.scoring.weight), *((part.reward, part.weight) for part in config.scoring.parts)]
    return all(weight == 0 or (weight > 0 and (reward in AT_LEAST_0 or reward.startswith(TASK)))
               for reward, weight in rewards)


def check_exact(config: Config) -> None:
    """Raises ConfigError for `staleness.exact` beside settings that say otherwise."""
    staleness = config.staleness
    if (exact := staleness.exact) is None:
        return
    if config.offline:
        refuse("staleness.exact", exact, "groups of another run (data.shards_from) have no age in this one; leave it "
               "out")
    if staleness.policy != "keep":
        refuse("staleness.policy", staleness.policy, f"with staleness.exact={exact} no group is over a bound, so that "
               "nothing is masked, dropped or waited for; use keep, or leave out staleness.exact")
    if staleness.bound != exact:
        refuse("staleness.bound", str(staleness.bound), f"rollouts run so far ahead, and groups of exactly {exact} "
               f"publications need {exact}: set it to {exact}, too")
    if staleness.hard_max not in (None, exact):
        refuse("staleness.hard_max", staleness.hard_max, f"no group becomes older than staleness.exact = {exact}; "
               "leave it out")
    if config.data.epochs is not None:
        refuse("data.epochs", config.data.epochs, "a publication whose prompts have run out would never have its "
               "groups (staleness.exact); leave it out")


def _check_estimator(learner: LearnerConfig) -> None:
    name, loss = learner.advantage.name, learner.loss
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
    if isinstance(loss, OpsmLoss) and loss.anchor == "proximal" and bypass:
        refuse("learner.loss.anchor", "proximal", "with learner.correction.mode=bypass the behavior policy stands in "
               "for the proximal one; use behavior, or mode=decoupled")
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
    elif correction.normalize and name != "decoupled_ppo":
        refuse("learner.correction.normalize", True, f"the weights of {name} are clipped in the loss itself, and not "
               "normalised; leave it out" if name in OWN_WEIGHTS else "there are no weights to normalise; set "
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
    if kl.use == "loss" and kl.estimator == "k1":
        refuse("learner.kl.estimator", kl.estimator, "k1 has no expected gradient on-policy; in the loss use abs, k2, "
                                                     "k3, k1+, abs+ or k3+")
    if kl.use == "reward" and kl.estimator.endswith("+"):
        refuse("learner.kl.estimator", kl.estimator, "a reward has no gradient that + could change; use "
                                                     f"{kl.estimator[:-1]}")
    if kl.use == "reward" and kl.unbiased:
        refuse("learner.kl.unbiased", True, "weights the KL of the loss; use learner.kl.use=loss")
    if kl.use == "loss" and kl.target is not None:
        refuse("learner.kl.target", kl.target, "the controller is for the KL in the reward; use learner.kl.use=reward")
