"""Validation: greedy and sampled accuracy of a pinned version in an engine of its own, recorded once."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rl_core.config import Config
from rl_core.errors import DeadlinePassed, DeadPart, RewardError, WeightsDamaged
from rl_core.metrics import names, validation_metrics
from rl_core.model_setup import set_up_model
from rl_core.rollout.prompts import Tokenizer, load_tokenizer, validation_prompts
from rl_core.rollout.rewards.exact import exact
from rl_core.rollout.rewards.scoring import InlineScorer, Scorer
from rl_core.rollout.torch_engine import TorchEngine
from rl_core.run_dir import RunDir
from rl_core.types import Completion, GenerateRequest, Prompt, Score, WeightVersion
from rl_core.validation import (
    Scored,
    Validator,
    accuracy,
    mean_reward,
    open_validator,
    read_validation,
    validated_steps,
)
from rl_core.versions import pin, pinned_versions, unpin
from rl_core.weights import publish, read_tensors

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
    assert record["by_source"] == {"sort": {"n": 64, "greedy_accuracy": record["greedy_accuracy"]}}
    assert 0 < record["seconds"] < 60
    assert again == record == read_validation(run, 0) and validated_steps(run) == [0]
    assert pinned_versions(run) == set()
    metrics = validation_metrics(record)
    assert set(metrics) == set(names("validator")) and metrics["validation/seconds"] == record["seconds"]


def test_another_version_is_measured_by_its_own_weights_with_the_same_seeds(run: RunDir, parts: dict[str, Any]) -> None:
    first, zero = publish_model(run), publish_model(run, step=2, scale=0.0)
    validator = Validator(run, configured(), **parts)
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
    assert record["n"] == 2 and record["by_source"] == {"held": {"n": 2, "greedy_accuracy": None}}
    assert record["greedy_accuracy"] is None and 0.0 < record["greedy_reward"] <= 0.8


def test_sampled_answers_are_optional(run: RunDir, parts: dict[str, Any]) -> None:
    record = Validator(run, configured(validation={"sampled": False}), **parts).validate(publish_model(run), 0)
    assert "greedy_accuracy" in record and not [name for name in record if name.startswith("sampled")]


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
    whole = Validator(run, configured(), **parts).validate(version, 0)
    some = Validator(run, configured(), **(parts | {"scorer": FailingScorer("0")})).validate(version, 1)
    failed = sum(prompt.answer[0] == "0" for prompt in parts["prompts"])
    assert 0 < failed < 64 and some["greedy_failed"] == some["sampled_failed"] == failed
    assert round(some["greedy_accuracy"] * (64 - failed)) <= round(whole["greedy_accuracy"] * 64)
    all_fail: Scorer = FailingScorer("0123456789")
    with pytest.raises(RewardError, match=r"no answer could be scored; the last failure: reward f: raised KeyError"):
        Validator(run, configured(), **(parts | {"scorer": all_fail})).validate(version, 2)
    assert validated_steps(run) == [0, 1] and pinned_versions(run) == set()


def test_damaged_weights_are_refused_and_not_recorded(run: RunDir, parts: dict[str, Any]) -> None:
    version = replace(publish_model(run), digest="0" * 32)
    with pytest.raises(WeightsDamaged):
        Validator(run, configured(), **parts).validate(version, 0)
    assert validated_steps(run) == [] and pinned_versions(run) == set()


def test_a_validation_over_its_deadline_ends_what_it_started(run: RunDir, parts: dict[str, Any]) -> None:
    engine = SlowEngine(run.model)
    try:
        config = configured(deadlines={"validation_s": 0.5})
        validator = Validator(run, config, **(parts | {"engine": engine}))
        start = time.monotonic()
        with pytest.raises(DeadlinePassed, match=r"64 of 64 greedy answers missing after 0.5 s \(deadlines"):
            validator.validate(publish_model(run), 0)
        assert time.monotonic() - start < 3.0
        assert len(engine.cancelled) == 128 and validated_steps(run) == []
    finally:
        engine.go.set()
        engine.close()


def test_the_version_is_pinned_while_it_is_measured(run: RunDir, parts: dict[str, Any]) -> None:
    engine = SlowEngine(run.model)
    version = publish_model(run)
    validator = Validator(run, configured(), **(parts | {"engine": engine}))
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
    validator = Validator(run, long, **(parts | {"prompts": prompts}))
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
    start = time.monotonic()
    validator.close()
    thread.join(5)
    assert time.monotonic() - start < 2.0 and not thread.is_alive()
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


def scored(reward: float | None, correct: float | None = None) -> Scored:
    score = None if reward is None else Score(reward=reward, correct=correct)
    return Scored(data_source="s", score=score, length=1, finish_reason="stop")


ACCURACIES: dict[str, tuple[list[Scored], float | None]] = {
    "said": ([scored(0.3, 1.0), scored(0.9, 0.0), scored(0.1, 1.0), scored(None)], 2 / 3),
    "said by some": ([scored(0.3, 1.0), scored(0.9)], 1.0),
    "reward of 0 and 1": ([scored(1.0), scored(0.0), scored(0.0), scored(None)], 1 / 3),
    "shaped reward": ([scored(0.5), scored(1.0)], None),
    "none": ([scored(None)], None),
}


@pytest.mark.parametrize(("answers", "expected"), ACCURACIES.values(), ids=ACCURACIES)
def test_accuracy_is_of_what_is_right_never_of_a_shaped_reward(answers: list[Scored], expected: float | None) -> None:
    assert accuracy(answers) == expected


def test_mean_reward_leaves_failed_ones_out() -> None:
    assert mean_reward([scored(0.5), scored(1.0), scored(None)]) == 0.75
    assert mean_reward([scored(None)]) is None


def test_nothing_to_validate_on_is_refused(run: RunDir) -> None:
    publish_model(run)
    with pytest.raises(ValueError, match=r"data\.validation is null"):
        open_validator(root=str(run.root), config=configured(data={"validation": None}))
