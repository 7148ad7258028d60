"""Validation of a run: a pinned version measured in an engine of its own, recorded once, with a table of answers."""

from __future__ import annotations

import json
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from flows.command import QUIET
from flows.validating import validate
from rl_core.answers import Answer, fields_of, mean_reward
from rl_core.config import Config
from rl_core.errors import ConfigError, DeadlinePassed, DeadPart, RewardError, WeightsDamaged
from rl_core.measuring import Measuring
from rl_core.metrics import names, validation_metrics
from rl_core.model_setup import set_up_model
from rl_core.pages.answers import validation_page
from rl_core.rollout.prompts import Tokenizer, load_tokenizer, validation_prompts
from rl_core.rollout.rewards.exact import exact
from rl_core.rollout.rewards.scoring import InlineScorer, Scorer
from rl_core.rollout.torch_engine import TorchEngine
from rl_core.run_dir import RunDir, put_if_absent, read_json, to_json
from rl_core.run_identity import open_identity
from rl_core.types import Completion, GenerateRequest, Prompt, Score, WeightVersion
from rl_core.validation import (
    Validator,
    open_validator,
    read_table,
    read_table_details,
    read_validation,
    validated_steps,
)
from rl_core.versions import pin, pinned_versions, read_version, unpin, validating_pin
from rl_core.weights import WEIGHTS_FILE, publish, read_tensors
from tasks.validation import PIN, validate_unfinished
from tasks.validation import validate as validate_task

SETTINGS: dict[str, Any] = {
    # A short clean warm-up: right about half of the time, so that accuracies are not trivial.
    "model": {"type": "tiny", "warmup_steps": 60, "warmup_mix": 1.0}, "sampling": {"max_new_tokens": 8},
    "data": {"validation_size": 64}, "storage": {"fsync": False}}


def configured(**settings: Any) -> Config:
    return Config.model_validate(SETTINGS | settings)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return set_up_model(configured(), tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return load_tokenizer(model)


@pytest.fixture
def run(tmp_path: Path, model: Path) -> RunDir:
    run = RunDir(tmp_path)
    run.model.symlink_to(model)
    return run


def validator_of(run: RunDir, config: Config, parts: dict[str, Any]) -> Validator:
    return Validator(run, Measuring(config, **parts))


def publish_model(run: RunDir, step: int = 0, scale: float = 1.0) -> WeightVersion:
    tensors = {name: tensor * scale for name, tensor in read_tensors(run.model / "model.safetensors").items()}
    return publish(run, tensors, step, step, 1, configured())


class SlowEngine(TorchEngine):
    """The real engine, whose answers are handed on only once `go` is set."""

    def __init__(self, model_dir: Path) -> None:
        super().__init__(model_dir, slots=64, max_context=64)
        self.go = threading.Event()
        self.submitted = threading.Event()
        self.cancelled: list[str] = []

    def submit(self, request: GenerateRequest) -> Future[Completion]:
        inner, outer = super().submit(request), Future[Completion]()

        def hand_on() -> None:
            self.go.wait(10)
            outer.set_result(inner.result(10))

        threading.Thread(target=hand_on, daemon=True).start()
        self.submitted.set()
        return outer

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)
        super().cancel(request_id)


