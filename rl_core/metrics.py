"""The one table of metric names, and the interval ledger behind utilisation. Importable without torch.

A name is `group/what`; no name is the beginning of another (trackers that map names to paths, and charts that group by
the part before the slash, stay right). Three writers fill it, each once per step:

* `learner`: rank 0, into `StepRecord.metrics`.
* `owner`: the process that holds the pump, into `observations/step-<k>.json` (rl_core/observations.py).
* `validator`: from the fields of `validations/step-<k>.json` of the same name behind the slash.

A value that does not exist in a step (the length of right answers when none was right) is NaN, never left out and
never 0, so that every metric has one point per step.

Trackers get at most MAX_SCALARS of a step: the `tracked` ones, and the means of the first MAX_PARTS reward parts, which
are named by the run (`part_metrics`). The others stand in the files beside them, for whoever asks.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast, get_args

from rl_core.types import Span, WorkerStatus

Weighting = Literal["tokens", "answers", "groups", "updates", "prompts", "none"]
"""What a mean averages over, and so what weights it when steps are aggregated. `none`: not a mean."""
Writer = Literal["learner", "owner", "validator"]
State = Literal["busy", "waiting", "syncing", "paused"]
STATES: tuple[State, ...] = get_args(State)
MAX_SCALARS = 60
"""Of one step in a tracker, validation included."""
MAX_SPANS = 4096
"""Intervals of one ledger that wait to be written."""
MAX_PARTS = 6
"""Reward parts that are metrics; all of them are in the record."""
MAX_SOURCES = 4
"""Data sources of a validation that are metrics, the first ones; all of them are in its record."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One scalar per step. `Metric("reward/mean", "reward", "Mean reward.", "answers", "learner")`."""

    name: str
    unit: str
    description: str
    weighting: Weighting
    writer: Writer = "learner"
    tracked: bool = True
    """False: in the record (or observation) only, since few look at it."""
    of_step: bool = True
    """Of the learner's metrics: a function of the step, so that a replay must make the same one. False: times, and what
    is divided by them."""


