from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from rl_core.config import Config
from rl_core.experience.admission import (
    AdmissionState,
    Term,
    binding,
    bytes_per_group,
    capacity,
    explain,
    terms,
    worst_group_bytes,
)

START = AdmissionState(groups_per_step=16, publish_every=1, extra=32, total_steps=100, max_groups=48, step=0,
                       served_idx=0, landed=0, leased=0, bytes_quota=1000, reserve=100, landed_bytes=0, group_bytes=10)


@pytest.mark.parametrize(
    ("change", "want", "term"),
    [
        ({}, 48, "max_groups"),
        ({"leased": 48}, 0, "max_groups"),
        ({"leased": 30, "landed": 18}, 0, "staleness"),
        ({"step": 1}, 32, "staleness"),
        ({"step": 1, "served_idx": 1}, 48, "max_groups"),
        ({"step": 98, "served_idx": 98, "landed": 10}, 22, "total_steps"),
        ({"step": 100, "served_idx": 100}, 0, "total_steps"),
        ({"landed_bytes": 900}, 0, "disk"),
        ({"landed_bytes": 700, "leased": 15}, 5, "disk"),
        ({"landed_bytes": 950}, -5, "disk"),
        ({"publish_every": 4, "extra": 64, "max_groups": 200, "step": 4, "served_idx": 1, "bytes_quota": 10**6},
         128, "staleness"),
    ],
    ids=["start", "all in flight", "outstanding", "published, not served", "served", "last steps", "done", "disk full",
         "disk and flight", "disk over", "publish every 4"])
def test_capacity_is_the_smallest_term(change: dict[str, int], want: int, term: Term) -> None:
    state = replace(START, **change)
    assert (capacity(state), binding(state)) == (want, term)
    assert terms(state)[term] == want


def test_a_worker_that_serves_nothing_gets_nothing() -> None:
    state = replace(START, served_idx=-1)
    assert capacity(state) == 0
    assert "serves no weights yet" in explain(state)


def test_a_stall_report_can_name_the_binding_term() -> None:
    text = explain(replace(START, leased=30, landed=18))
    assert text.startswith("capacity 0 (max_groups 18, staleness 0, total_steps 1552, disk 60): rollouts are as far")


def test_moving_a_group_into_a_claim_leaves_capacity_as_it_is() -> None:
    before = replace(START, landed=20, leased=10)
    after = replace(before, step=1, landed=4)
    assert terms(before)["staleness"] == terms(after)["staleness"]
    assert terms(before)["total_steps"] == terms(after)["total_steps"]


def test_extra_comes_from_the_decimal_text_of_eta() -> None:
    """floor(B K eta) in floats is off by one for such as 100 * 0.29 = 28.999999999999996."""
    wrong = 0
    for hundredths in range(0, 400):
        eta = f"{hundredths // 100}.{hundredths % 100:02d}"
        for b in (1, 7, 16, 100, 512):
            config = Config.model_validate({"groups_per_step": b, "staleness": {"bound": eta}})
            assert config.admission_extra == int(b * Fraction(hundredths, 100))
            wrong += int(b * float(eta)) != config.admission_extra
    assert wrong > 0, "floating point would have been right: the test has lost its point"


def test_bytes_per_group_is_cautious_until_the_mean_is_known() -> None:
    worst = worst_group_bytes(group_size=8, max_prompt_tokens=100, max_new_tokens=1000)
    assert worst == 400 + 8 * (9000 + 64) + 1024
    assert bytes_per_group(landed_groups=0, landed_bytes=0, worst_case=worst, groups_per_step=4) == worst // 2
    assert bytes_per_group(landed_groups=15, landed_bytes=1500, worst_case=worst, groups_per_step=4) == worst // 2
    assert bytes_per_group(landed_groups=16, landed_bytes=1600, worst_case=worst, groups_per_step=4) == 100
    assert bytes_per_group(landed_groups=2, landed_bytes=10**6, worst_case=worst, groups_per_step=4) == 500_000
