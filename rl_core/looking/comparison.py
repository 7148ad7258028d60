"""Two runs compared, from their directories alone: differences with 95 % intervals, and what keeps them from being read
as differences of the training (docs/frames.md 7).

Functions of files; nothing is written. Both runs may go on meanwhile: what is compared is what is recorded so far.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import numpy as np

from rl_core.config import Config
from rl_core.errors import ConfigError
from rl_core.estimates import Estimate, paired_difference
from rl_core.gaps import Gaps
from rl_core.history import History, Validation, read_history
from rl_core.looking.difference_text import NOISE, DifferenceText, say_difference
from rl_core.plan import differing
from rl_core.revisions import config_of, current_revision
from rl_core.run_dir import RunDir, read_json
from rl_core.run_numbers import (
    LAST_STEPS,
    NAN,
    UNKNOWN,
    difference,
    mean_of_steps,
    rate_of_steps,
    ratio_of_steps,
)

Better = Literal["more", "less", "neither"]


@dataclass(frozen=True, slots=True)
class Difference:
    """One number of two runs.

    `Difference("held_out_accuracy", 0.76, 0.96, 0.2, 0.0569, 0.3404, "share", "more")`: better, and not by chance.
    """

    name: str
    baseline: float
    value: float
    difference: float
    """value - baseline. This and the others are NaN where nothing is recorded."""
    low: float
    high: float
    """95 % interval of the difference; NaN where no spread is known."""
    unit: str
    better: Better
    """Whether more of it is better."""

    @property
    def certain(self) -> bool:
        """Whether the interval leaves 0 out."""
        return self.low > NOISE or self.high < -NOISE

    @property
    def said(self) -> DifferenceText:
        """Difference and interval in words, the same on every page and in every report."""
        return say_difference(self.difference, self.low, self.high)

    @property
    def verdict(self) -> str:
        """`better` or `worse`, and nothing where that is not certain, or neither is."""
        if not self.certain or self.better == "neither":
            return ""
        return "better" if (self.difference > 0) == (self.better == "more") else "worse"


@dataclass(frozen=True, slots=True)
class _Told:
    """One number of a run, as two runs are compared by it."""

    name: str
    unit: str
    better: Better
    estimate: Estimate


def compare(baseline: RunDir, run: RunDir) -> tuple[Difference, ...]:
    """`run` against `baseline`: held-out accuracy of the last validations, throughput, staleness, waste, reward.

    Held-out accuracy is that of greedy answers, and `held_out_mean_at_n` that of sampled ones. Where both validations
    asked the same prompts it is paired by prompt (`paired_difference`), over those of which both know it; else the two
    intervals are put together as independent ones (`run_numbers.difference`). The other intervals come from the spread
    over steps (docs/frames.md 7). Always the same names in the same order. Raises ConfigError for a run and itself, or
    a directory without a run.
    """
    check_comparable([baseline, run])
    before, now = _read(baseline), _read(run)
    return (*_held_out(before.validations, now.validations),
            *(_independent(base, mine) for base, mine in zip(_of_steps(before), _of_steps(now), strict=True)))


def alone(run: RunDir) -> tuple[Difference, ...]:
    """The numbers of `compare` for a run that there is nothing to compare with: baseline and difference are NaN."""
    now = _read(run)
    return (*_held_out((), now.validations),
            *(_independent(replace(mine, estimate=UNKNOWN), mine) for mine in _of_steps(now)))


def check_comparable(runs: Sequence[RunDir]) -> None:
    """Raises ConfigError for fewer than two runs, one that is not there, and one that is given twice."""
    if len(runs) < 2:
        raise ConfigError(f"compare: two or more runs are compared (got {len(runs)}); give their run keys, the one to "
                          "compare with first")
    seen: dict[Any, RunDir] = {}
    for run in runs:
        if not run.run_json.exists():
            raise ConfigError(f"compare: there is no run {run.root.name} under {run.root.parent}; its directories "
                              "are the runs")
        if (place := run.root.resolve()) in seen:
            raise ConfigError(f"compare: {run.root.name} is given twice; a run does not differ from itself, give each "
                              "once")
        seen[place] = run


def caveats(baseline: RunDir, run: RunDir) -> tuple[str, ...]:
    """What one must know to read `compare(baseline, run)`: a sentence for each thing that is absent, or that differs
    beside the training itself (data, model, rewards, held-out prompts, hardware)."""
    names = baseline.root.name, run.root.name
    before, now = _read(baseline), _read(run)
    found = [*_absent(names[0], before), *_absent(names[1], now)]
    configs = _config(baseline), _config(run)
    found += _different_inputs(names, baseline, run)
    found += _different_measures(names, *configs)
    found += _different_prompts(names, before.validations, now.validations)
    return tuple(found + _different_machines(names, before, now))


def changed_settings(baseline: RunDir, run: RunDir) -> dict[str, tuple[Any, Any]]:
    """Identity and training settings in which the runs' current revisions differ: `{"learner.lr": (1e-4, 1e-2)}`."""
    before, now = _config(baseline), _config(run)
    return differing(before, now, "identity") | differing(before, now, "training")