METRICS: tuple[Metric, ...] = (
    # What the optimizer did (algorithms.md, invariants in section 9).
    Metric("train/policy_loss", "1", "Policy loss, mean over the step's updates.", "updates"),
    Metric("train/entropy", "nats/token", "Entropy of the policy at the sampling temperature.", "tokens"),
    Metric("train/clip_low", "share", "Loss tokens that the lower bound of the loss acted on (ppo_clip: ratio below "
           "1 - clip_low, A < 0).", "tokens"),
    Metric("train/clip_high", "share", "Loss tokens that the upper bound of the loss acted on (ppo_clip: ratio above "
           "1 + clip_high, A > 0).", "tokens"),
    Metric("train/ratio_max", "1", "Largest ratio of the loss (policy over its anchor).", "none"),
    Metric("train/ratio_drift", "1", "Invariant (a): largest |policy/proximal - 1| of the first micro-batch; NaN where "
           "the proximal log-probs have no pass of their own.", "none", tracked=False),
    Metric("train/kl_proximal", "nats/token", "k3 of policy against proximal (in bypass mode behavior) over all "
           "updates.", "tokens"),
    Metric("train/grad_norm", "1", "Gradient norm before clipping, mean over the updates that were made.", "updates"),
    Metric("train/learning_rate", "1", "Learning rate of this step.", "none"),
    Metric("train/skipped_updates", "updates", "Updates skipped because loss or gradient was not finite.", "none"),
    Metric("train/loss_tokens", "tokens", "Tokens in the loss of one pass, after masks.", "none", tracked=False),
    Metric("train/mismatch_current_abs", "nats/token", "Invariant (b): mean |log proximal - log behavior|, tokens "
           "sampled by the current version.", "tokens", tracked=False),
    Metric("train/mismatch_current_k3", "nats/token", "Invariant (b): k3 of proximal against behavior, tokens sampled "
           "by the current version.", "tokens"),
    Metric("train/mismatch_stale_abs", "nats/token", "The same mean for tokens of older versions.", "tokens",
           tracked=False),
    Metric("train/mismatch_stale_k3", "nats/token", "The same k3 for tokens of older versions.", "tokens"),
    Metric("train/mismatch_swapped_abs", "nats/token", "The same mean for tokens after a swap inside their answer.",
           "tokens", tracked=False),
    Metric("train/mismatch_swapped_k3", "nats/token", "The same k3 for tokens after a swap inside their answer.",
           "tokens", tracked=False),
    Metric("train/mismatch_bound", "nats/token", "Of invariant (b): 1e-3 in float32, else 4 times the mean of the "
           "first steps, at most 0.05.", "none", tracked=False),
    Metric("train/mismatch_alarm", "0 or 1", "Invariant (b) is over its bound.", "none", tracked=False),
    Metric("train/drift_bound", "1", "Of invariant (a): 1e-6 in float32, 0.05 in bfloat16.", "none", tracked=False),
    Metric("train/drift_alarm", "0 or 1", "Invariant (a) is over its bound.", "none", tracked=False),
    Metric("train/loglinear_error", "nats/token", "Mean |log-linear proximal - recomputed|, where both are known: "
           "before the first update; NaN where the proximal is recomputed.", "tokens", tracked=False),
    Metric("train/measured_tokens", "share", "Loss tokens that the mismatch and weight metrics are of: all that have a "
           "log-prob, but in bypass mode and with a log-linear proximal those of the first minibatch.", "tokens",
           tracked=False),
    # Weights proximal/behavior of the level that learner.correction.weights applies (the answer's at all its tokens),
    # or of its function; without weights the ratios of tokens. At every loss token, not cut or normalised yet.
    Metric("train/effective_samples", "share", "Effective sample size of the weights proximal/behavior of the applied "
           "level, over loss tokens: 1 / mean((w / mean w)^2).", "tokens"),
    Metric("train/weight_max", "1", "Largest weight proximal/behavior of the applied level, before truncation.",
           "none", tracked=False),
    Metric("train/weight_truncated", "share", "Loss tokens whose weight is above the bound of its rule: cut at cap "
           "(truncate), 0 (icepop).", "tokens", tracked=False),
    Metric("train/weight_mean", "1", "Mean weight proximal/behavior of the applied level over loss tokens, before "
           "truncation.", "tokens", tracked=False),
    Metric("train/weight_min", "1", "Smallest weight proximal/behavior of the applied level.", "none",
           tracked=False),
    Metric("train/weight_std", "1", "Standard deviation of those weights over loss tokens.", "none", tracked=False),
    Metric("train/weight_under", "share", "Loss tokens whose weight is below icepop_low, of which nothing is left.",
           "tokens", tracked=False),
    Metric("train/chi2_token", "1", "Mean of (proximal/behavior)^2 of single tokens, whatever weights there are, minus "
           "1.", "tokens", tracked=False),
    Metric("train/chi2_answer", "1", "The same of whole answers: mean of their squared ratio, minus 1.", "answers",
           tracked=False),
    Metric("train/behavior_kl", "nats/token", "k1 of behavior against proximal: mean log behavior - log proximal.",
           "tokens", tracked=False),
    Metric("train/behavior_k3", "nats/token", "k3 of behavior against proximal, all tokens.", "tokens", tracked=False),
    Metric("train/learner_perplexity", "1", "exp of minus the mean proximal log-prob.", "none", tracked=False),
    Metric("train/behavior_perplexity", "1", "exp of minus the mean behavior log-prob.", "none", tracked=False),
    Metric("train/perplexity_gap", "nats/token", "Log of the learner's perplexity over the behavior policy's.",
           "tokens", tracked=False),
    Metric("train/rejected_tokens", "share", "Loss tokens that a rejection rule left without loss; NaN without rules.",
           "tokens", tracked=False),
    Metric("train/rejected_answers", "share", "Answers of which no token passed the rejection rules; NaN without "
           "rules.", "answers", tracked=False),
    Metric("train/zero_advantage", "share", "Loss tokens with advantage 0: groups without spread, groups of one.",
           "tokens", tracked=False),
    Metric("train/impossible_tokens", "tokens", "Loss tokens with a log-prob of minus infinity, over all updates: they "
           "have no loss.", "none", tracked=False),
    # Models beside the policy (algorithms.md 13).
    Metric("train/kl_reference", "nats/token", "KL against the reference policy by learner.kl.estimator: in the reward "
           "mean over answers of their means, in the loss mean over all updates; NaN without.", "tokens",
           tracked=False),
    Metric("train/kl_beta", "1", "Coefficient of that KL in this step; NaN without.", "none", tracked=False),
    Metric("train/reference_step", "steps", "Training steps behind the weights of the reference policy; NaN without.",
           "none", tracked=False),
    Metric("train/distillation", "nats/token", "Divergence from the teacher over all updates: log policy - log teacher "
           "as an advantage, else the loss without its coefficient; NaN without.", "tokens", tracked=False),
    Metric("train/impossible_to_others", "tokens", "Loss tokens to which reference or teacher gives log-prob minus "
           "infinity, over all updates: no KL there; NaN without either.", "none", tracked=False),
    Metric("critic/value_loss", "reward^2", "Value loss, mean over the critic's updates; NaN without a critic, as all "
           "of these.", "updates", tracked=False),
    Metric("critic/grad_norm", "1", "Its gradient norm before clipping, mean over the updates that were made.",
           "updates", tracked=False),
    Metric("critic/value_mean", "reward", "Mean value at the start of the step.", "tokens", tracked=False),
    Metric("critic/return_mean", "reward", "Mean return that the values learn.", "tokens", tracked=False),
    Metric("critic/explained_variance", "share", "1 - Var(return - value) / Var(return) at the start of the step; NaN "
           "where all returns are equal.", "none", tracked=False),
    Metric("critic/clipped", "share", "Loss tokens whose value has left its place by more than learner.critic.clip, "
           "over all updates.", "tokens", tracked=False),
    Metric("critic/skipped_updates", "updates", "The critic's updates skipped because loss or gradient was not finite.",
           "none", tracked=False),
    # What was trained on.
    Metric("reward/mean", "reward", "Mean reward of the claim's answers.", "answers"),
    Metric("reward/std", "reward", "Standard deviation of the claim's rewards.", "answers"),
    Metric("reward/sampled", "reward", "Mean reward of all answers that landed since the step before, trained or not; "
           "NaN where none did.", "answers", "owner"),
    Metric("reward/greedy", "reward", "Mean reward of the greedy answers that the claim's groups are compared with "
           "(remax); NaN without.", "groups", tracked=False),
    Metric("reward/correct", "share", "Right answers: what `correct` says, else a reward that is 0 or 1 for all "
           "answers of its data source; NaN where that is not known of a data source (docs/validation.md 1).",
           "answers"),
    Metric("reward/all_equal", "share", "Groups of several answers whose rewards are all equal, as scored, whatever is "
           "known of what is right: no gradient under estimators that compare the rewards of a group.", "groups"),
    Metric("reward/no_spread_right", "share", "Groups of several answers of one reward that are all known to be right.",
           "groups"),
    Metric("reward/no_spread_wrong", "share", "Groups of several answers of one reward of which one is known to be "
           "wrong. Those of which it is not known are in all_equal only.", "groups"),
    Metric("rollout/length_mean", "tokens", "Mean answer length of the claim.", "answers"),
    Metric("rollout/length_p95", "tokens", "95th percentile of the answer length.", "answers"),
    Metric("rollout/length_right", "tokens", "Mean length of answers that are known to be right.", "answers"),
    Metric("rollout/length_wrong", "tokens", "Mean length of answers that are known to be wrong.", "answers"),
    Metric("rollout/right_length_p95", "tokens", "95th percentile of the length of those right ones.", "answers"),
    Metric("rollout/wrong_length_p95", "tokens", "95th percentile of the length of those wrong ones.", "answers"),
    Metric("rollout/truncated", "share", "Answers cut at the limit.", "answers"),
    Metric("rollout/empty", "share", "Answers that ended with their first token: nothing but an end token or a stop "
           "string.", "answers", tracked=False),
    Metric("rollout/partial", "share", "Groups with fewer answers than asked for.", "groups", tracked=False),
    Metric("rollout/groups_of_one", "share", "Groups that landed with one answer: nothing in them to compare it with "
           "(learner.advantage.group_of_one).", "groups", tracked=False),
    Metric("rollout/trajectories", "1", "Trajectories of a session; 1 where no session has several.", "none",
           tracked=False),
    # How old it was (docs/staleness.md).
    Metric("staleness/mean", "publications", "Mean age of the claim's groups.", "groups"),
    Metric("staleness/p95", "publications", "95th percentile of the age.", "groups"),
    Metric("staleness/max", "publications", "Largest age.", "none"),
    Metric("staleness/update_lag_mean", "updates", "Optimizer updates between the weights that sampled a token and "
           "those at the start of the step.", "tokens"),
    Metric("staleness/update_lag_max", "updates", "Largest update lag.", "none", tracked=False),
    Metric("staleness/mixed", "share", "Answers sampled by more than one version.", "answers"),
    Metric("staleness/masked_tokens", "tokens", "Tokens that left the loss by age.", "none", tracked=False),
    Metric("staleness/dropped_groups", "groups", "Groups dropped by this claim.", "none", tracked=False),
    Metric("staleness/dropped_tokens", "tokens", "Tokens of those groups.", "none"),
    # Where the time went. The four shares of one side sum to 1.
    Metric("utilization/learner_busy", "share", "Learner: computing, since the step before.", "none", of_step=False),
    Metric("utilization/learner_waiting", "share", "Learner: waiting for experience.", "none", of_step=False),
    Metric("utilization/learner_syncing", "share", "Learner: publishing weights.", "none", tracked=False,
           of_step=False),
    Metric("utilization/learner_paused", "share", "Learner: checkpoints and the like.", "none", tracked=False,
           of_step=False),
    Metric("utilization/rollout_busy", "share", "Rollout workers: generating, since the step before.", "none", "owner"),
    Metric("utilization/rollout_waiting", "share", "Rollout workers: no lease.", "none", "owner"),
    Metric("utilization/rollout_syncing", "share", "Rollout workers: swapping weights.", "none", "owner",
           tracked=False),
    Metric("utilization/rollout_paused", "share", "Rollout workers: held back.", "none", "owner", tracked=False),
    Metric("weights/changed", "share", "Values of the published weights that differ from the version before; NaN "
           "where nothing was published.", "none", tracked=False),
    Metric("weights/served_lag", "publications", "Newest published idx minus the lowest that a worker serves.", "none",
           "owner"),
    Metric("rollout/tokens_per_s", "tokens/s", "Tokens generated by all workers.", "none", "owner"),
    Metric("rollout/wasted", "share", "Generated tokens that will never land, those of greedy baselines among them.",
           "none", "owner"),
    Metric("rollout/greedy", "share", "Generated tokens that are those of greedy baselines (remax).", "none", "owner",
           tracked=False),
    Metric("rollout/filtered", "groups", "Groups that the group filter left out, found since the step before.", "none",
           "owner", tracked=False),
    Metric("rollout/in_flight", "groups", "Groups leased and not landed (F).", "none", "owner", tracked=False),
    # Of servers that generate (docs/sglang.md), since the step before, over all of them; NaN for embedded engines.
    Metric("servers/tokens_per_s", "tokens/s", "Tokens sampled, as they arrived.", "none", "owner", tracked=False),
    Metric("servers/cache_hit", "share", "Tokens of contexts found in the prefix cache.", "none", "owner",
           tracked=False),
    Metric("servers/pause_s", "s", "Generation of one server stood still for one swap; NaN without one.", "none",
           "owner", tracked=False),
    Metric("servers/reread_tokens", "tokens", "Context read again because of swaps and deaths.", "none", "owner",
           tracked=False),
    Metric("servers/thrown_tokens", "tokens", "Tokens that arrived and were dropped.", "none", "owner", tracked=False),
    Metric("servers/running", "requests", "Requests that run now.", "none", "owner", tracked=False),
    Metric("servers/queued", "requests", "Requests that wait in a server now.", "none", "owner", tracked=False),
    Metric("servers/restarts", "restarts", "Servers that died or were replaced.", "none", "owner", tracked=False),
    Metric("servers/retries", "requests", "Requests sent again after a failure.", "none", "owner", tracked=False),
    Metric("system/step_s", "s", "One training step in the learner, from the claim to the record.", "none",
           of_step=False),
    Metric("system/waiting_s", "s", "Learner: waiting for experience, since the step before.", "none",
           of_step=False),
    Metric("system/proximal_s", "s", "Pass for the proximal log-probs; 0 where none is made.", "none", tracked=False,
           of_step=False),
    Metric("system/roles_s", "s", "Passes through reference, critic and teacher before the first update.", "none",
           tracked=False, of_step=False),
    Metric("system/update_s", "s", "Forward, backward and optimizer of all updates, those of a critic included.",
           "none", of_step=False),
    Metric("system/publish_s", "s", "Digest of the new weights and their publication.", "none",
           of_step=False),
    Metric("system/swap_s", "s", "Weight swaps of a rollout worker since the step before, mean over workers.", "none",
           "owner"),
    Metric("system/samples_per_s", "answers/s", "Answers trained, over the time since the step before.", "none",
           of_step=False),
    Metric("system/tokens_per_s", "tokens/s", "Answer tokens trained, over the same time.", "none", of_step=False),
    Metric("system/mfu", "share", "Model FLOP/s of proximal pass and updates, of the peak of all ranks (frames.md "
           "section 4).", "none", of_step=False),
    Metric("validation/greedy_accuracy", "share", "Right greedy answers on held-out prompts.", "prompts", "validator"),
    Metric("validation/sampled_accuracy", "share", "Right sampled answers (mean@n).", "prompts", "validator"),
    Metric("validation/pass_at_k", "share", "Prompts with a right answer among k sampled ones, for the largest "
           "validation.k.", "prompts", "validator"),
    Metric("validation/maj_at_n", "share", "Right majorities of n sampled answers.", "prompts", "validator",
           tracked=False),
    Metric("validation/mean_length", "tokens", "Mean length of greedy answers.", "prompts", "validator",
           tracked=False),
    Metric("validation/seconds", "s", "Wall time of the validation.", "none", "validator", tracked=False),
)
BY_NAME: dict[str, Metric] = {metric.name: metric for metric in METRICS}
PART, PART_END = "reward/part_", "_mean"
OWN, MAX_OWN = "own/", 5
"""Beginning of the names of a user's metrics (docs/hooks.md), and how many there are at most beside `own/failed`. They
take the places of reward parts in trackers."""
SOURCE, SOURCE_END = "validation/source_", "_accuracy"


