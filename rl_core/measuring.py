"""Measuring: held-out prompts asked of whatever weights an engine serves, their answers scored and added up.

Each prompt gets a greedy answer and, if asked for, n sampled ones. The noise of an answer is a function of the run's
seed, the prompt and the number of the sample, so that two versions are asked the same questions in the same way. Needs
no run: `headway validate` measures any Hugging Face directory with it, a run's validations any weight version.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.answers import Answer, Mode, by_prompt_of, fields_of, table_details, table_prompts, table_rows
from rl_core.config import Config
from rl_core.errors import ConfigError, DeadlinePassed, DeadPart, RewardError
from rl_core.rollout.encoder import Encoder, Limits, Tokenizer
from rl_core.rollout.engine import Engine
from rl_core.rollout.prompts import HeldOut, load_tokenizer, read_vocab_size
from rl_core.rollout.rewards.scoring import Scorer, answer_text, make_scorer
from rl_core.seeds import derive
from rl_core.types import Completion, GenerateRequest, Prompt, Sampling
from rl_core.validation_plan import check_validation_inputs

if TYPE_CHECKING:
    from rl_core.rollout.sglang.borrowing import Borrower

OUTSTANDING = 8192
"""Answers asked for and not scored yet at most: far more than an engine has slots, so that memory does not grow with
validation.n and none of its slots waits for the scoring."""

Progress = Callable[[int, int], None]
"""`(answers scored, answers in all)`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """What was found out about one set of weights."""

    fields: dict[str, Any]
    """n, the fields of both modes, `by_source`: the same by data source, and `sampling`: how (docs/validation.md 1)."""
    by_prompt: dict[str, Any]
    """How right each prompt's answers are (rl_core/answers.py, `by_prompt_of`)."""
    table: list[dict[str, Any]]
    """Some answers as texts."""
    details: list[dict[str, Any]]
    """Reward parts and tokens of each of them (rl_core/answers.py, `table_details`)."""


@dataclass(frozen=True, slots=True)
class _Question:
    place: int
    mode: Mode
    sample: int


@dataclass(frozen=True, slots=True)
class _Asked:
    request: GenerateRequest
    completion: Future[Completion]
    answer: Future[tuple[Answer, RewardError | None]]


def samplings(config: Config) -> dict[Mode, Sampling]:
    """How each mode samples: the run's settings, but for those that `validation` sets."""
    s, v = config.sampling, config.validation
    greedy = Sampling(temperature=0.0, max_new_tokens=config.validation_tokens, stop=s.stop,
                      stop_token_ids=s.stop_token_ids)
    if not v.sampled:
        return {"greedy": greedy}
    return {"greedy": greedy, "sampled": Sampling(
        temperature=s.temperature if v.temperature is None else v.temperature,
        top_p=s.top_p if v.top_p is None else v.top_p, top_k=s.top_k if v.top_k is None else v.top_k, min_p=s.min_p,
        max_new_tokens=greedy.max_new_tokens, stop=s.stop, stop_token_ids=s.stop_token_ids)}