@pytest.fixture
def parts(run: RunDir, tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    """What a Validator is made of, but for its configuration."""
    engine = TorchEngine(run.model, slots=64, max_context=64)
    yield {"engine": engine, "tokenizer": tokenizer, "scorer": InlineScorer(exact),
           "prompts": validation_prompts(configured(), tokenizer)}
    engine.close()


def greedy_accuracy_by_transformers(model: Path, tokenizer: Tokenizer, prompts: list[Prompt]) -> float:
    network = AutoModelForCausalLM.from_pretrained(model)
    right = 0
    for prompt in prompts:
        ids = torch.as_tensor(prompt.token_ids_P, dtype=torch.long)[None]
        out = network.generate(ids, do_sample=False, max_new_tokens=8, attention_mask=torch.ones_like(ids))
        text = tokenizer.decode(out[0, ids.shape[1]:], skip_special_tokens=True)
        right += text.strip() == prompt.answer
    return right / len(prompts)


def test_the_record_says_what_transformers_says(run: RunDir, model: Path, tokenizer: Tokenizer) -> None:
    version = publish_model(run)
    validator = open_validator(root=str(run.root), config=configured())
    try:
        record = validator.validate(version, step=0)
        again = validator.validate(version, step=0)
    finally:
        validator.close()
    prompts = validation_prompts(configured(), tokenizer)
    assert record["greedy_accuracy"] == greedy_accuracy_by_transformers(model, tokenizer, prompts)
    assert 0.1 < record["greedy_accuracy"] < 1.0
    assert record["greedy_reward"] == record["greedy_accuracy"]
    assert 0.0 < record["sampled_accuracy"] <= record["greedy_accuracy"] + 0.2
    assert record["mean_length"] == record["greedy_length"] and 4.0 < record["mean_length"] <= 8.0
    assert (record["n"], record["step"], record["v"], record["idx"]) == (64, 0, 0, 0)
    assert record["digest"] == version.digest
    assert (record["greedy_failed"], record["sampled_failed"]) == (0, 0)
    assert list(record["by_source"]) == ["sort"]
    assert record["by_source"]["sort"] == {name: record[name] for name in record["by_source"]["sort"]}
    assert record["mean_at_n"] == record["pass_at_k"]["1"] == record["sampled_accuracy"] == record["maj_at_n"]
    assert record["maj_at_k"] == {"1": record["maj_at_n"]}
    assert record["greedy_interval"][0] < record["greedy_accuracy"] < record["greedy_interval"][1]
    assert record["sampling"] == {"n": 1, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0,
                                  "max_new_tokens": 8}
    assert 0 < record["seconds"] < 60
    assert again == record == read_validation(run, 0) and validated_steps(run) == [0]
    assert pinned_versions(run) == set()
    metrics = validation_metrics(record)
    assert set(metrics) == set(names("validator")) and metrics["validation/seconds"] == record["seconds"]


def test_another_version_is_measured_by_its_own_weights_with_the_same_seeds(run: RunDir, parts: dict[str, Any]) -> None:
    first, zero = publish_model(run), publish_model(run, step=2, scale=0.0)
    validator = validator_of(run, configured(), parts)
    good, bad = validator.validate(first, 0), validator.validate(zero, 2)
    assert bad["greedy_accuracy"] == bad["sampled_accuracy"] == 0.0 < good["greedy_accuracy"]
    assert bad["greedy_truncated"] == 1.0, "all logits equal: the first token for ever"
    repeated = validator.validate(first, 4)
    assert [repeated[name] for name in ("greedy_accuracy", "sampled_accuracy", "sampled_length")] == [
        good[name] for name in ("greedy_accuracy", "sampled_accuracy", "sampled_length")]
    assert validated_steps(run) == [0, 2, 4]


def test_a_validation_file_and_a_reward_are_found_in_the_working_directory_of_the_command(run: RunDir) -> None:
    (run.root / "held.jsonl").write_text(
        '{"prompt": "sort 21", "answer": "12"}\n{"prompt": "sort 312", "answer": 123}\n')
    (run.root / "reward.py").write_text("def score(answer, truth): return len(answer) / 10")
    config = configured(data={"validation": "held.jsonl", "validation_size": 8}, reward="./reward.py:score")
    validator = open_validator(root=str(run.root), config=config, cwd=str(run.root))
    try:
        record = validator.validate(publish_model(run), 0)
    finally:
        validator.close()
    assert record["n"] == 2 and list(record["by_source"]) == ["held"] and record["by_source"]["held"]["n"] == 2
    unknown = ("greedy_accuracy", "greedy_interval", "mean_at_n", "mean_at_n_interval", "maj_at_n")
    assert [record[name] for name in unknown] == [None] * 5 and record["pass_at_k"] == {"1": None}, "a shaped reward"
    lo, hi = record["greedy_reward_interval"]
    assert 0.0 < lo < record["greedy_reward"] <= 0.8 and record["greedy_reward"] < hi <= 1.0


def test_sampled_answers_are_optional(run: RunDir, parts: dict[str, Any]) -> None:
    record = validator_of(run, configured(validation={"sampled": False}), parts).validate(publish_model(run), 0)
    assert "greedy_accuracy" in record and record["sampling"] is None
    assert not [name for name in record if name.startswith(("sampled", "mean_at", "pass_at", "maj_at"))]


class FailingScorer:
    """Exact match; fails for the given share of ground truths by their first digit."""

    def __init__(self, digits: str) -> None:
        self._digits = digits

    def __call__(self, prompt: Prompt, text: str) -> Score:
        if prompt.answer[0] in self._digits:
            raise RewardError("reward f: raised KeyError: 'x'")
        return exact(prompt, text)

    def close(self) -> None:
        pass


def test_a_failed_reward_is_counted_and_is_no_wrong_answer(run: RunDir, parts: dict[str, Any]) -> None:
    version = publish_model(run)
    whole = validator_of(run, configured(), parts).validate(version, 0)
    some = validator_of(run, configured(), parts | {"scorer": FailingScorer("0")}).validate(version, 1)
    failed = sum(prompt.answer[0] == "0" for prompt in parts["prompts"])
    assert 0 < failed < 64 and some["greedy_failed"] == some["sampled_failed"] == failed
    assert round(some["greedy_accuracy"] * (64 - failed)) <= round(whole["greedy_accuracy"] * 64)
    all_fail: Scorer = FailingScorer("0123456789")
    with pytest.raises(RewardError, match=r"no answer could be scored; the last failure: reward f: raised KeyError"):
        validator_of(run, configured(), parts | {"scorer": all_fail}).validate(version, 2)
    assert validated_steps(run) == [0, 1] and pinned_versions(run) == set()


def test_damaged_weights_are_refused_and_not_recorded(run: RunDir, parts: dict[str, Any]) -> None:
    version = replace(publish_model(run), digest="0" * 32)
    with pytest.raises(WeightsDamaged):
        validator_of(run, configured(), parts).validate(version, 0)
    assert validated_steps(run) == [] and pinned_versions(run) == set()


def test_a_validation_over_its_deadline_ends_what_it_started(run: RunDir, parts: dict[str, Any]) -> None:
    engine = SlowEngine(run.model)
    try:
        config = configured(deadlines={"validation_s": 0.5})
        validator = validator_of(run, config, parts | {"engine": engine})
        start = time.monotonic()
        with pytest.raises(DeadlinePassed, match=r"128 of 128 answers missing after 0.5 s \(deadlines"):
            validator.validate(publish_model(run), 0)
        assert time.monotonic() - start < 3.0
        assert len(engine.cancelled) == 128 and validated_steps(run) == []
    finally:
        engine.go.set()
        engine.close()


def test_the_version_is_pinned_while_it_is_measured(run: RunDir, parts: dict[str, Any]) -> None:
    engine = SlowEngine(run.model)
    version = publish_model(run)
    validator = validator_of(run, configured(), parts | {"engine": engine})
    thread = threading.Thread(target=validator.validate, args=(version, 0))
    thread.start()
    assert engine.submitted.wait(10)
    assert pinned_versions(run) == {version.v}
    engine.go.set()
    thread.join(10)
    assert pinned_versions(run) == set() and validated_steps(run) == [0]
    engine.close()


def test_close_ends_a_validation_in_the_middle(run: RunDir, parts: dict[str, Any]) -> None:
    long = configured(sampling={"max_new_tokens": 40}, data={"validation_size": 4096})
    zero = publish_model(run, step=1, scale=0.0)  # never ends an answer
    prompts = validation_prompts(long, parts["tokenizer"])
    validator = validator_of(run, long, parts | {"prompts": prompts})
    raised: list[BaseException] = []

    def validate() -> None:
        try:
            validator.validate(zero, 1)
        except DeadPart as error:
            raised.append(error)

    thread = threading.Thread(target=validate)
    thread.start()
    deadline = time.monotonic() + 10
    while not parts["engine"].running and time.monotonic() < deadline:
        time.sleep(0.01)
    start = time.process_time()  # of the engine's thread, too; whatever else the machine does
    validator.close()
    thread.join(20)
    assert time.process_time() - start < 2.0 and not thread.is_alive()
    assert len(raised) == 1 and validated_steps(run) == []


def test_pins_are_by_name_and_version(run: RunDir) -> None:
    pin(run, "validation-1", 3)
    pin(run, "validation-1", 3)
    pin(run, "best", 3)
    pin(run, "best", 7)
    assert pinned_versions(run) == {3, 7}
    unpin(run, "validation-1", 3)
    assert pinned_versions(run) == {3, 7}
    unpin(run, "best", 3)
    unpin(run, "best", 3)
    assert pinned_versions(run) == {7}
    with pytest.raises(ValueError, match=r"pin name '\.\./x'"):
        pin(run, "../x", 1)


class Starting:
    """What a validation needs of an owner whose earlier start was stopped in it."""

    def __init__(self, run: RunDir, validator: Validator) -> None:
        self.run, self.config, self._validator = run, configured(), validator
        self.validator = self.progress = self.experience = self
        self.validating = threading.Lock()
        self.validated, self.validations_left = set[int](), set[int]()
        self.validations: list[Future[Any]] = []
        self.notes: list[str] = []
        self.failures: list[BaseException] = []

    def call(self, method: str, version: WeightVersion, step: int, deadline_s: float) -> dict[str, Any]:
        assert (method, deadline_s) == ("validate", self.config.deadlines.validation_s)
        return self._validator.validate(version, step)

    def set(self, *, note: str) -> None:
        self.notes.append(note)

    def fail(self, error: BaseException) -> None:
        self.failures.append(error)

    def saw_validation(self, record: dict[str, Any]) -> None:
        assert record["step"] in self.validated


@pytest.fixture
def starting(run: RunDir, parts: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    def at_once(*args: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(validate_task.fn(*args))
        except Exception as error:
            done.set_exception(error)
        return done

    monkeypatch.setattr(validate_task, "submit", at_once)
    return Starting(run, validator_of(run, configured(), parts))


def zeroed(path: Path) -> None:
    path.write_bytes(b"\0" * path.stat().st_size)


LEFT: dict[str, tuple[Callable[[Path], object], str | None]] = {
    "whole": (lambda weights: None, None),
    "without a byte": (lambda weights: (weights / WEIGHTS_FILE).write_bytes(b""), "model.safetensors: "),
    "zeroed": (lambda weights: zeroed(weights / WEIGHTS_FILE), "model.safetensors: "),
    "without their file": (lambda weights: (weights / WEIGHTS_FILE).unlink(), "model.safetensors: "),
    "gone": (shutil.rmtree, "absent"),
}
"""What has become of the pinned weights, and the end of why there is no validation."""


@pytest.mark.parametrize(("spoil", "why"), LEFT.values(), ids=LEFT)
def test_a_validation_that_an_earlier_start_left_is_made_up_or_told_and_nothing_stays_pinned(
        run: RunDir, starting: Any, spoil: Callable[[Path], object], why: str | None) -> None:
    version = publish_model(run, step=2)
    for name in (PIN, validating_pin(2)):  # as a kill in the middle leaves them
        pin(run, name, version.v)
    spoil(run.weights(version.v))
    validate_unfinished(starting)
    for validation in starting.validations:
        validation.result()
    assert validated_steps(run) == ([2] if why is None else [])
    assert starting.failures == [] and pinned_versions(run) == set() and starting.validations_left == set()
    if why is None:
        assert starting.notes == []
    else:
        assert len(starting.notes) == 1 and why in starting.notes[0]
        assert starting.notes[0].startswith("no validation after 2 training steps: an earlier start ended in it, and ")


def test_a_validator_that_died_behind_its_record_leaves_no_pin(run: RunDir, starting: Any) -> None:
    version = publish_model(run, step=2)
    starting.validated.add(2)
    validate_task.fn(starting, 2, version)
    for now in (lambda: validate_unfinished(starting), lambda: validate_task.fn(starting, 2, version)):
        for name in (PIN, validating_pin(2)):
            pin(run, name, version.v)
        now()  # at the next start; and asked again in the same one
        assert pinned_versions(run) == set()
    assert starting.validations == [] and starting.notes == []


def test_weights_that_are_damaged_under_a_validation_of_this_start_end_the_run(run: RunDir, starting: Any) -> None:
    version = publish_model(run, step=2)
    zeroed(run.weights(version.v) / WEIGHTS_FILE)
    with pytest.raises(WeightsDamaged):
        validate_task.fn(starting, 2, version)
    assert [type(error) for error in starting.failures] == [WeightsDamaged] and starting.notes == []


def scored(reward: float | None, correct: float | None = None) -> Answer:
    score = None if reward is None else Score(reward=reward, correct=correct)
    return Answer(prompt=0, mode="greedy", data_source="s", score=score, length=1, finish_reason="stop")


ACCURACIES: dict[str, tuple[list[Answer], float | None]] = {
    "said": ([scored(0.3, 1.0), scored(0.9, 0.0), scored(0.1, 1.0), scored(None)], 2 / 3),
    "said by some": ([scored(0.3, 1.0), scored(0.9)], 1.0),
    "reward of 0 and 1": ([scored(1.0), scored(0.0), scored(0.0), scored(None)], 1 / 3),
    "shaped reward": ([scored(0.5), scored(1.0)], None),
    "none": ([scored(None)], None),
}


@pytest.mark.parametrize(("answers", "expected"), ACCURACIES.values(), ids=ACCURACIES)
def test_accuracy_is_of_what_is_right_never_of_a_shaped_reward(answers: list[Answer], expected: float | None) -> None:
    assert fields_of(answers, ())["greedy_accuracy"] == expected


def test_mean_reward_leaves_failed_ones_out() -> None:
    assert mean_reward([scored(0.5), scored(1.0), scored(None)]) == 0.75
    assert mean_reward([scored(None)]) is None


def test_nothing_to_validate_on_is_refused(run: RunDir) -> None:
    publish_model(run)
    with pytest.raises(ConfigError, match=r"data\.validation: there is nothing to validate on"):
        open_validator(root=str(run.root), config=configured(data={"validation": None}))


# -- several sources, several answers


@pytest.fixture
def two_sources(run: RunDir) -> dict[str, Any]:
    """Settings for validation on two files, 12 and 4 rows, 6 sampled answers each; all rows in the table."""
    for name, digits, size in (("short", 2, 12), ("long", 5, 4)):
        asked = ["9876543210"[i % 5:i % 5 + digits] for i in range(size)]
        rows = [{"prompt": f"sort {text}", "answer": "".join(sorted(text))} for text in asked]
        (run.root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"data": {"validation": ["short.jsonl", "long.jsonl"]},
            "validation": {"n": 6, "k": [4, 1], "temperature": 1.5, "table": 16, "max_new_tokens": 6}}


def test_each_source_has_estimates_that_the_table_adds_up_to(run: RunDir, two_sources: dict[str, Any]) -> None:
    validator = open_validator(root=str(run.root), config=configured(**two_sources), cwd=str(run.root))
    try:
        record = validator.validate(publish_model(run), 0)
    finally:
        validator.close()
    table = read_table(run, 0)
    assert list(record["by_source"]) == ["short", "long"] and record["n"] == 16 and len(table) == 16 * 7
    assert record["sampling"]["n"] == 6 and record["sampling"]["temperature"] == 1.5
    assert record["pass_at_k"].keys() == {"1", "4"}
    for source in ("short", "long"):
        found = record["by_source"][source]
        rows = [row for row in table if row["data_source"] == source]
        prompts = [rows[i:i + 7] for i in range(0, len(rows), 7)]
        assert found["n"] == len(prompts) == (12 if source == "short" else 4)
        rights = [[row["correct"] for row in prompt[1:]] for prompt in prompts]
        drawn = [any(subset) for right in rights for subset in combinations(right, 4)]
        assert found["greedy_accuracy"] == pytest.approx(np.mean([prompt[0]["correct"] for prompt in prompts]))
        assert found["mean_at_n"] == pytest.approx(np.mean(rights)) == pytest.approx(found["pass_at_k"]["1"])
        assert found["pass_at_k"]["4"] == pytest.approx(np.mean(drawn))
        assert found["mean_at_n_interval"][0] <= found["mean_at_n"] <= found["mean_at_n_interval"][1]
    assert record["mean_at_n"] == pytest.approx(np.mean([row["correct"] for row in table if row["mode"] == "sampled"]))
    assert {row["extracted"] == row["text"].strip() for row in table} == {True}
    assert max(row["length"] for row in table) <= 6
    assert len({row["text"] for row in table[1:7]}) > 1, "samples of one prompt differ"
    details = read_table_details(run, 0)
    assert [len(detail["ids"]) for detail in details] == [len(d["logprobs"]) for d in details] == [
        row["length"] for row in table]
    assert [detail["prompt"] for detail in details] == [place for place in range(16) for _ in range(7)]
    assert max(value for detail in details for value in detail["logprobs"]) <= 0
    page = validation_page(run, 0)
    assert 'id="gaps"' not in page and '"logprob"' not in page.split('"absent":')[1].split("}")[0]


class AskedEngine(TorchEngine):
    """The real engine; keeps what it was asked for."""

    def __init__(self, model_dir: Path) -> None:
        super().__init__(model_dir, slots=64, max_context=64)
        self.asked: list[GenerateRequest] = []

    def submit(self, request: GenerateRequest) -> Future[Completion]:
        self.asked.append(request)
        return super().submit(request)


def test_validation_samples_by_its_own_settings_where_it_has_some(run: RunDir, parts: dict[str, Any]) -> None:
    engine = AskedEngine(run.model)
    own = {"n": 2, "temperature": 0.6, "top_p": 0.9, "top_k": 7, "max_new_tokens": 3}
    validator_of(run, configured(validation=own), parts | {"engine": engine}).validate(publish_model(run), 0)
    validator_of(run, configured(sampling={"temperature": 0.8, "max_new_tokens": 8}), parts | {"engine": engine}
                 ).validate(read_version(run, 0), 1)
    engine.close()
    first, second = engine.asked[:64 * 3], engine.asked[64 * 3:]
    assert [(r.sampling.temperature, r.sampling.max_new_tokens) for r in first[:3]] == [(0.0, 3), (0.6, 3), (0.6, 3)]
    assert (first[1].sampling.top_p, first[1].sampling.top_k) == (0.9, 7)
    assert (first[0].sampling.top_p, first[0].sampling.top_k) == (1.0, 0)
    assert [(r.sampling.temperature, r.sampling.max_new_tokens) for r in second[:2]] == [(0.0, 8), (0.8, 8)]
    assert len({request.seed for request in first if request.sampling.temperature}) == 64 * 2, "a seed for each answer"
    assert [request.seed for request in second] == [r.seed for r in first if r.request_id.endswith("-0")]
    assert len({request.request_id for request in first}) == len(first)


def test_scoring_runs_side_by_side_while_others_are_generated(run: RunDir, parts: dict[str, Any]) -> None:
    barrier = threading.Barrier(3)

    class Slow:
        """Answers only where three calls are under way at once."""

        def __call__(self, prompt: Prompt, text: str) -> Score:
            barrier.wait(10)
            return exact(prompt, text)

        def close(self) -> None:
            pass

    config = configured(scoring={"workers": 3}, data={"validation_size": 3}, validation={"n": 2})
    prompts = validation_prompts(config, parts["tokenizer"])
    record = validator_of(run, config, parts | {"scorer": Slow(), "prompts": prompts}).validate(publish_model(run), 0)
    assert record["n"] == 3 and record["greedy_failed"] == record["sampled_failed"] == 0


def test_a_table_without_a_record_is_written_again(run: RunDir, parts: dict[str, Any]) -> None:
    """What a start leaves behind that was killed between the two."""
    put_if_absent(run.validation_table(0), to_json({"step": 0, "rows": []}))
    validator_of(run, configured(validation={"table": 3}), parts).validate(publish_model(run), 0)
    assert len(read_table(run, 0)) == 3 * 2
    validator_of(run, configured(validation={"table": 0}), parts).validate(read_version(run, 0), 1)
    with pytest.raises(FileNotFoundError):
        read_table(run, 1)


def test_prompts_that_are_too_long_are_left_out_and_counted(run: RunDir, two_sources: dict[str, Any]) -> None:
    two_sources["data"] |= {"max_prompt_tokens": 17, "overlong": "drop"}
    validator = open_validator(root=str(run.root), config=configured(**two_sources), cwd=str(run.root))
    try:
        record = validator.validate(publish_model(run), 0)
    finally:
        validator.close()
    assert (record["n"], record["left_out"], list(record["by_source"])) == (12, 4, ["short"])


# -- headway validate


@pytest.fixture
def stored(run: RunDir, two_sources: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run of three publications, the second one of them without its bytes, under a home of its own."""
    for name, value in (QUIET | {"HEADWAY_HUB_OFFLINE": ""}).items():
        monkeypatch.setenv(name, value)  # the command sets them; they go with the test
    monkeypatch.setattr(signal, "signal", lambda number, action: None)
    home = run.root / "home"
    inside = RunDir(home / "runs" / "k")
    monkeypatch.setenv("HEADWAY_HOME", str(home))
    monkeypatch.chdir(run.root)
    open_identity(inside, "k", "tiny-cpu", configured(**two_sources))
    inside.model.symlink_to(run.model.resolve())
    for step, scale in ((0, 1.0), (1, 0.5), (2, 0.0)):
        publish_model(inside, step, scale)
    shutil.rmtree(inside.weights(1))
    return inside


def said(capsys: pytest.CaptureFixture[str], *args: Any, **kwargs: Any) -> tuple[int, str, str]:
    code = validate(*args, **({"model": None, "step": None, "preset": None, "overrides": [], "out": None,
                               "as_json": True} | kwargs))
    out, err = capsys.readouterr()
    return code, out, err


def files_of(run: RunDir) -> dict[str, float]:
    return {str(path): path.stat().st_mtime for path in run.root.rglob("*")}


def test_weights_of_a_run_are_measured_from_its_directory_alone(
        stored: RunDir, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    before = files_of(stored)
    code, out, err = said(capsys, "k", step=0, out=str(tmp_path / "report.json"))
    assert (code, err) == (0, "")
    report = json.loads(out.splitlines()[-1])
    assert (report["run_key"], report["step"], report["source"]) == ("k", 0, "publication")
    assert report["digest"] == read_version(stored, 0).digest and report["n"] == 16
    assert 0.0 < report["greedy_accuracy"] <= 1.0 and list(report["by_source"]) == ["short", "long"]
    lines = [line.split() for line in out.splitlines()]
    head = next(i for i, words in enumerate(lines) if words[:1] == ["prompts"])
    assert lines[head] == ["prompts", "greedy", "mean@6", "pass@4", "maj@6"]
    assert [words[:2] for words in lines[head + 1:head + 4]] == [["short", "12"], ["long", "4"], ["all", "16"]]
    assert lines[head + 3][2] == f"{report['greedy_accuracy']:.3f}"
    written = read_json(tmp_path / "report.json")
    assert written["greedy_accuracy"] == report["greedy_accuracy"] and len(written["table"]) == 16 * 7
    newest = json.loads(said(capsys, "k", overrides=["validation.n=1", "validation.k=[]"])[1].splitlines()[-1])
    assert (newest["step"], newest["greedy_accuracy"], newest["sampling"]["n"]) == (2, 0.0, 1)
    assert files_of(stored) == before


def test_a_model_directory_is_measured_without_a_run(stored: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    sets = ["data.validation=short.jsonl", "data.max_prompt_tokens=64", "sampling.max_new_tokens=8", "validation.n=2",
            "validation.sampled=true"]
    code, out, err = said(capsys, None, model=str(stored.model), overrides=sets)
    assert (code, err) == (0, "")
    report = json.loads(out.splitlines()[-1])
    assert (report["run_key"], report["step"], report["n"], report["sampling"]["n"]) == (None, None, 12, 2)
    by_run = json.loads(said(capsys, "k", step=0, overrides=["validation.max_new_tokens=8"])[1].splitlines()[-1])
    assert report["greedy_accuracy"] == by_run["by_source"]["short"]["greedy_accuracy"], "the same weights"


REFUSALS: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "neither": ((None,), {}, "give a run's key, or a model directory as --model DIR"),
    "both": (("k",), {"model": "m"}, "give a run's key, or a model directory"),
    "no such run": (("nope",), {}, "run 'nope': there is no such run"),
    "no such step": (("k",), {"step": 7}, r"--step 7: .*has no weights behind 7 .*there are steps 0.*2"),
    "weights that are gone": (("k",), {"step": 1}, r"--step 1: .*there are steps 0.*2"),
    "a step of a model": ((None,), {"model": "m", "step": 3}, "--step 3: belongs to a run"),
    "a preset for a run": (("k",), {"preset": "tiny-cpu"}, "--preset tiny-cpu: a run is measured by its own settings"),
    "no such model": ((None,), {"model": "m", "overrides": ["data.validation=short.jsonl"]}, "'m' is not a directory"),
    "nothing to validate on": (("k",), {"overrides": ["data.validation=null"]}, "data.validation: there is nothing"),
    "a training setting": (("k",), {"overrides": ["learner.lr=1"]}, r"learner.lr: has no part in measuring.*got 1.0"),
    "another model": ((None,), {"model": "m", "overrides": ["model.type=tiny"]}, "--model says which model"),
    "k over n": (("k",), {"overrides": ["validation.k=[9]"]}, "validation.k: pass@9 needs 9 answers"),
    "an answer over the context": (("k",), {"overrides": ["validation.max_new_tokens=4000"]},
                                   "validation.max_new_tokens: the longest held-out prompt has"),
    "a reward that is not there": (("k",), {"overrides": ["reward=./nope.py:f"]}, "reward: .*nope.py"),
    "a column that rows lack": (("k",), {"overrides": ["reward=./mine.py:f"]}, "held-out row 1 has none"),
    "an existing report": (("k",), {"out": "short.jsonl"}, "--out 'short.jsonl': is there already"),
}


@pytest.mark.parametrize(("args", "kwargs", "message"), REFUSALS.values(), ids=REFUSALS)
def test_what_cannot_be_measured_is_refused_by_name(
        stored: RunDir, capsys: pytest.CaptureFixture[str], args: tuple[Any, ...], kwargs: dict[str, Any],
        message: str) -> None:
    Path("mine.py").write_text("def f(answer, truth, level): return 1.0")
    code, out, err = said(capsys, *args, **kwargs)
    assert code == 2 and err.startswith("error: "), (out, err)
    assert re.search(message, err), err
    assert not out.strip().endswith("}")


def test_answers_that_nothing_could_score_are_a_failure_and_no_number(
        stored: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    Path("picky.py").write_text("def f(answer, truth):\n    return 1.0 if answer == truth else 1 / 0")
    code, _, err = said(capsys, "k", step=2, overrides=["reward=./picky.py:f", "validation.sampled=false",
                                                        "validation.n=1", "validation.k=[]",
                                                        "validation.temperature=null"])
    assert code == 1 and "no answer could be scored; the last failure: " in err and "ZeroDivisionError" in err