# -- numbers


def _read(run: RunDir) -> History:
    """What can be read; a file that is broken is none."""
    return read_history(run, gaps=Gaps())


def _config(run: RunDir) -> Config:
    return config_of(run, current_revision(run))


def _of_steps(history: History) -> tuple[_Told, ...]:
    column = history.metrics
    seconds_K = 1 / np.where(column["system/samples_per_s"] > 0, column["system/samples_per_s"], NAN)
    return (
        _Told("samples_per_s", "answers/s", "more", rate_of_steps(column["system/samples_per_s"])),
        _Told("tokens_per_s", "tokens/s", "more", ratio_of_steps(column["system/tokens_per_s"], seconds_K)),
        _Told("staleness_mean", "publications", "less", mean_of_steps(column["staleness/mean"])),
        _Told("update_lag_mean", "updates", "less",
              ratio_of_steps(column["staleness/update_lag_mean"], column["train/loss_tokens"])),
        _Told("wasted_share", "share", "less",
              ratio_of_steps(column["rollout/wasted"], column["rollout/tokens_per_s"])),
        _Told("reward_last", "reward", "more", mean_of_steps(column["reward/mean"][-LAST_STEPS:])),
    )


def _independent(base: _Told, mine: _Told) -> Difference:
    return _difference(base, mine, difference(mine.estimate, base.estimate))


def _difference(base: _Told, mine: _Told, apart: Estimate) -> Difference:
    low, high = (apart.lo, apart.hi) if math.isfinite(apart.lo) and math.isfinite(apart.hi) else (NAN, NAN)
    return Difference(base.name, base.estimate.value, mine.estimate.value, apart.value, low, high, base.unit,
                      base.better)


def _held_out(before: Sequence[Validation], now: Sequence[Validation]) -> tuple[Difference, Difference]:
    def told(name: str, estimate: Estimate) -> _Told:
        return _Told(name, "share", "more", estimate)

    def estimates(validations: Sequence[Validation]) -> tuple[Estimate, Estimate]:
        if not validations:
            return UNKNOWN, UNKNOWN
        record = validations[-1].record
        lo, hi = record.get("mean_at_n_interval") or (NAN, NAN)
        mean = record.get("mean_at_n")
        return validations[-1].greedy, UNKNOWN if mean is None else Estimate(mean, lo, hi)

    found: list[Difference] = []
    for name, mode, base, mine in zip(("held_out_accuracy", "held_out_mean_at_n"), ("greedy", "sampled"),
                                      estimates(before), estimates(now), strict=True):
        pairs = _pairs(before[-1].record, now[-1].record, mode) if before and now else None
        if pairs is None or (apart := paired_difference(pairs.mine, pairs.base, pairs.most)) is None:
            found.append(_independent(told(name, base), told(name, mine)))
        else:
            ends = [Estimate(float(np.mean(values)), NAN, NAN) for values in (pairs.base, pairs.mine)]
            found.append(_difference(told(name, ends[0]), told(name, ends[1]), apart))
    return found[0], found[1]


