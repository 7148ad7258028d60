"""The learner's metrics of one step, by the names of rl_core/metrics.py, from the claim's facts and the step's sums.

`_N` trajectories of the claim, `_G` its groups. A value that does not exist is NaN. Pure NumPy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rl_core.correctness import RIGHT, is_known_everywhere, known_correctness
from rl_core.experience.staleness import OFFLINE
from rl_core.learner.correction import effective_samples
from rl_core.learner.invariants import AlarmBounds, invariant_metrics
from rl_core.learner.sums import NAN, share

if TYPE_CHECKING:
    from rl_core.experience.reader import ClaimRows
    from rl_core.learner.plan import StepResult
    from rl_core.types import Claim


CRITIC = ("critic/value_loss", "critic/grad_norm", "critic/value_mean", "critic/return_mean",
          "critic/explained_variance", "critic/clipped", "critic/skipped_updates")


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenFacts:
    """Sums over the sampled tokens and answers of the claim, all ranks."""

    sampled: float
    """Tokens that the model sampled, before any mask."""
    masked_by_age: float
    lag: float
    """Sum of the update lag over sampled tokens; NaN, as `lag_max`, where another run has sampled them."""
    lag_max: float
    mixed: float
    """Answers sampled by more than one version."""
    loss: float
    """Tokens in the loss, after masks."""


def mean(values: NDArray[Any]) -> float:
    """Mean in float64; NaN of nothing."""
    return float(values.mean(dtype=np.float64)) if len(values) else NAN


def p95(values: NDArray[Any]) -> float:
    """95th percentile, between two values by how far it lies; NaN of nothing."""
    return float(np.percentile(values, 95)) if len(values) else NAN


def experience_metrics(rows: ClaimRows, claim: Claim) -> dict[str, float]:
    """Rewards, lengths and ages of the claim. What is right: rl_core/correctness.py.

    Of several answers with one reward the group is all equal; that counts as right where all its answers are known to
    be, as wrong where one is known not to be, and as neither where that is not known. A group of one is counted apart.
    A reward of a session counts once, however many trajectories it has.
    """
    reward_N, length_N, first_N = rows.reward_N.astype(np.float64), rows.length_N, rows.first_N
    known_N, whole = _known(rows)
    right_N, wrong_N = known_N > RIGHT, known_N <= RIGHT  # NaN is neither
    lowest_G, highest_G = np.full(rows.groups, np.inf), np.full(rows.groups, -np.inf)
    np.minimum.at(lowest_G, rows.group_N, reward_N)
    np.maximum.at(highest_G, rows.group_N, reward_N)
    right_G = np.bincount(rows.group_N, weights=right_N, minlength=rows.groups) == rows.n_responses_G
    sessions_G = np.bincount(rows.group_N, weights=first_N, minlength=rows.groups)
    equal_G = (lowest_G == highest_G) & (sessions_G > 1)
    wrong_G = np.bincount(rows.group_N, weights=wrong_N, minlength=rows.groups) > 0
    age_G = claim.idx - rows.idx_min_G if claim.policy != OFFLINE else np.full(rows.groups, NAN)
    return {
        "reward/mean": mean(reward_N[first_N]), "reward/std": float(reward_N[first_N].std()),
        "reward/greedy": mean(rows.baseline_G[np.isfinite(rows.baseline_G)]),
        "reward/correct": mean(known_N[first_N & np.isfinite(known_N)]) if whole else NAN,
        "reward/all_equal": mean(equal_G),
        "reward/no_spread_right": mean(equal_G & right_G), "reward/no_spread_wrong": mean(equal_G & wrong_G),
        "rollout/length_mean": mean(length_N), "rollout/length_p95": p95(length_N),
        "rollout/length_right": mean(length_N[right_N]), "rollout/length_wrong": mean(length_N[wrong_N]),
        "rollout/right_length_p95": p95(length_N[right_N]), "rollout/wrong_length_p95": p95(length_N[wrong_N]),
        "rollout/truncated": mean(rows.finish_N == 1), "rollout/empty": mean((rows.finish_N == 0) & (length_N == 1)),
        "rollout/partial": mean(sessions_G < rows.n_expected_G), "rollout/groups_of_one": mean(sessions_G == 1),
        "rollout/trajectories": len(reward_N) / int(first_N.sum()),
        "staleness/mean": mean(age_G), "staleness/p95": p95(age_G),
        "staleness/max": float(age_G.max()),
        "staleness/dropped_groups": float(len(claim.dropped)),
        "staleness/dropped_tokens": float(sum(drop.n_tokens for drop in claim.dropped)),
    }


def _known(rows: ClaimRows) -> tuple[NDArray[np.float64], bool]:
    """How right each answer is, NaN where that is not known; and whether something is known of every data source."""
    source_N = rows.source_G[rows.group_N]
    known_N = known_correctness(rows.reward_N, rows.correct_N, source_N)
    return known_N, is_known_everywhere(known_N, source_N)


def part_means(rows: ClaimRows) -> dict[str, float]:
    """Mean of every reward part over the answers that have it, by its name."""
    return {name: mean(values[rows.first_N & np.isfinite(values)]) for name, values in rows.parts.items()}


def by_source(rows: ClaimRows) -> dict[str, dict[str, float]]:
    """What the claim's answers were worth, data source by data source (`StepRecord.by_source`)."""
    source_N = rows.source_G[rows.group_N]
    correct_N, _ = _known(rows)
    found: dict[str, dict[str, float]] = {}
    for number, source in enumerate(rows.sources):
        mine_N = (source_N == number) & rows.first_N
        known_N = mine_N & np.isfinite(correct_N)
        found[source] = {"n": int(mine_N.sum()), "reward_mean": mean(rows.reward_N[mine_N]),
                         "correct": mean(correct_N[known_N]), "length_mean": mean(rows.length_N[source_N == number])}
    return found


