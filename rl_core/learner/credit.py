"""From passes to credit: token rewards with the KL against the reference, then the advantages of the whole claim. Pure.

    score, behind the last loss token  ->  minus beta KL at every token  ->  estimator (with policy facts, or values)

`_K` loss tokens of the claim in claim order, `_N` its trajectories, all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor

from rl_core.config import LearnerConfig
from rl_core.learner.advantages.answers import Answers
from rl_core.learner.advantages.estimate import advantages, is_per_token, needs_policy, needs_values
from rl_core.learner.advantages.gae import ValueFacts, estimate_from_values
from rl_core.learner.advantages.optimal_token_baseline import PolicyFacts
from rl_core.learner.batch import answers_in, column, to_tensor
from rl_core.learner.correction import correction_weights
from rl_core.learner.kl import estimate
from rl_core.learner.objective import correction_of
from rl_core.types import FINISH_CODES

NAN = float("nan")


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """What passes found at every loss token of the claim, on the host; None where none was made."""

    behavior_K: Tensor
    position_K: Tensor
    proximal_K: Tensor | None = None
    squares_K: Tensor | None = None
    reference_K: Tensor | None = None
    value_K: Tensor | None = None
    behind_N: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Returns:
    """What a critic says of the claim's loss tokens before the step, and what it shall say."""

    value_K: Tensor
    return_K: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Credit:
    """What the passes come to: `[K]`, or `[N]` where an estimator gives all tokens of an answer the same."""

    advantage: Tensor
    per_token: bool
    values: Returns | None
    """Where there is a critic."""
    kl: float
    """KL against the reference, mean over answers of their means; NaN where it is not in the reward."""
    answers: int
    """Of the claim."""


def is_made_late(learner: LearnerConfig) -> bool:
    """Whether advantages wait for a pass through the policy or a model beside it."""
    return needs_policy(learner.advantage) or needs_values(learner.advantage) or learner.kl.use == "reward"


def credit_of(batch: TensorDict, seen: Seen, learner: LearnerConfig, beta: float) -> Credit:
    """Token rewards and advantages of a claim. `beta`: coefficient of the KL in the reward."""
    answers, present = answers_in(batch), column(batch, "trajectory", "present").numpy()
    kl = NAN
    if learner.kl.use == "reward":
        kl_K = kl_of_tokens(seen, learner)
        kl = mean_of_means(kl_K, answers)
        answers = answers.with_token_rewards(-beta * kl_K)
    if needs_values(learner.advantage):
        advantage, returned = _with_values(batch, answers, seen, learner)
        assert seen.value_K is not None
        return Credit(advantage=to_tensor(advantage), per_token=True, kl=kl, answers=len(present),
                      values=Returns(seen.value_K, to_tensor(returned)))
    policy = _policy_facts(answers, seen, learner) if needs_policy(learner.advantage) else None
    found = advantages(answers, learner.advantage, present_N=present, policy=policy)
    return Credit(advantage=to_tensor(found), per_token=is_per_token(learner.advantage), values=None, kl=kl,
                  answers=len(present))


def kl_of_tokens(seen: Seen, learner: LearnerConfig) -> NDArray[np.float64]:
    """KL of the proximal policy (in bypass mode of the behavior policy) against the reference by the chosen estimator,
    `[K]`; 0 where a log-prob is minus infinity."""
    sampled_K = seen.behavior_K if learner.correction.mode == "bypass" else seen.proximal_K
    assert sampled_K is not None and seen.reference_K is not None
    impossible_K = torch.isneginf(sampled_K) | torch.isneginf(seen.reference_K)
    found_K = estimate(sampled_K.masked_fill(impossible_K, 0.0), seen.reference_K.masked_fill(impossible_K, 0.0),
                       learner.kl.estimator)
    return found_K.double().masked_fill(impossible_K, 0.0).numpy()


def mean_of_means(values_K: NDArray[np.float64], answers: Answers) -> float:
    """Mean over the answers with a loss token of the means of their tokens; NaN without one."""
    row_K = np.repeat(np.arange(len(answers.tokens_N)), answers.tokens_N)
    there_N = answers.tokens_N > 0
    sums_N = np.bincount(row_K, weights=values_K, minlength=len(there_N))
    return float((sums_N[there_N] / answers.tokens_N[there_N]).mean()) if there_N.any() else NAN


def _with_values(batch: TensorDict, answers: Answers, seen: Seen,
                 learner: LearnerConfig) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    assert seen.value_K is not None and seen.behind_N is not None and learner.advantage.name == "gae"
    cut_N = (column(batch, "trajectory", "finish") == FINISH_CODES["length"]).numpy()
    return estimate_from_values(answers, ValueFacts(value_K=seen.value_K.double().numpy(),
                                                    behind_N=seen.behind_N.double().numpy(), cut_N=cut_N),
                                learner.advantage)


def _policy_facts(answers: Answers, seen: Seen, learner: LearnerConfig) -> PolicyFacts:
    assert seen.proximal_K is not None and seen.squares_K is not None
    row_K = torch.repeat_interleave(to_tensor(answers.tokens_N))
    weight_K = correction_weights(seen.proximal_K - seen.behavior_K, row_K, len(answers.tokens_N),
                                  correction_of(learner))
    return PolicyFacts(
        logprob_K=seen.proximal_K.double().numpy(), squares_K=seen.squares_K.double().numpy(),
        weight_K=(torch.ones_like(seen.proximal_K) if weight_K is None else weight_K).double().numpy(),
        position_K=seen.position_K.long().numpy())