class Measuring:
    """Engine, scorer and held-out prompts. One measurement at a time; `close` may come from another thread.

        measuring = open_measuring(Path("my-model"), config)
        measuring.measure().fields["greedy_accuracy"]      # 0.73
    """

    def __init__(self, config: Config, *, engine: Engine, tokenizer: Tokenizer, scorer: Scorer,
                 prompts: Sequence[Prompt], left_out: int = 0) -> None:
        """`left_out`: held-out prompts that are too long to be asked (data.overlong), for the record."""
        self.engine = engine
        self._left_out = left_out
        self.prompts: tuple[Prompt, ...] = tuple(prompts)
        self._config = self.config = config
        self._tokenizer, self._scorer = tokenizer, scorer
        self._samplings = samplings(config)
        self._shown = table_prompts(self.prompts, config.validation.table)
        self._measurements = 0
        self._closed = False

    def measure(self, on_progress: Progress = lambda scored, total: None, *, begun: float | None = None) -> Measurement:
        """Ask all prompts of the weights that the engine serves now.

        `begun`: moment from which the deadline counts, monotonic seconds; None: now. Raises DeadlinePassed
        (deadlines.validation_s), DeadPart if the engine ends meanwhile, RewardError if no answer could be scored.
        """
        self._measurements += 1
        begun = time.monotonic() if begun is None else begun
        answers = self._answers(begun + self._config.deadlines.validation_s, on_progress)
        passes = self._config.validation.passes
        sources = dict.fromkeys(prompt.data_source for prompt in self.prompts)  # in order of the prompts
        by_source = {source: fields_of([answer for answer in answers if answer.data_source == source], passes)
                     for source in sources}
        texts = {place: self._text(self.prompts[place].token_ids_P) for place in self._shown}
        fields = fields_of(answers, passes) | {"left_out": self._left_out, "by_source": by_source,
                                               "sampling": self._sampling()}
        return Measurement(fields=fields, by_prompt=by_prompt_of(answers, self.prompts),
                           table=table_rows(answers, self.prompts, texts), details=table_details(answers, texts))

    def _sampling(self) -> dict[str, Any] | None:
        if (sampling := self._samplings.get("sampled")) is None:
            return None
        return {"n": self._config.validation.n} | {
            name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k", "min_p", "max_new_tokens")}

    def close(self) -> None:
        """End the engine and the reward's process; a measurement that runs raises. Idempotent."""
        self._closed = True
        self._scorer.close()
        self.engine.close()

    # -- asking

    def _answers(self, deadline: float, on_progress: Progress) -> list[Answer]:
        """All answers, by prompt, greedy first. What is still running at an error is cancelled."""
        total = len(self.prompts) * self._config.validation.answers
        waiting: deque[_Asked] = deque()
        answers: list[Answer] = []
        failure: RewardError | None = None
        pool = ThreadPoolExecutor(self._config.scoring.workers, thread_name_prefix="scoring")
        try:
            for question in self._questions():
                waiting.append(self._ask(question, pool, deadline))
                if len(waiting) == OUTSTANDING:
                    failure = self._take(waiting, answers, deadline) or failure
                    on_progress(len(answers), total)
            while waiting:
                failure = self._take(waiting, answers, deadline) or failure
                on_progress(len(answers), total)
        except TimeoutError:
            raise DeadlinePassed(f"validation: {total - len(answers)} of {total} answers missing after "
                                 f"{self._config.deadlines.validation_s:g} s (deadlines.validation_s)") from None
        finally:
            for asked in waiting:
                if not asked.completion.done():
                    self.engine.cancel(asked.request.request_id)
            pool.shutdown(wait=False, cancel_futures=True)
        if failure is not None and all(answer.score is None for answer in answers):
            raise RewardError(f"validation: no answer could be scored; the last failure: {failure}") from failure
        return answers

    def _questions(self) -> Iterator[_Question]:
        """By prompt: an engine reads a prompt once for all answers that it begins together."""
        for place in range(len(self.prompts)):
            for mode in self._samplings:
                for sample in range(1 if mode == "greedy" else self._config.validation.n):
                    yield _Question(place, mode, sample)

    def _ask(self, question: _Question, pool: ThreadPoolExecutor, deadline: float) -> _Asked:
        prompt = self.prompts[question.place]
        # Another name for every measurement: a cancelled request of the last may still be leaving the engine.
        name = f"validation-{self._measurements}/{question.place}/{question.mode}-{question.sample}"
        request = GenerateRequest(request_id=name, token_ids_P=prompt.token_ids_P,
                                  sampling=self._samplings[question.mode],
                                  seed=derive(self._config.seed, prompt.prompt_idx, question.sample, "validation"))
        completion = self.engine.submit(request)
        return _Asked(request, completion, pool.submit(self._answer, question, completion, deadline))

    @staticmethod
    def _take(waiting: deque[_Asked], answers: list[Answer], deadline: float) -> RewardError | None:
        """Wait for the oldest answer. Raises TimeoutError at the deadline, and whatever kept it from coming."""
        answer, failure = waiting[0].answer.result(timeout=max(0.0, deadline - time.monotonic()))
        waiting.popleft()
        answers.append(answer)
        return failure

    # -- scoring, on the pool's threads

    def _answer(self, question: _Question, completed: Future[Completion],
                deadline: float) -> tuple[Answer, RewardError | None]:
        completion = completed.result(timeout=max(0.0, deadline - time.monotonic()))
        if completion.finish_reason == "cancelled" or self._closed:
            raise DeadPart(f"validation: the engine ended {completion.request_id} before its answer was there")
        prompt = self.prompts[question.place]
        text = answer_text(self._text(completion.token_ids_L), completion)
        score, failure = None, None
        try:
            score = self._scorer(prompt, text)
        except RewardError as error:  # counted in `failed`, never a wrong answer
            failure = error
        answer = Answer(prompt=question.place, mode=question.mode, data_source=prompt.data_source, score=score,
                        length=len(completion.token_ids_L), finish_reason=completion.finish_reason)
        if question.place in self._shown:
            answer = replace(answer, text=text, token_ids=tuple(completion.token_ids_L.tolist()),
                             logprobs=tuple(completion.logprobs_L.tolist()))
        return answer, failure

    def _text(self, token_ids: Any) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))


def open_measuring(model_dir: Path, config: Config, *, cwd: Path | None = None,
                   allowed_imports: Sequence[str] | None = None, borrower: Borrower | None = None) -> Measuring:
    """Load a Hugging Face directory into an engine of its own; its weights are served until another swap. With
    `borrower` no engine is made: that one is asked.

    `cwd` is the working directory of the command, which a process elsewhere must be told. Raises ConfigError where
    there is nothing to validate on, for answers that do not fit, or for a reward that may not be run; DataError for a
    held-out row.
    """
    from rl_core.rollout.torch_engine import TorchEngine  # here: torch takes seconds to import

    tokenizer = load_tokenizer(model_dir)
    limits = Limits(max_tokens=config.data.max_prompt_tokens, vocab_size=read_vocab_size(model_dir))
    held_out = HeldOut.of(config, Encoder(tokenizer, limits), cwd or Path())
    if not held_out.prompts:
        raise ConfigError("data.validation: there is nothing to validate on (got null); set it to a file with held-out "
                          "rows, or a task")
    scorer = make_scorer(config, cwd=cwd, allowed=allowed_imports)
    settings = config.validation_engine
    engine = borrower or TorchEngine(
        model_dir, slots=config.validation.slots, threads=settings.threads, dtype=settings.dtype,
        device=settings.device, max_context=config.data.max_prompt_tokens + config.validation_tokens,
        adapter_scale=config.learner.lora.scale)
    measuring = Measuring(config, engine=engine, tokenizer=tokenizer, scorer=scorer, prompts=held_out.prompts,
                          left_out=held_out.kept.dropped)
    try:
        check_validation_inputs(config, rows=len(held_out.prompts), context=engine.context,
                                longest=max(len(prompt.token_ids_P) for prompt in held_out.prompts))
    except ConfigError:
        measuring.close()
        raise
    return measuring
