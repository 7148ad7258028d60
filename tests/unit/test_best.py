"""The best validation by a named field, and what the plan says of checkpoints that are kept for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flows.presets import load_preset
from rl_core.best import Best, best_by_field, known_fields, value_of
from rl_core.config import Config
from rl_core.errors import ConfigError
from rl_core.plan import InputFacts, make_plan, parse_overrides, resolve
from rl_core.run_dir import RunDir, put_if_absent, to_json
from rl_core.schedules import checkpoints_at_once, is_scheduled_checkpoint

RECORD = {"step": 20, "n": 8, "greedy_accuracy": 0.5, "sampled_accuracy": None, "pass_at_k": {"1": 0.25, "4": 0.75},
          "greedy_interval": [0.2, 0.8], "by_source": {
              "v1.5": {"mean_at_n": 0.5, "pass_at_k": {"4": 1.0}, "maj_at_k": {"4": 0.25}}, "v1": {"mean_at_n": 0.25}}}

VALUES = {
    "greedy_accuracy": 0.5,
    "pass_at_k.4": 0.75,
    "by_source.v1.5.mean_at_n": 0.5,
    "by_source.v1.mean_at_n": 0.25,
    "by_source.v1.5.pass_at_k.4": 1.0,
    "by_source.v1.5.maj_at_k.4": 0.25,
    "sampled_accuracy": None,
    "greedy_interval": None,
    "pass_at_k": None,
    "pass_at_k.8": None,
    "by_source.math.mean_at_n": None,
    "accuracy": None,
}


@pytest.mark.parametrize(("field", "value"), VALUES.items(), ids=VALUES)
def test_a_dotted_name_finds_a_number_or_nothing(field: str, value: float | None) -> None:
    assert value_of(RECORD, field) == value


ACCEPTED = ("greedy_accuracy", "greedy_reward", "mean_at_n", "maj_at_n", "pass_at_k.4", "maj_at_k.2",
            "by_source.openai/gsm8k.greedy_accuracy", "by_source.a.b.jsonl.pass_at_k.2")


@pytest.mark.parametrize("field", ACCEPTED)
def test_fields_of_which_more_is_better_are_accepted(field: str) -> None:
    make_plan(resolve(load_preset("tiny-cpu"), parse_overrides([f"checkpoint.best={field}", "validation.n=4"])))


def test_the_first_of_the_largest_is_the_best(run: RunDir) -> None:
    assert best_by_field(run, "greedy_accuracy") is None
    assert known_fields(run) == []
    for step, accuracy in ((0, 0.1), (20, 0.8), (40, None), (60, 0.8)):
        put_if_absent(run.validation(step), to_json({**RECORD, "step": step, "greedy_accuracy": accuracy}))
    put_if_absent(run.validations / "step-000000060.table.json", to_json({"rows": []}))
    assert best_by_field(run, "greedy_accuracy") == Best(20, 0.8)
    assert best_by_field(run, "by_source.v1.5.mean_at_n") == Best(0, 0.5)
    assert best_by_field(run, "sampled_accuracy") is None
    assert known_fields(run) == ["greedy_accuracy", "pass_at_k.1", "pass_at_k.4", "by_source.v1.5.mean_at_n",
                                 "by_source.v1.5.pass_at_k.4", "by_source.v1.5.maj_at_k.4", "by_source.v1.mean_at_n"]


REFUSED = {
    "another k": (["checkpoint.best=pass_at_k.8", "validation.n=4"], r"checkpoint.best: .* k = 1, 2, 4 \(validation.n"),
    "no field": (["checkpoint.best=accuracy"], r"checkpoint.best: no field of a validation.* are greedy_accuracy, "
                                               r"greedy_reward, .*pass_at_k.K, .*\(got 'accuracy'\)"),
    "a shorter answer": (["checkpoint.best=greedy_length"], r"of which more is better"),
    "another k of majorities": (["checkpoint.best=maj_at_k.8", "validation.n=4"], r"checkpoint.best: .* k = 1, 2, 4 "),
    "passes without k": (["checkpoint.best=pass_at_k"], r"pass_at_k.K"),
    "k that is no number": (["checkpoint.best=pass_at_k.x"], r"pass_at_k.K"),
    "a source and no field of it": (["checkpoint.best=by_source.gsm8k.accuracy"], r"by_source.NAME.<one of them>"),
    "nothing": (["checkpoint.best="], r"\(got ''\)"),
    "a source without a field": (["checkpoint.best=by_source.gsm8k"], r"by_source.NAME.<one of them>"),
    "of answers that are not sampled": (["checkpoint.best=by_source.gsm8k.pass_at_k.4", "validation.sampled=false"],
                                        r"checkpoint.best: comes of sampled answers.*'by_source.gsm8k.pass_at_k.4'"),
}


@pytest.mark.parametrize(("overrides", "message"), REFUSED.values(), ids=REFUSED)
def test_a_best_that_no_validation_can_tell_is_refused_by_the_plan(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_plan(resolve(load_preset("tiny-cpu"), parse_overrides(overrides)))


AT_ONCE = {  # of 180 steps, a checkpoint every 20
    "the newest and the one being written": (["checkpoint.best=null"], 3),
    "and the best, and one that is judged": ([], 5),
    "no validation, no best": (["data.validation=null"], 3),
    "and every 60th": (["checkpoint.best=null", "checkpoint.keep_every=60"], 6),
    "not more than are made": (["checkpoint.keep=50"], 10),
}


@pytest.mark.parametrize(("overrides", "most"), AT_ONCE.values(), ids=AT_ONCE)
def test_the_disk_figure_holds_the_checkpoints_that_are_kept(overrides: list[str], most: int) -> None:
    config = resolve(load_preset("tiny-cpu"), parse_overrides(["checkpoint.every=20", *overrides]))
    facts = InputFacts(rows=100, longest_prompt=20, mean_prompt=15.0, validation_rows=10, model_bytes=2**20,
                       context=2048)
    assert checkpoints_at_once(config) == most
    without = make_plan(config, replace(facts, model_bytes=0))
    assert make_plan(config, facts).reserve_bytes - without.reserve_bytes == \
        (4 * most + config.weights.keep + 1) * 2**20


def test_checkpoints_that_stay_are_also_made() -> None:
    settings = Config.model_validate({"checkpoint": {"every": 20, "keep_every": 50}}).checkpoint
    assert [n for n in range(1, 121) if is_scheduled_checkpoint(n, settings)] == [20, 40, 50, 60, 80, 100, 120]
