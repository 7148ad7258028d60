"""What is refused of a validation before anything starts, by the field's name and the value got."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flows.presets import load_preset
from rl_core.config import Config
from rl_core.errors import ConfigError
from rl_core.plan import InputFacts, make_plan, parse_overrides, resolve

FACTS = InputFacts(rows=100, longest_prompt=20, mean_prompt=15.0, validation_rows=10, model_bytes=1_600_000,
                   context=2048, longest_validation=30)


def settings(overrides: list[str]) -> Config:
    return resolve(load_preset("tiny-cpu"), parse_overrides(overrides))


REFUSED = {
    "k over n": (["validation.n=4", "validation.k=[1,8]"], r"validation.k: pass@8 needs 8 answers, and validation.n is "
                                                           r"4; .*\(got \[1, 8\]\)"),
    "n without samples": (["validation.sampled=false", "validation.n=4"], r"validation.n: .*sampled is false.*got 4"),
    "k without samples": (["validation.sampled=false", "validation.k=[1]"], "validation.k: .*sampled is false"),
    "a temperature without samples": (["validation.sampled=false", "validation.temperature=0.7"],
                                      r"validation.temperature: .*set it to true \(got 0.7\)"),
    "only without prompts": (["validation.only=true", "data.validation=null"],
                             "validation.only: there is nothing to validate on"),
    "a server where there is none": (["validation.engine=replica"],
                                     r"validation.engine: takes one of rollout's servers, and engine torch has none; "
                                     r"use embedded \(got 'replica'\)"),
    "no answer": (["validation.n=0"], "validation.n: .*greater than or equal to 1"),
    "k of 0": (["validation.k=[0]"], "validation.k.0: .*greater than or equal to 1"),
    "greedy samples": (["validation.temperature=0"], "validation.temperature: .*greater than 0"),
    "an answer over the context": (["validation.max_new_tokens=2019"],
                                   r"validation.max_new_tokens: the longest held-out prompt has 30 tokens.*use at most "
                                   r"2018 \(got 2019\)"),
}


@pytest.mark.parametrize(("overrides", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_work_is_refused_with_field_and_value(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_plan(settings(overrides), FACTS)


def test_a_server_validates_only_where_rollout_has_another_one() -> None:
    def of_servers(*overrides: str) -> Config:
        return resolve(load_preset("tiny-sglang-cpu"), parse_overrides(["validation.engine=replica", *overrides]))

    with pytest.raises(ConfigError, match=r"validation.engine: takes one server of a rollout worker, which has no"):
        make_plan(of_servers(), FACTS)
    with pytest.raises(ConfigError, match=r"validation.engine: .*this start has no rollout; use embedded"):
        make_plan(of_servers("rollout.engine.replicas=2", "validation.only=true"), FACTS)
    assert make_plan(of_servers("rollout.engine.replicas=2"), FACTS)
    assert make_plan(of_servers("rollout.engine.urls=[http://a:1, http://b:1]", "rollout.engine.script=null",
                                "rollout.engine.server_args=[]"), FACTS)
    assert make_plan(of_servers("data.validation=null"), FACTS)


def test_a_server_that_validates_has_no_gpu_of_its_own_and_holds_the_longest_answer() -> None:
    overrides = ["model.path=m", "data.train=t", "reward=exact", "data.validation=v", "validation.max_new_tokens=3000"]
    own, lent = (resolve(load_preset("sglang-8gpu"), parse_overrides([*overrides, f"validation.engine={engine}"]))
                 for engine in ("embedded", "replica"))
    assert (make_plan(own).gpus, make_plan(lent).gpus) == (
        {"learner": 4, "rollout": 4, "validation": 1}, {"learner": 4, "rollout": 4})
    assert (own.served_tokens, lent.served_tokens) == (1024 + 2048, 1024 + 3000)


def test_more_answers_than_memory_holds_are_refused_by_the_field_that_asks_for_them() -> None:
    many = replace(FACTS, validation_rows=100_000)
    with pytest.raises(ConfigError, match=r"validation.n: 100000 held-out prompts with 33 answers each are 3300000 "
                                          r"answers .*3.1 GiB; the limit is 2 GiB.*\(got 32\)"):
        make_plan(settings(["validation.n=32"]), many)
    with pytest.raises(ConfigError, match=r"data.validation_size: .*\(got 256\)"):
        make_plan(settings([]), replace(FACTS, validation_rows=2_000_000))
    assert make_plan(settings(["validation.n=16"]), many)


def test_the_k_of_pass_at_k_are_powers_of_two_unless_they_are_set() -> None:
    assert settings([]).validation.passes == (1,)
    assert settings(["validation.n=10"]).validation.passes == (1, 2, 4, 8)
    assert settings(["validation.n=10", "validation.k=[10,3,3]"]).validation.passes == (3, 10)
    assert (settings(["validation.n=10"]).validation.answers, settings(["validation.sampled=false"]).validation.answers
            ) == (11, 1)