def names(writer: Writer) -> tuple[str, ...]:
    """The names that this writer fills, in table order."""
    return tuple(metric.name for metric in METRICS if metric.writer == writer)


def tracked_names(writer: Writer) -> tuple[str, ...]:
    """Those of `names(writer)` that go to trackers."""
    return tuple(metric.name for metric in METRICS if metric.writer == writer and metric.tracked)


def is_tracked(name: str) -> bool:
    """Whether a metric of a record or an observation goes to trackers; a name of another version does not."""
    return is_part(name) or is_source(name) or (name in BY_NAME and BY_NAME[name].tracked)


def is_of_step(name: str) -> bool:
    """Whether a metric of a record is a function of the training step; one of another version is not known to be."""
    return is_part(name) or (name in BY_NAME and BY_NAME[name].writer == "learner" and BY_NAME[name].of_step)


def is_part(name: str) -> bool:
    """Whether this metric is named by the run: of a reward part, or one of a user's own."""
    return name.startswith(OWN) or (name.startswith(PART) and name.endswith(PART_END))


def is_source(name: str) -> bool:
    """Whether this is the metric of a validation's data source."""
    return name.startswith(SOURCE) and name.endswith(SOURCE_END)


def part_metrics(parts: Mapping[str, float], room: int = MAX_PARTS) -> dict[str, float]:
    """Mean reward parts as the learner's metrics: the first `room` by name.

    `part_metrics({"format": 0.5, "is_short": 1.0})` -> `{"reward/part_format_mean": 0.5,
    "reward/part_is-short_mean": 1.0}`.
    """
    return {name: parts[part] for part, name in _named(sorted(parts)[:room], PART, PART_END).items()}


