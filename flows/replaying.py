"""`headway replay`: recorded steps trained again, offline, and compared with their records."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from flows.command import FAILED, failed, guarded, hush
from flows.console import Console
from rl_core.errors import ConfigError, ReplayUnavailable, RunEnded
from rl_core.plan import parse_overrides

SHOWN = 12
"""Lines of differing metrics, of one step."""


def replay_run(run_key: str, *, steps: Sequence[int], ranges: Sequence[str], against: str, listed: bool,
               overrides: Sequence[str], as_json: bool) -> int:
    """Run `headway replay`; returns its exit code: 0 the steps are what was recorded, 1 one is not, 2 refused."""
    hush()
    console = Console()

    def work() -> int:
        if against != "recorded":
            raise ConfigError(f"--against {against!r}: there is `recorded`, the record of the step")
        chosen = steps_of(steps, ranges)
        if bool(chosen) == listed:
            raise ConfigError("--step: name the steps to replay, as in --step 17 or --steps 10:60, or ask by --list "
                              "which can be" if not chosen else "--list: asks about all steps; give no --step with it")
        if listed and overrides:
            raise ConfigError("--set: is for steps; give --step with it")
        changes = parse_overrides(overrides)
        try:
            if listed:
                return _list(console, run_key, as_json=as_json)
            if changes:
                return _try(console, run_key, chosen, changes, as_json=as_json)
            return _replay(console, run_key, chosen, as_json=as_json)
        except ReplayUnavailable as error:
            return failed("\n".join(f"ReplayUnavailable: {line}" for line in str(error).splitlines()))
        except RunEnded as error:
            return failed(f"{type(error).__name__}: {error}", FAILED)

    return guarded(work)


def steps_of(steps: Sequence[int], ranges: Sequence[str]) -> list[int]:
    """`steps_of([3], ["10:13"])` -> `[3, 10, 11, 12]`. Raises ConfigError for what is no range of steps."""
    found = set(steps)
    for text in ranges:
        if not (hit := re.fullmatch(r"(\d+):(\d+)", text)) or int(hit[1]) >= int(hit[2]):
            raise ConfigError(f"--steps {text!r}: write the first step and the one behind the last, as in "
                              "--steps 10:60")
        found |= set(range(int(hit[1]), int(hit[2])))
    return sorted(found)


# -- which


def _list(console: Console, run_key: str, *, as_json: bool) -> int:
    from tasks.replaying import replayable_steps

    steps = replayable_steps(run_key)
    can = sum(one["why"] is None for one in steps)
    if as_json:
        console.line(json.dumps({"run_key": run_key, "replayable": can, "steps": steps}, allow_nan=False))
    else:
        console.lines([f"{run_key}: {can} of {len(steps)} steps can be replayed", *_spans(steps)])
    return 0


def _spans(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    """Neighbouring steps of which the same is true are one line."""
    spans: list[tuple[int, int, str]] = []
    for one in steps:
        step, text = one["step"], one["why"] or f"from {_begun(one['checkpoint'])}"
        if spans and spans[-1][1:] == (step - 1, text):
            spans[-1] = (spans[-1][0], step, text)
        else:
            spans.append((step, step, text))
    names = [str(first) if first == last else f"{first}-{last}" for first, last, _ in spans]
    width = max(map(len, names), default=0)
    return [f"  step {name:<{width}}  {text}" for name, (_, _, text) in zip(names, spans, strict=True)]


def _begun(checkpoint: int) -> str:
    return f"checkpoint {checkpoint}" if checkpoint else "the initial model"


# -- against the record


def _replay(console: Console, run_key: str, steps: Sequence[int], *, as_json: bool) -> int:
    begun = time.monotonic()
    from tasks.replaying import replayed_steps

    replay = replayed_steps(run_key, steps)  # has imported torch
    loaded = time.monotonic()
    found: list[Mapping[str, Any]] = []
    for one in replay:
        found.append(one)
        if not as_json:
            console.lines(replayed_lines(one))
    counts = {verdict: sum(one["verdict"] == verdict for one in found)
              for verdict in ("identical", "within_tolerance", "differs")}
    seconds = {"import": loaded - begun, "replay": time.monotonic() - loaded}
    if as_json:
        console.line(json.dumps({"run_key": run_key, "against": "recorded", **counts, "seconds": seconds,
                                 "steps": found}, allow_nan=False))
    else:
        console.line(summary_line(counts, seconds["replay"]))
    return FAILED if counts["differs"] else 0


def summary_line(counts: Mapping[str, int], seconds: float) -> str:
    """`50 of 50 steps are bit-identical to their records (7.1 s)`"""
    total = sum(counts.values())
    parts = [f"{counts['identical']} of {total} {'step is' if total == 1 else 'steps are'} bit-identical to "
             f"{'its record' if total == 1 else 'their records'}"]
    parts += [f"{counts['within_tolerance']} within the tolerance of another environment"] \
        if counts["within_tolerance"] else []
    parts += [f"{counts['differs']} DIFFER{'S' if counts['differs'] == 1 else ''}"] if counts["differs"] else []
    return f"{', '.join(parts)} ({seconds:.1f} s)"


def replayed_lines(one: Mapping[str, Any]) -> list[str]:
    """What a person reads of one replayed step."""
    head, digests = f"step {one['step']} from {_begun(one['checkpoint'])}: ", one["weights_digest"]
    if one["verdict"] == "identical":
        return [head + f"bit-identical: weights {digests[0][:12]}, {one['compared']} metrics"]
    differing: Mapping[str, Any] = one["differing"]
    words = "within tolerance" if one["verdict"] == "within_tolerance" else "DIFFERS"
    lines = [head + f"{words}: {len(differing)} of {one['compared']} metrics differ, {len(one['beyond_tolerance'])} by "
                    "more than the tolerance"]
    lines += [f"  {what:<34} recorded {before}, now {now}" for what, (before, now)
              in (("claim digest", one["claim_digest"]), ("weights digest", digests)) if before != now]
    lines += [f"  environment: {name:<21} recorded {before}, here {now}"
              for name, (before, now) in one["environment"].items()]
    worst = sorted(differing.items(), key=lambda item: -_apart(*item[1]))
    lines += [f"  {name:<34} recorded {_number(before)}, now {_number(now)}"
              + (" (!)" if name in one["beyond_tolerance"] else "") for name, (before, now) in worst[:SHOWN]]
    return lines + ([f"  and {len(worst) - SHOWN} more (--json has all)"] if len(worst) > SHOWN else [])


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.9g}"


def _apart(before: float | None, now: float | None) -> float:
    """Difference as a share of the larger; infinite where only one of the two exists."""
    return float("inf") if before is None or now is None else abs(before - now) / max(abs(before), abs(now))


# -- with other settings


def _try(console: Console, run_key: str, steps: Sequence[int], changes: Mapping[str, Any], *, as_json: bool) -> int:
    from tasks.replaying import tried_steps

    found: list[Mapping[str, Any]] = []
    for one in tried_steps(run_key, steps, changes):
        found.append(one)
        if not as_json:
            console.lines(tried_lines(one))
    if as_json:
        console.line(json.dumps({"run_key": run_key, "steps": found}, allow_nan=False))
    return 0


def tried_lines(one: Mapping[str, Any]) -> list[str]:
    """What a person reads of one step with other settings: the metrics that differ, recorded and tried."""
    fields = ", ".join(f"{name} {before} -> {now}" for name, (before, now) in one["changed"].items())
    lines = [f"step {one['step']} from {_begun(one['checkpoint'])} with {fields or 'the settings that it had'}",
             f"  {'':<34} {'recorded':>14} {'with it':>14}"]
    lines += [f"  {name:<34} {_short(before):>14} {_short(now):>14}" for name, (before, now) in one["metrics"].items()
              if before != now]
    if one["environment"]:
        lines.append(f"  another environment than recorded: {', '.join(one['environment'])}; a part of the differences "
                     "may be of it")
    recorded, now = one["weights_digest"]
    lines.append("  the weights behind it are the recorded ones" if recorded == now else
                 f"  weights {recorded[:12]} -> {now[:12]}")
    return lines


def _short(value: float | None) -> str:
    return "none" if value is None else f"{value:.6g}"
