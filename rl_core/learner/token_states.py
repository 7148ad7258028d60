"""What a step's settings make of the facts of its claim, without a model: which tokens are in the loss, and the
advantage of each. For people, who look at a step long after it; the learner does the same on its batch (batch.py).

Pure NumPy. `_N` answers of the claim in claim order, `_T` their tokens, one answer behind the other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal

import numpy as np
from numpy.typing import NDArray

from rl_core.config import Config
from rl_core.learner.advantages.estimate import advantages, answers_of, is_per_token, needs_policy, needs_values
from rl_core.learner.overlong import overlong_penalty
from rl_core.reward_settings import estimator_of
from rl_core.types import FINISH_CODES, Claim

NOT_SAMPLED, IN_LOSS, TOO_OLD, CUT = 0, 1, 2, 3
"""States of a token: the model has not sampled it; it is in the loss; it left the loss by its age (policy `mask`), or
with its answer, which was cut at the limit (`learner.loss.truncated`)."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sampled:
    """The answers of a claim: `Sampled(group_N=[0, 0], reward_N=[1, 0], length_N=[3, 2], finish_N=[0, 1], ...)`."""

    group_N: NDArray[np.int64]
    """Ordinal of the answer's group in the claim."""
    reward_N: NDArray[np.float32]
    length_N: NDArray[np.int64]
    """Tokens of the answer."""
    finish_N: NDArray[np.int8]
    """FINISH_CODES."""
    loss_mask_T: NDArray[np.uint8]
    """1 = sampled by the model."""
    idx_T: NDArray[np.int32]
    """Publication of the version that sampled it; -1 where that is not known."""
    parts: dict[str, NDArray[np.float32]]
    """Reward parts by name; NaN where an answer has no such part."""
    baseline_N: NDArray[np.float32] | None = None
    """Reward of a greedy answer to the same prompt; NaN where there is none."""
    session_N: NDArray[np.int32] | None = None
    """Ordinal of its session in the claim; None: each is one of its own."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepLogprobs:
    """What the learner says of the tokens of a claim (step_logprobs.py), `[T]` float32 nats; NaN where the model has
    not sampled the token. At the temperature of sampling, as behavior log-probs are."""

    proximal_T: NDArray[np.float32]
    """By the weights before the step."""
    policy_T: NDArray[np.float32]
    """By those behind it."""


def token_states(sampled: Sampled, claim: Claim, config: Config) -> NDArray[np.uint8]:
    """State of each token, `[T]`. `config`: what the step is trained by."""
    state_T = np.where(sampled.loss_mask_T == 1, IN_LOSS, NOT_SAMPLED).astype(np.uint8)
    if claim.policy == "mask":
        limit = math.ceil(Decimal(claim.eta))
        state_T[(state_T == IN_LOSS) & (claim.idx - sampled.idx_T > limit) & (sampled.idx_T >= 0)] = TOO_OLD
    if config.learner.loss.truncated in ("mask", "exclude"):
        cut_N = sampled.finish_N == FINISH_CODES["length"]
        if config.learner.loss.truncated == "exclude":  # with the whole session
            cut_N = np.bincount(sessions_in(sampled), weights=cut_N)[sessions_in(sampled)] > 0
        cut_T = np.repeat(cut_N, sampled.length_N)
        state_T[(state_T == IN_LOSS) & cut_T] = CUT
    return state_T


def advantages_need(config: Config) -> str | None:
    """What the advantages of a step are made of that neither claim nor shards hold; None where they hold all of it."""
    learner = config.learner
    if needs_policy(learner.advantage):
        return f"{learner.advantage.name} reads what the learner said of every token before the step"
    if needs_values(learner.advantage):
        return f"{learner.advantage.name} reads what a critic said of every token before the step"
    if learner.kl.use == "reward":
        return "learner.kl.use=reward takes from the rewards what a reference policy said of every token"
    if learner.teacher.use == "advantage":
        return "learner.teacher.use=advantage adds what a teacher said of every token"
    if learner.advantage.name == "function":
        return f"{learner.advantage.path} is a function of yours, which a page does not run"
    return None


def token_advantages(sampled: Sampled, state_T: NDArray[np.uint8], config: Config) -> NDArray[np.float32]:
    """Advantage of each token, `[T]`; NaN where it is not in the loss. Of a whole claim, and settings by which
    `advantages_need` nothing more."""
    settings, loss = estimator_of(config, sampled.parts), config.learner.loss
    reward_N, session_N = sampled.reward_N, sessions_in(sampled)
    first_N = np.diff(session_N, prepend=-1) != 0
    present = np.ones(int(first_N.sum()), np.bool_)
    if loss.truncated == "exclude":
        present = np.bincount(session_N, weights=sampled.finish_N == FINISH_CODES["length"]) == 0
    if loss.overlong_buffer is not None:
        penalty_N = overlong_penalty(sampled.length_N, longest=config.sampling.max_new_tokens,
                                     buffer=loss.overlong_buffer, factor=loss.overlong_factor)
        reward_N = reward_N + np.bincount(session_N, weights=penalty_N)[session_N].astype(np.float32)
    row_T, in_loss_T = np.repeat(np.arange(len(reward_N)), sampled.length_N), state_T == IN_LOSS
    answers = answers_of(reward_N, sampled.group_N, length_N=sampled.length_N,
                         tokens_N=np.bincount(row_T[in_loss_T], minlength=len(reward_N)), parts=sampled.parts,
                         baseline_N=sampled.baseline_N).by_session(session_N)
    found = advantages(answers, settings, present_N=present)
    advantage_T = np.full(len(row_T), np.nan, np.float32)
    advantage_T[in_loss_T] = found if is_per_token(settings) else found[session_N[row_T[in_loss_T]]]
    return advantage_T


def sessions_in(sampled: Sampled) -> NDArray[np.int64]:
    """Ordinal of the session of each answer."""
    given = sampled.session_N
    return np.arange(len(sampled.reward_N)) if given is None else given.astype(np.int64)