def _named(given: Iterable[str], begin: str, end: str) -> dict[str, str]:
    """A metric's name for each name that people gave. Whatever is no letter, digit or point becomes `-`: no `_` is left
    in it, so no metric's name begins another's. Those that are the same then are numbered."""
    found: dict[str, str] = {}
    for each in given:
        plain = re.sub(r"[^A-Za-z0-9.]", "-", each)[:100]
        name, again = begin + plain + end, 1
        while name in found.values():
            again += 1
            name = f"{begin}{plain}-{again}{end}"
        found[each] = name
    return found


def check(metrics: Mapping[str, float], writer: Writer) -> None:
    """Raises ValueError if these are not exactly the writer's names (unknown and missing ones are listed).

    The learner may name reward parts beside them.
    """
    expected = set(names(writer))
    found = {name for name in metrics if not (writer == "learner" and is_part(name))}
    unknown, missing = sorted(found - expected), sorted(expected - found)
    if unknown or missing:
        raise ValueError(f"metrics of the {writer}: unknown {unknown}, missing {missing}; see rl_core/metrics.py")


def validation_metrics(record: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of a validation record; a field that is absent or null is NaN, of several k the largest counts."""
    values = {name: record.get(name.split("/")[1]) for name in names("validator")}
    return {name: _number(value) for name, value in values.items()} | source_metrics(record.get("by_source", {}))


def source_metrics(by_source: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Greedy accuracy of the first MAX_SOURCES data sources of a validation; of one alone none, since it is the total.

    `source_metrics({"gsm8k": {"greedy_accuracy": 0.5}, "a/b_c": {...}})` -> `{"validation/source_gsm8k_accuracy": 0.5,
    "validation/source_a-b-c_accuracy": ...}`.
    """
    if len(by_source) < 2:
        return {}
    chosen = _named(list(by_source)[:MAX_SOURCES], SOURCE, SOURCE_END)
    return {name: _number(by_source[source].get("greedy_accuracy")) for source, name in chosen.items()}


def _number(value: Any) -> float:
    if isinstance(value, Mapping):  # by k, ascending
        value = list(cast("Mapping[str, Any]", value).values())[-1]
    return math.nan if value is None else float(value)


def weighted_mean(values: Iterable[float], weights: Iterable[float]) -> float:
    """Mean by weight over the finite values; NaN where no weight is left."""
    pairs = [(v, w) for v, w in zip(values, weights, strict=True) if math.isfinite(v) and w > 0]
    total = sum(w for _, w in pairs)
    return sum(v * w for v, w in pairs) / total if total > 0 else math.nan


class IntervalLedger:
    """What one side did with its time: at every moment it is in exactly one state, so the seconds sum to its age.

    Thread-safe. Time is counted in whole nanoseconds of the monotonic clock.

        ledger = IntervalLedger()            # waiting, from now on
        with ledger.during("busy"):
            ...
        ledger.seconds()                     # {"busy": 1.5, "waiting": 0.25, "syncing": 0.0, "paused": 0.0}
        ledger.take_spans()                  # the same as intervals, for the timeline
    """

    def __init__(self, state: State = "waiting", clock_ns: Callable[[], int] = time.monotonic_ns,
                 wall_ns: Callable[[], int] = time.time_ns) -> None:
        self._clock_ns = clock_ns
        self._lock = threading.Lock()
        self._spent: dict[State, int] = dict.fromkeys(STATES, 0)
        self._state: State = state
        self._since = clock_ns()
        self._epoch_ns = wall_ns() - self._since
        self._of: int | None = None
        self._begun = self._since
        self._spans: deque[Span] = deque(maxlen=MAX_SPANS)

    @property
    def state(self) -> State:
        return self._state

    def enter(self, state: State, of: int | None = None) -> State:
        """Be in `state` from now on; returns the state before. `of`: what it is about (Span.of)."""
        with self._lock:
            before, now = self._state, self._clock_ns()
            self._spent[before] += now - self._since
            if (state, of) != (before, self._of):
                self._end_span(now)
                self._of = of
            self._state, self._since = state, now
            return before

    @contextmanager
    def during(self, state: State, of: int | None = None) -> Generator[None]:
        """`state` inside the block, then again what it was before."""
        of_before = self._of
        before = self.enter(state, of)
        try:
            yield
        finally:
            self.enter(before, of_before)

    def wall_us(self, clock_ns: int) -> int:
        """A moment of the monotonic clock as microseconds since 1970, by what the wall clock said when the ledger was
        made: spans of one ledger never run backwards."""
        return (clock_ns + self._epoch_ns) // 1000

    def now_us(self) -> int:
        """This moment, by `wall_us`."""
        return self.wall_us(self._clock_ns())

    def spans(self) -> list[Span]:
        """The intervals since the last `take_spans`, in order and without holes; the one that runs ends now. The oldest
        are let go where MAX_SPANS are waiting."""
        with self._lock:
            return [*self._spans, self._span(self._clock_ns())]

    def take_spans(self) -> list[Span]:
        """`spans()`, each of them once: the next call goes on where this one ended."""
        with self._lock:
            self._end_span(self._clock_ns())
            taken = list(self._spans)
            self._spans.clear()
            return taken

    def _end_span(self, now: int) -> None:
        if now > self._begun:
            self._spans.append(self._span(now))
        self._begun = now

    def _span(self, now: int) -> Span:
        return Span(self._state, self.wall_us(self._begun), self.wall_us(now), self._of)

    def seconds(self) -> dict[str, float]:
        """Seconds by state since the ledger was made, the running interval included."""
        with self._lock:
            spent = dict(self._spent)
            spent[self._state] += self._clock_ns() - self._since
        return {state: spent[state] / 1e9 for state in STATES}


def utilization(side: Literal["learner", "rollout"], before: Mapping[str, float],
                now: Mapping[str, float]) -> dict[str, float]:
    """Shares of the time between two readings of a ledger, by metric name; they sum to 1 (NaN where no time passed)."""
    spent = {state: max(0.0, now.get(state, 0.0) - before.get(state, 0.0)) for state in STATES}
    total = sum(spent.values())
    return {f"utilization/{side}_{state}": spent[state] / total if total > 0 else math.nan for state in STATES}


@dataclass(frozen=True, slots=True)
class PoolReading:
    """The counters of all rollout workers at one moment, by stream (one incarnation of one worker)."""

    at_s: float
    """Monotonic seconds."""
    workers: dict[str, WorkerStatus]
    since_s: float | None = None
    """Moment of the reading before; None: the workers' start."""
    before: dict[str, WorkerStatus] = field(default_factory=dict[str, WorkerStatus])
    """Their counters at that moment."""


def read_pool(statuses: Iterable[WorkerStatus], at_s: float, before: PoolReading | None = None) -> PoolReading:
    """One reading of the workers' statuses, taken at `at_s` (monotonic seconds), behind the reading `before`.

    A worker speaks when something happened, and short steps may end in between. Where none has spoken since `before`,
    the interval stays that one's: the step shows the newest that is known, and the next reading counts from there.
    """
    workers = {status.stream: status for status in statuses}
    if before is None:
        return PoolReading(at_s, workers)
    if {stream: status.seconds for stream, status in workers.items()} == \
            {stream: status.seconds for stream, status in before.workers.items()}:
        return replace(before, workers=workers)
    return PoolReading(at_s, workers, before.at_s, before.workers)


def pool_metrics(now: PoolReading, *, in_flight: int, published_idx: int, sampled: float = math.nan,
                 filtered: int = 0) -> dict[str, float]:
    """The owner's metrics of one step from a reading and the one before it: exactly `names("owner")`.

    A worker that restarted in between counts from the start of its new incarnation; the first reading counts everything
    from the workers' start. `in_flight` is F of the admission formula (experience-store.md 3.7), `sampled` the mean
    reward of what has landed since, `filtered` the groups that were left out since.
    """
    seconds_before: dict[str, float] = {}
    seconds_now: dict[str, float] = {}
    generated = wasted = greedy = 0
    for stream, status in now.workers.items():
        last = now.before.get(stream)
        generated += status.tokens_generated - (last.tokens_generated if last else 0)
        wasted += status.tokens_wasted - (last.tokens_wasted if last else 0)
        greedy += status.tokens_greedy - (last.tokens_greedy if last else 0)
        for state in STATES:
            seconds_now[state] = seconds_now.get(state, 0.0) + status.seconds.get(state, 0.0)
            seconds_before[state] = seconds_before.get(state, 0.0) + (last.seconds.get(state, 0.0) if last else 0.0)
    age = max((sum(status.seconds.values()) for status in now.workers.values()), default=0.0)
    elapsed = age if now.since_s is None else now.at_s - now.since_s
    served = [status.served.idx for status in now.workers.values() if status.served]
    swaps_s = max(0.0, seconds_now.get("syncing", 0.0) - seconds_before.get("syncing", 0.0))
    return utilization("rollout", seconds_before, seconds_now) | {
        "reward/sampled": sampled, "system/swap_s": swaps_s / len(now.workers) if now.workers else math.nan,
        "weights/served_lag": float(published_idx - min(served)) if served else math.nan,
        "rollout/tokens_per_s": generated / elapsed if elapsed > 0 else math.nan,
        "rollout/wasted": wasted / generated if generated > 0 else math.nan,
        "rollout/greedy": greedy / generated if generated > 0 else math.nan,
        "rollout/filtered": float(filtered), "rollout/in_flight": float(in_flight),
    } | _server_metrics(now, elapsed)


def _server_metrics(now: PoolReading, elapsed: float) -> dict[str, float]:
    """Sums over the servers of all workers; a counter that is no moment's reading counts since the reading before."""
    if not any(status.servers for status in now.workers.values()):
        return {name: math.nan for name in names("owner") if name.startswith("servers/")}
    since: dict[str, float] = {}
    newest: dict[str, float] = {}
    for stream, status in now.workers.items():
        last = now.before.get(stream)
        for server, counters in status.servers.items():
            before = last.servers.get(server, {}) if last else {}
            for name, value in counters.items():
                newest[name] = newest.get(name, 0.0) + value
                since[name] = since.get(name, 0.0) + value - before.get(name, 0.0)

    def share(part: str, whole: str) -> float:
        return since[part] / since[whole] if since[whole] > 0 else math.nan

    return {"servers/tokens_per_s": since["tokens"] / elapsed if elapsed > 0 else math.nan,
            "servers/cache_hit": share("cached_tokens", "context_tokens"),
            "servers/pause_s": share("paused_s", "swaps"),
            **{f"servers/{name}": since[name] for name in ("reread_tokens", "thrown_tokens", "restarts", "retries")},
            **{f"servers/{name}": newest[name] for name in ("running", "queued")}}
