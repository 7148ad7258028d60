"""Validation: how good a weight version is on held-out prompts, measured in an engine of its own.

Greedy answers, and one sampled answer per prompt at the run's temperature, both with fixed seeds, so that two versions
are asked the same questions in the same way. Accuracy is of `correct`, never of a shaped reward (algorithms.md 10).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rl_core.config import Config
from rl_core.errors import DeadlinePassed, DeadPart, RewardError
from rl_core.rollout.engine import Engine
from rl_core.rollout.prompts import Tokenizer, load_tokenizer, read_vocab_size, validation_prompts
from rl_core.rollout.rewards.scoring import Scorer, answer_text, make_scorer
from rl_core.run_dir import RunDir, numbered, put_if_absent, read_json, to_json
from rl_core.seeds import derive
from rl_core.types import Completion, GenerateRequest, Prompt, Sampling, Score, WeightVersion
from rl_core.versions import pin, unpin


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """One answer to one held-out prompt; `score` is None where the reward failed."""

    data_source: str
    score: Score | None
    length: int
    """Tokens."""
    finish_reason: str


def read_validation(run: RunDir, step: int) -> dict[str, Any]:
    """The record of the validation after `step` training steps. Raises FileNotFoundError where there is none."""
    return read_json(run.validation(step))


def validated_steps(run: RunDir) -> list[int]:
    """Steps with a validation record, ascending."""
    return [k for k, _ in numbered(run.validations, r"step-(\d{9})\.json")]


def accuracy(answers: Sequence[Scored]) -> float | None:
    """Share of right answers among those that could be scored.

    What is right is said by `correct`; a reward that never says it counts only if all it gave is 0 or 1, which is then
    the accuracy itself. None where nothing says it: a shaped reward is no accuracy.

    Example: correct 1, 0, 1 and one failed reward -> 0.6667.
    """
    scores = [answer.score for answer in answers if answer.score is not None]
    said = [score.correct for score in scores if score.correct is not None]
    if not said and all(score.reward in (0.0, 1.0) for score in scores):
        said = [score.reward for score in scores]
    return math.fsum(said) / len(said) if said else None


def mean_reward(answers: Sequence[Scored]) -> float | None:
    """Mean reward of the answers that could be scored; None where none could."""
    rewards = [answer.score.reward for answer in answers if answer.score is not None]
    return math.fsum(rewards) / len(rewards) if rewards else None


def summary(prefix: str, answers: Sequence[Scored]) -> dict[str, Any]:
    """Fields of a record about one set of answers, each name beginning with `prefix`."""
    return {
        f"{prefix}accuracy": accuracy(answers),
        f"{prefix}reward": mean_reward(answers),
        f"{prefix}length": math.fsum(answer.length for answer in answers) / len(answers),
        f"{prefix}truncated": sum(answer.finish_reason == "length" for answer in answers) / len(answers),
        f"{prefix}failed": sum(answer.score is None for answer in answers),
    }


class Validator:
    """Measures versions of one run, one after the other. Any thread; `close` may come from another one.

        validator = open_validator(root="runs/k", config=config)
        validator.validate(version, step=20)["greedy_accuracy"]     # 0.73
    """

    def __init__(self, run: RunDir, config: Config, *, engine: Engine, tokenizer: Tokenizer, scorer: Scorer,
                 prompts: Sequence[Prompt]) -> None:
        self._run, self._config, self._prompts = run, config, list(prompts)
        self._engine, self._tokenizer, self._scorer = engine, tokenizer, scorer
        self._one = threading.Lock()
        self._validations = 0

    def validate(self, version: WeightVersion, step: int) -> dict[str, Any]:
        """Measure `version`, served after `step` training steps, and record it; a record that exists is returned.

        The record: step, v, idx, digest, n (prompts), greedy_accuracy, greedy_reward, greedy_length, greedy_truncated,
        greedy_failed and the same with `sampled_` (if validation.sampled), mean_length (= greedy_length), by_source
        ({name: {n, greedy_accuracy}}), seconds (wall), ts_us. Accuracies are shares, lengths tokens; null is unknown.
        The version is pinned meanwhile.

        Raises DeadlinePassed (deadlines.validation_s), RewardError if no answer at all could be scored, WeightsDamaged.
        """
        name = f"validation-{step:09d}"
        with self._one:
            try:
                return read_validation(self._run, step)
            except FileNotFoundError:
                pin(self._run, name, version.v)
            try:
                record = self._measure(version, step)
                put_if_absent(self._run.validation(step), to_json(record))
            finally:
                unpin(self._run, name, version.v)
            return read_validation(self._run, step)

    def close(self) -> None:
        """End the engine and the reward's process; a validation that runs raises. Idempotent."""
        self._scorer.close()
        self._engine.close()

    def _measure(self, version: WeightVersion, step: int) -> dict[str, Any]:
        self._validations += 1
        start = time.monotonic()
        deadline = start + self._config.deadlines.validation_s
        self._engine.swap(version, self._run.weights(version.v))
        modes = {"greedy": 0.0}
        if self._config.validation.sampled:
            modes["sampled"] = self._config.sampling.temperature
        # All at once: the engine's slots stay full from the first answer to the last.
        futures = {mode: [self._engine.submit(self._request(prompt, mode, temperature)) for prompt in self._prompts]
                   for mode, temperature in modes.items()}
        try:
            answers = {mode: self._collect(mode, each, deadline) for mode, each in futures.items()}
        finally:
            self._end_unfinished(futures)
        record: dict[str, Any] = {"step": step, "v": version.v, "idx": version.idx, "digest": version.digest,
                                  "n": len(self._prompts)}
        for mode, each in answers.items():
            record |= summary(f"{mode}_", each)
        sources = sorted({answer.data_source for answer in answers["greedy"]})
        record["mean_length"] = record["greedy_length"]
        record["by_source"] = {source: _of_source(answers["greedy"], source) for source in sources}
        return record | {"seconds": time.monotonic() - start, "ts_us": time.time_ns() // 1000}

    def _request(self, prompt: Prompt, mode: str, temperature: float) -> GenerateRequest:
        s = self._config.sampling
        sampling = Sampling(temperature=temperature, max_new_tokens=s.max_new_tokens, stop=s.stop,
                            stop_token_ids=s.stop_token_ids)
        if mode == "sampled":
            sampling = replace(sampling, top_p=s.top_p, top_k=s.top_k, min_p=s.min_p)
        return GenerateRequest(request_id=self._name(mode, prompt), token_ids_P=prompt.token_ids_P,
                               sampling=sampling, seed=derive(self._config.seed, prompt.prompt_idx, "validation"))

    def _collect(self, mode: str, futures: Sequence[Future[Completion]], deadline: float) -> list[Scored]:
        """Score the answers, in order of the prompts."""
        limit = f"{self._config.deadlines.validation_s:g} s (deadlines.validation_s)"
        done, left = wait(futures, timeout=max(0.0, deadline - time.monotonic()), return_when=FIRST_EXCEPTION)
        completions = [future.result() for future in futures if future in done]  # raises what the engine raised
        if left:
            raise DeadlinePassed(f"validation: {len(left)} of {len(futures)} {mode} answers missing after {limit}")
        return self._score(mode, completions, deadline, limit)

    def _name(self, mode: str, prompt: Prompt) -> str:
        """Of a request. Another for every validation: a cancelled one of the last may still be leaving the engine."""
        return f"validation-{self._validations}/{mode}/{prompt.prompt_idx}"

    def _end_unfinished(self, futures: Mapping[str, Sequence[Future[Completion]]]) -> None:
        for mode, each in futures.items():
            for prompt, future in zip(self._prompts, each, strict=True):
                if not future.done():
                    self._engine.cancel(self._name(mode, prompt))

    def _score(self, mode: str, completions: Sequence[Completion], deadline: float, limit: str) -> list[Scored]:
        scored: list[Scored] = []
        last: RewardError | None = None
        for prompt, completion in zip(self._prompts, completions, strict=True):
            if time.monotonic() > deadline:
                raise DeadlinePassed(f"validation: {len(scored)} of {len(completions)} {mode} answers scored after "
                                     f"{limit}")
            if completion.finish_reason == "cancelled":
                raise DeadPart(f"validation: the engine ended {completion.request_id} before its answer was there")
            decoded = str(self._tokenizer.decode(completion.token_ids_L, skip_special_tokens=True))
            score = None
            try:
                score = self._scorer(prompt, answer_text(decoded, completion))
            except RewardError as error:  # counted in `failed`, never a wrong answer
                last = error
            scored.append(Scored(data_source=prompt.data_source, score=score, length=len(completion.token_ids_L),
                                 finish_reason=completion.finish_reason))
        if last is not None and all(answer.score is None for answer in scored):
            raise RewardError(f"validation: no answer could be scored; the last failure: {last}") from last
        return scored


def _of_source(answers: Sequence[Scored], source: str) -> dict[str, Any]:
    mine = [answer for answer in answers if answer.data_source == source]
    return {"n": len(mine), "greedy_accuracy": accuracy(mine)}


def open_validator(*, root: str, config: Config, cwd: str | None = None,
                   allowed_imports: Sequence[str] | None = None) -> Validator:
    """A validator with an engine of its own: what an actor starts. `cwd` is the working directory of the command."""
    from rl_core.rollout.torch_engine import TorchEngine

    run = RunDir(Path(root))
    scorer = make_scorer(config, cwd=Path(cwd) if cwd else None, allowed=allowed_imports)
    tokenizer = load_tokenizer(run.model)
    prompts = validation_prompts(config, tokenizer, read_vocab_size(run.model), cwd=Path(cwd or ""))
    if not prompts:
        raise ValueError("data.validation is null: there is nothing to validate on")
    settings = config.rollout.engine
    engine = TorchEngine(run.model, slots=config.validation.slots, threads=settings.threads, dtype=settings.dtype,
                         device=settings.device,
                         max_context=config.data.max_prompt_tokens + config.sampling.max_new_tokens)
    return Validator(run, config, engine=engine, tokenizer=tokenizer, scorer=scorer, prompts=prompts)
