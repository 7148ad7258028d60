from __future__ import annotations

from decimal import Decimal

import numpy as np
import pytest

from rl_core.config import Config
from rl_core.experience.staleness import (
    ALL_MASKED,
    FENCED,
    FILTERED,
    KEEP,
    MASK,
    PARTIAL,
    STALE,
    Policy,
    StalenessRule,
    explain,
    judge,
    masked_tokens,
    rule_of,
)


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@pytest.mark.parametrize(
    ("rule", "want"),
    [
        (StalenessRule(policy="keep", limit=1, hard_max=4), [KEEP, KEEP, KEEP, KEEP, STALE]),
        (StalenessRule(policy="wait", limit=1, hard_max=4), [KEEP, KEEP, KEEP, KEEP, STALE]),
        (StalenessRule(policy="drop", limit=1, hard_max=4), [KEEP, KEEP, STALE, STALE, STALE]),
        (StalenessRule(policy="keep", limit=0, hard_max=0), [KEEP, STALE, STALE, STALE, STALE]),
        (StalenessRule(policy="mask", limit=1, hard_max=4), [KEEP, KEEP, ALL_MASKED, ALL_MASKED, ALL_MASKED]),
    ],
    ids=["keep trains to hard_max", "wait judges as keep", "drop cuts at the limit", "bound 0", "mask leaves nothing"])
def test_age_is_judged_by_the_policy(rule: StalenessRule, want: list[int]) -> None:
    ages = i32(0, 1, 2, 4, 5)
    assert judge(7, rule, idx_min_G=7 - ages, idx_max_G=7 - ages).tolist() == want


def test_mask_keeps_a_group_while_one_token_is_young_enough() -> None:
    rule = StalenessRule(policy="mask", limit=1, hard_max=4)
    assert judge(7, rule, idx_min_G=i32(3, 3, 6), idx_max_G=i32(6, 5, 7)).tolist() == [MASK, ALL_MASKED, KEEP]
    assert masked_tokens(7, rule, idx_R=i32(3, 5, 6, 7), tokens_R=i32(10, 4, 2, 1)) == 14


def test_only_mask_masks() -> None:
    rule = StalenessRule(policy="keep", limit=1, hard_max=4)
    assert masked_tokens(7, rule, idx_R=i32(3), tokens_R=i32(10)) == 0


def test_the_future_belongs_to_another_history() -> None:
    rule = StalenessRule(policy="keep", limit=1, hard_max=4)
    assert judge(7, rule, idx_min_G=i32(7, 6), idx_max_G=i32(8, 7)).tolist() == [FENCED, KEEP]


def test_filter_and_partial_groups() -> None:
    rule = StalenessRule(policy="keep", limit=1, hard_max=4, min_responses=2, drop_no_spread=True)
    verdict = judge(7, rule, idx_min_G=i32(7, 7, 7, 0), idx_max_G=i32(7, 7, 7, 0), n_responses_G=i32(2, 2, 1, 2),
                    spread_G=np.array([1, 0, 1, 0], np.float32))
    assert verdict.tolist() == [KEEP, FILTERED, PARTIAL, FILTERED]


@pytest.mark.parametrize(
    ("bound", "hard_max", "want"),
    [("0", None, (0, 0)), ("0.1", None, (1, 1)), ("0.5", None, (1, 2)), ("1.5", None, (2, 6)), ("2", 3, (2, 3))],
    ids=["synchronous", "hard_max is at least 1", "half", "ceil of both", "given"])
def test_limits_follow_from_the_bound(bound: str, hard_max: int | None, want: tuple[int, int]) -> None:
    rule = rule_of(Config.model_validate({"staleness": {"bound": Decimal(bound), "hard_max": hard_max}}))
    assert (rule.limit, rule.hard_max) == want


def test_a_hard_max_below_the_limit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"staleness.hard_max is 1, below ceil\(staleness.bound\) = 2"):
        rule_of(Config.model_validate({"staleness": {"bound": "1.5", "hard_max": 1}}))


@pytest.mark.parametrize(
    ("policy", "age", "want"),
    [("keep", 1, "within the bound of 1; trained"), ("keep", 3, "up to 4 is trained under policy keep"),
     ("keep", 5, "over 4; dropped as stale"), ("mask", 3, "tokens older than 1 leave the loss"),
     ("drop", 2, "over 1; dropped as stale under policy drop"), ("keep", -1, "dropped as fenced")])
def test_a_verdict_is_explained_in_words(policy: Policy, age: int, want: str) -> None:
    assert want in explain(StalenessRule(policy=policy, limit=1, hard_max=4), age)
