"""The lines that `headway status` and `headway inspect` print, from the objects that their `--json` prints.

A number that does not exist (None) is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flows.console import amendment_text, number

GAPS_SHOWN = 5


def status_lines(report: Mapping[str, Any]) -> list[str]:
    """State, then the numbers that people look at first, of the last step; nothing for those that do not exist."""
    rows = [("run", report["run_key"]), ("state", report["state"]),
            ("steps", f"{report['steps']} of {report['total_steps']}")]
    rows += [("alarm", report["alarm"])] if report["alarm"] is not None else []
    rows += [("revision", f"{one['revision']}, {amendment_text(one['from_step'], one['changed'])}")
             for one in report["amendments"][-1:]]
    if (origin := report["forked_from"]) is not None:
        rows.append(("forked from", f"{origin['run_key']}, step {origin['step']}"))
    if (taken := report["shards_from"]) is not None:
        rows.append(("shards of", f"{taken['run_key']}, " + ("scored anew" if taken["rescored"] else "rewards kept")))
    rows += [("accuracy", _accuracy(report))] if report["accuracy"] is not None else []
    rows += [("reward", text) for text in [_reward(report)] if text]
    if len(report["by_source"]) > 1:
        rows += [(f"  {source}", text) for source, part in report["by_source"].items()
                 if (text := _joined(part, (("reward_mean", "{:.3f}"), ("correct", "right {:.1%}"),
                                            ("length_mean", "length {:.1f}"), ("n", "{:.0f} answers"))))]
    rows += [(name, text) for name, parts in LINES if (text := _joined(report["metrics"], parts))]
    rows += [("waiting", report["waiting"])] if report["waiting"] else []
    rows += [("" if i else "cause", line) for i, line in enumerate((report["cause"] or "").splitlines())]
    rows += [("directory", report["directory"]), *_gap_rows(report["gaps"])]
    return [f"{name:<12}{value}" for name, value in rows]


def _accuracy(report: Mapping[str, Any]) -> str:
    """`0.184 -> 0.977, best greedy accuracy 0.980 after 160 steps`; one number where there was one validation."""
    text = f"{report['accuracy']:.3f}"
    if report["best_step"] is None:
        return text
    if report["accuracy_start"] is not None and report["best_step"] != 0:
        text = f"{report['accuracy_start']:.3f} -> {text}"
    return f"{text}, best greedy accuracy {report['accuracy_best']:.3f} after {report['best_step']} steps"


def _reward(report: Mapping[str, Any]) -> str:
    recent = report["recent"].get("reward/mean")
    reward = _joined(report["metrics"], (
        ("reward/mean", "{:.3f}"), ("reward/std", "std {:.3f}"), ("reward/correct", "right {:.1%}"),
        ("reward/all_equal", "no spread {:.0%}"), ("reward/no_spread_right", "all right {:.0%}"),
        ("reward/no_spread_wrong", "some wrong {:.0%}"),
        ("reward/sampled", "of all sampled {:.3f}")))
    return reward + (f", lately {recent:.3f}" if reward and recent is not None else "")


LINES: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    ("length", (("rollout/length_mean", "{:.1f}"), ("rollout/length_p95", "p95 {:.0f}"),
                ("rollout/length_right", "right {:.1f}"), ("rollout/right_length_p95", "p95 {:.0f}"),
                ("rollout/length_wrong", "wrong {:.1f}"), ("rollout/wrong_length_p95", "p95 {:.0f}"),
                ("rollout/truncated", "truncated {:.1%}"))),
    ("learning", (("train/policy_loss", "loss {:.4g}"), ("train/entropy", "entropy {:.3g}"),
                  ("train/clip_low", "clipped low {:.2%}"), ("train/clip_high", "high {:.2%}"),
                  ("train/kl_proximal", "KL {:.2g}"), ("train/grad_norm", "gradient {:.3g}"),
                  ("train/learning_rate", "rate {:.3g}"), ("train/skipped_updates", "skipped {:.0f}"))),
    ("mismatch", (("train/mismatch_current_abs", "current {:.2g} nats"), ("train/mismatch_current_k3", "k3 {:.2g}"),
                  ("train/mismatch_stale_k3", "stale k3 {:.2g}"),
                  ("train/effective_samples", "effective samples {:.1%}"))),
    ("staleness", (("staleness/mean", "mean {:.2f}"), ("staleness/p95", "p95 {:.0f}"), ("staleness/max", "max {:.0f}"),
                   ("staleness/update_lag_mean", "lag {:.2f} updates"), ("staleness/mixed", "mixed {:.1%}"),
                   ("staleness/dropped_tokens", "dropped {:.0f} tokens"))),
    ("tokens/s", (("rollout/tokens_per_s", "{:.0f} generated"), ("system/tokens_per_s", "{:.0f} trained"),
                  ("system/samples_per_s", "{:.1f} answers/s"), ("system/mfu", "MFU {:.1%}"),
                  ("rollout/wasted", "wasted {:.1%}"))),
    ("seconds", (("system/step_s", "step {:.3g}"), ("system/waiting_s", "waiting {:.3g}"),
                 ("system/proximal_s", "proximal {:.3g}"), ("system/update_s", "update {:.3g}"),
                 ("system/publish_s", "publish {:.3g}"), ("system/swap_s", "swap {:.3g}"))),
    ("busy", (("utilization/learner_busy", "learner {:.0%}"), ("utilization/rollout_busy", "rollout {:.0%}"))),
)
"""Of the last step, a line each: metrics with how they are said."""


def _joined(values: Mapping[str, Any], parts: Sequence[tuple[str, str]]) -> str:
    return ", ".join(text.format(values[name]) for name, text in parts if values.get(name) is not None)


def _gap_rows(gaps: Sequence[str]) -> list[tuple[str, str]]:
    more = [("", f"and {number(len(gaps) - GAPS_SHOWN)} more")] if len(gaps) > GAPS_SHOWN else []
    return [("gap" if i == 0 else "", gap) for i, gap in enumerate(gaps[:GAPS_SHOWN])] + more


def step_lines(report: Mapping[str, Any]) -> list[str]:
    """Groups and answers of one training step."""
    reward = "" if report["reward_mean"] is None else f", reward {report['reward_mean']:.3f}"
    lines = [f"step {report['step']} of {report['run_key']}: {len(report['groups'])} groups, publication "
             f"{report['idx']}{reward}"]
    for group in report["groups"]:
        age = "" if group["age"] is None else f"  age {group['age']}"
        lines += ["", f"{group['group_id']}  {group['prompt']!r}{age}", *map(_answer_line, group["answers"])]
    return [*lines, *_gap_lines(report)]


def group_lines(report: Mapping[str, Any]) -> list[str]:
    """One group: its state, and its answers."""
    lines: list[str] = []
    for row in report["groups"]:
        facts = [row["state"], *([f"({row['reason']})"] if row["reason"] else []),
                 *([f"by step {row['step']}"] if row["step"] is not None else []),
                 *([f"at age {row['age']}"] if row["age"] is not None else [])]
        lines += [f"{row['group_id']}: {' '.join(facts)}, position {row['position']} of dataset epoch "
                  f"{row['dataset_epoch']}",
                  *([repr(row["prompt"])] if row["prompt"] is not None else []), *map(_answer_line, row["answers"])]
    return [*lines, *_gap_lines(report)]


def extreme_lines(report: Mapping[str, Any]) -> list[str]:
    """The best or worst answers, each with its prompt."""
    where = "all that landed" if report["step"] is None else f"step {report['step']}"
    lines = [f"{report['order']} answers of {where} in {report['run_key']}, by reward"]
    for answer in report["answers"]:
        trained = f"step {answer['step']}" if answer["step"] is not None else answer["state"]
        lines += ["", f"{answer['group_id']}  {answer['prompt']!r}  {trained}", _answer_line(answer)]
    return [*lines, *_gap_lines(report)]


def validation_lines(report: Mapping[str, Any]) -> list[str]:
    """The answers that a validation keeps, by prompt."""
    accuracy = report["greedy_accuracy"]
    right = "" if accuracy is None else f", greedy accuracy {accuracy:.3f} of {report['n']} prompts"
    lines = [f"validation of {report['run_key']} after {report['validation']} steps: version {report['v']}{right}"]
    before = None
    for answer in report["answers"]:
        if (asked := (answer["prompt"], answer["answer"])) != before:
            lines += ["", f"{answer['prompt']!r}  truth {answer['answer']!r}"]
        before = asked
        reward = "  failed" if answer["reward"] is None else f"  {answer['reward']:+.3f}"
        lines.append(f"{reward}  {answer['mode']:<7}  {answer['finish']:<7} {answer['text']!r}")
    return [*lines, *_gap_lines(report)]


def page_lines(report: Mapping[str, Any]) -> list[str]:
    """Where the page is."""
    size = report["bytes"]
    said = f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.0f} kB"
    lines = [f"{report['html']}: {said}, to be opened in a browser"] if "html" in report else []
    if "artifact" in report:
        lines.append(f"{report['artifact']}: {said}, among the artifacts of MLflow run {report['mlflow_run_id']}")
    return lines


def _answer_line(answer: Mapping[str, Any]) -> str:
    parts = "".join(f" {name} {value:.3g}" for name, value in answer["parts"].items())
    extracted = f" = {answer['extracted']!r}" if answer["extracted"] is not None else ""
    return f"  {answer['reward']:+.3f}{parts}  v{'-'.join(map(str, answer['versions']))}  {answer['finish']:<7} " \
           f"{answer['text']!r}{extracted}"


def _gap_lines(report: Mapping[str, Any]) -> list[str]:
    rows = _gap_rows(report["gaps"])
    return ["", *(f"{name:<4}{gap}" for name, gap in rows)] if rows else []