def token_metrics(facts: TokenFacts, answers: int, measured: float) -> dict[str, float]:
    """Loss tokens, masks and update lag of the claim; `answers` is the number of its trajectories, `measured` that of
    the loss tokens whose proximal log-prob was seen (`StepResult.totals["tokens"]`)."""
    return {"train/loss_tokens": facts.loss, "train/measured_tokens": share(measured, facts.loss),
            "staleness/masked_tokens": facts.masked_by_age,
            "staleness/update_lag_mean": share(facts.lag, facts.sampled), "staleness/update_lag_max": facts.lag_max,
            "staleness/mixed": share(facts.mixed, answers)}


def update_metrics(result: StepResult, learning_rate: float, bounds: AlarmBounds) -> dict[str, float]:
    """What the optimizer did, and the invariants of algorithms.md section 9."""
    totals, largest = result.totals, result.largest
    mismatch = share(totals["current_abs"], totals["current"])
    drift = _finite(largest["ratio_drift"]) if result.recomputed else NAN
    made = len(result.losses)
    return {
        "train/policy_loss": share(math.fsum(result.losses), made),
        "train/grad_norm": share(math.fsum(result.gradient_norms), made),
        "train/learning_rate": learning_rate, "train/skipped_updates": float(result.skipped),
        "train/entropy": share(totals["entropy"], totals["update_tokens"]),
        "train/clip_low": share(totals["clip_low"], totals["update_tokens"]),
        "train/clip_high": share(totals["clip_high"], totals["update_tokens"]),
        "train/kl_proximal": share(totals["kl_proximal"], totals["update_tokens"]),
        "train/ratio_max": _finite(largest["ratio_max"]),
        "train/ratio_drift": drift,
        "train/mismatch_current_abs": mismatch,
        "train/mismatch_current_k3": share(totals["current_k3"], totals["current"]),
        "train/mismatch_stale_abs": share(totals["stale_abs"], totals["stale"]),
        "train/mismatch_stale_k3": share(totals["stale_k3"], totals["stale"]),
        "train/mismatch_swapped_abs": share(totals["swapped_abs"], totals["swapped"]),
        "train/mismatch_swapped_k3": share(totals["swapped_k3"], totals["swapped"]),
        **invariant_metrics(mismatch, drift, bounds),
        "train/loglinear_error": share(totals["loglinear_error"], totals["loglinear_tokens"]),
        "train/effective_samples": effective_samples(totals["weight"], totals["weight_square"], totals["tokens"]),
        "train/weight_max": _finite(largest["weight_max"]),
        "train/weight_truncated": share(totals["weight_truncated"], totals["tokens"]),
        **correction_metrics(totals, largest), **role_metrics(result),
    }


def role_metrics(result: StepResult) -> dict[str, float]:
    """What the models beside the policy came to; NaN for those that are not there. The coefficient of the KL and the
    reference's step are state, which fold.py adds."""
    totals = result.totals
    kl = result.kl if math.isfinite(result.kl) else share(totals["kl_reference"], totals["kl_tokens"])
    return {
        "train/kl_reference": kl, "train/distillation": share(totals["distillation"], totals["distilled_tokens"]),
        "train/impossible_to_others": totals["impossible_to_others"] if totals["other_tokens"] else NAN,
        **dict.fromkeys(CRITIC, NAN), **result.critic}


def correction_metrics(totals: Mapping[str, float], largest: Mapping[str, float]) -> dict[str, float]:
    """How far the proximal policy is from the behavior policy, and what was left out of the loss for it."""
    tokens, seen = totals["tokens"], totals["update_tokens"]
    mean, square = share(totals["weight"], tokens), share(totals["weight_square"], tokens)
    proximal, behavior = share(totals["proximal_logprob"], tokens), share(totals["behavior_logprob"], tokens)
    rejects = totals["update_sequences"] > 0
    return {
        "train/weight_mean": mean, "train/weight_min": _finite(-largest["weight_max_inverse"]),
        "train/weight_std": math.sqrt(max(0.0, square - mean**2)) if tokens else NAN,
        "train/weight_under": share(totals["weight_under"], tokens),
        "train/chi2_token": share(totals["token_ratio_square"], tokens) - 1.0,
        "train/chi2_answer": share(totals["sequence_weight_square"], totals["sequences"]) - 1.0,
        "train/behavior_kl": share(totals["behavior_kl"], tokens),
        "train/behavior_k3": share(totals["behavior_k3"], tokens),
        "train/learner_perplexity": math.exp(-proximal), "train/behavior_perplexity": math.exp(-behavior),
        "train/perplexity_gap": behavior - proximal,
        "train/rejected_tokens": share(totals["rejected_tokens"], seen) if rejects else NAN,
        "train/rejected_answers": share(totals["rejected_sequences"], totals["update_sequences"]),
        "train/zero_advantage": share(totals["zero_advantage"], seen),
        "train/impossible_tokens": totals["impossible"],
    }


def _finite(value: float) -> float:
    return value if math.isfinite(value) else NAN