@dataclass(frozen=True, slots=True)
class _Pairs:
    """How right two sets of weights are, prompt by prompt."""

    mine: list[float]
    base: list[float]
    most: float
    """Answers behind one of them at most."""


def _pairs(before: Any, now: Any, mode: str) -> _Pairs | None:
    """The prompts of which both records know it; None where they asked different ones, or do not say."""
    one, other = _by_prompt(now), _by_prompt(before)
    if not one or one.get("digest") != other.get("digest") or mode not in one or mode not in other:
        return None
    both = [(a, b) for a, b in zip(one[mode], other[mode], strict=True) if a is not None and b is not None]
    answers = 1 if mode == "greedy" else min(int(record["sampling"]["n"]) for record in (before, now))
    return _Pairs([a for a, _ in both], [b for _, b in both], len(both) * answers)


def _by_prompt(record: Any) -> dict[str, Any]:
    return cast(dict[str, Any], record.get("by_prompt") or {})


# -- caveats


def _absent(key: str, history: History) -> list[str]:
    found: list[str] = []
    if not history.records:
        found.append(f"{key} has no trained step yet: its throughput, staleness and reward are unknown")
    if not history.validations:
        found.append(f"{key} has no validation: its held-out accuracy is unknown (data.validation, validation.every)")
    elif math.isnan(history.validations[-1].greedy_accuracy):
        found.append(f"{key}: its reward does not say what is right (`correct`): its held-out accuracy is unknown")
    return found


def _different_inputs(names: tuple[str, str], baseline: RunDir, run: RunDir) -> list[str]:
    before, now = _digests(baseline), _digests(run)
    changed = [name.replace("_", " ") for name in before if name in now and before[name] != now[name]]
    said = f"{names[0]} and {names[1]} began with different inputs (by digest): {', '.join(changed)}"
    return [said] if changed else []


def _digests(run: RunDir) -> dict[str, str]:
    try:
        return cast(dict[str, str], read_json(run.inputs)["digests"])
    except FileNotFoundError:
        return {}


def _different_measures(names: tuple[str, str], before: Config, now: Config) -> list[str]:
    found: list[str] = []
    if before.reward != now.reward:
        found.append(f"{names[0]} and {names[1]} are scored by different rewards (`reward`): reward_last and held-out "
                     "accuracy are of different things")
    if before.validation_tokens != now.validation_tokens:
        found.append(f"held-out answers of {names[0]} may have {before.validation_tokens} tokens, those of {names[1]} "
                     f"{now.validation_tokens} (validation.max_new_tokens)")
    return found


def _different_prompts(names: tuple[str, str], before: Sequence[Validation], now: Sequence[Validation]) -> list[str]:
    if not before or not now:
        return []
    one, other = (_by_prompt(each[-1].record) for each in (before, now))
    if not one or not other:
        silent = " and ".join(name for name, each in zip(names, (one, other), strict=True) if not each)
        return [f"the validations of {silent} do not say which prompt was answered right: the interval of held-out "
                "accuracy takes both as independent, and is wider than need be on the same prompts"]
    if one["digest"] != other["digest"]:
        return [f"{names[0]} and {names[1]} were validated on different prompts (data.validation, "
                "data.validation_size, or the tokenizer): their held-out accuracies are of different questions"]
    return []


def _different_machines(names: tuple[str, str], before: History, now: History) -> list[str]:
    if not before.records or not now.records:
        return []
    envs = before.records[-1].env, now.records[-1].env
    changed = [f"{name} {envs[0][name]} | {envs[1][name]}" for name in ("device", "cpu", "ranks", "threads")
               if name in envs[0] and name in envs[1] and envs[0][name] != envs[1][name]]
    return [f"{names[0]} and {names[1]} were trained on different machines ({'; '.join(changed)}): their throughput is "
            "not that of the settings alone"] if changed else []
