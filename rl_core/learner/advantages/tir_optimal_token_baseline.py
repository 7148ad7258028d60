"""tir_optimal_token_baseline: optimal_token_baseline on the model's own tokens of answers in several turns."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rl_core.advantage_settings import TokenBaselineAdvantage
from rl_core.learner.advantages.answers import Answers
from rl_core.learner.advantages.optimal_token_baseline import PolicyFacts, optimal_token_baseline


def estimate_from_policy(answers: Answers, policy: PolicyFacts,
                         settings: TokenBaselineAdvantage) -> NDArray[np.float32]:
    """`optimal_token_baseline` with loss tokens counted one behind the other, whatever stands between them."""
    first_N = np.cumsum(answers.tokens_N) - answers.tokens_N
    ordinal_K = np.arange(int(answers.tokens_N.sum())) - np.repeat(first_N, answers.tokens_N)
    return optimal_token_baseline(answers, policy, ordinal_K, answers.tokens_N)
