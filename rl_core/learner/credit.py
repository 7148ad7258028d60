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
from rl_core.learner.batch import answers_in, column, present_in, to_tensor
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
    answers, present = answers_in(batch), present_in(batch)
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
    policy = _policy_facts(batch, seen, learner) if needs_policy(learner.advantage) else None
    found = to_tensor(advantages(answers, learner.advantage, present_N=present, policy=policy))
    per_token = is_per_token(learner.advantage)
    session_N = column(batch, "trajectory", "session")
    return Credit(advantage=found if per_token else found[session_N], per_token=per_token, values=None, kl=kl,
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
    last = _last_with_tokens(batch)
    return estimate_from_values(answers, ValueFacts(value_K=seen.value_K.double().numpy(),
                                                    behind_N=seen.behind_N.double().numpy()[last], cut_N=cut_N[last]),
                                learner.advantage)


def _last_with_tokens(batch: TensorDict) -> NDArray[np.int64]:
    """Of every session its last trajectory with a loss token, or its last one: what stands behind that one stands
    behind the session."""
    session_N = column(batch, "trajectory", "session").numpy()
    order = np.lexsort((np.arange(len(session_N)), column(batch, "trajectory", "tokens").numpy() > 0, session_N))
    return order[np.diff(session_N[order], append=-1) != 0]


def _policy_facts(batch: TensorDict, seen: Seen, learner: LearnerConfig) -> PolicyFacts:
    """Of the loss tokens of the claim; a token of a session stands behind those of the trajectories before its own."""
    assert seen.proximal_K is not None and seen.squares_K is not None
    tokens_N = column(batch, "trajectory", "tokens")
    row_K = torch.repeat_interleave(tokens_N)
    weight_K = correction_weights(seen.proximal_K - seen.behavior_K, row_K, len(tokens_N), correction_of(learner))
    length_N, session_N = (column(batch, "trajectory", name).numpy() for name in ("length", "session"))
    before_N = np.cumsum(length_N) - length_N
    before_N = before_N - before_N[np.diff(session_N, prepend=-1) != 0][session_N]
    return PolicyFacts(
        logprob_K=seen.proximal_K.double().numpy(), squares_K=seen.squares_K.double().numpy(),
        weight_K=(torch.ones_like(seen.proximal_K) if weight_K is None else weight_K).double().numpy(),
        position_K=seen.position_K.long().numpy() + before_N[row_K.numpy()])
