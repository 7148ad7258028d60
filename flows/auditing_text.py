"""The lines that `headway audit` prints, from the object that its `--json` prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

REASONS: Final = (
    ("filtered", "filtered", ""), ("dropped", "dropped", ": groups that no step takes"),
    ("failed", "failed", ": tries of answers in groups that landed"),
    ("ended", "failed_groups", ": tries of groups that have no row"))
"""What an audit counts by reason: name of the line, field of the report, what is counted."""
VIOLATIONS_SHOWN: Final = 20


def audit_lines(report: Mapping[str, Any]) -> list[str]:
    """What was asked for of each prompt and each shard, then the counts, and last whether the partition holds."""
    listed = [*map(_prompt_line, report["each_prompt"] or ()), *map(_shard_line, report["each_shard"] or ())]
    lines = [*listed, *([""] if listed else []), *_count_lines(report)]
    if report["holds"]:
        return [*lines, "holds: every prompt and every landed group is in exactly one state"]
    return [*lines, f"DOES NOT HOLD: {len(report['violations'])} violations", *report["violations"][:VIOLATIONS_SHOWN]]


def _count_lines(report: Mapping[str, Any]) -> list[str]:
    epoch, position = report["frontier"]
    lines = [f"{report['run_key']}: {report['claims']} claims, {report['recorded']} records, {report['shards']} "
             f"shards; prompts up to position {position} of dataset epoch {epoch}"]
    if (origin := report["origin"]) is not None:
        lines.append(f"shards of run {origin['run_key']} ({origin['run_uuid']}), "
                     + ("scored anew; each says which one it is of" if origin["rescored"] else "linked, rewards kept"))
    for what, key in (("positions", "positions"), ("rows", "rows"), ("shards", "shard_states")):
        counts = {state: n for state, n in report[key].items() if n}
        lines.append(f"{what:<10}{sum(counts.values()):>8}  {_counted(counts)}")
    lines += [f"{what:<10}{sum(counts.values()):>8}  {_counted(counts)}{of}"
              for what, key, of in REASONS if (counts := report[key])]
    return lines


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {name}" for name, n in counts.items())


def _prompt_line(prompt: Mapping[str, Any]) -> str:
    """`epoch 0 position 2         e0-p2-t1    trained at step 0, before: stale`."""
    state = prompt["state"]
    if prompt["step"] is not None:
        state += f" at step {prompt['step']}"
    elif prompt["reason"] is not None:
        state += f" ({prompt['reason']})"
    tries = "" if prompt["tries"] < 2 else f"  {prompt['tries']} tries, before: " \
        + ", ".join(reason or "unknown" for reason in prompt["before"])
    return f"epoch {prompt['dataset_epoch']} position {prompt['position']:<8} {prompt['group_id'] or '-':<14} " \
           f"{state}{tries}"


def _shard_line(shard: Mapping[str, Any]) -> str:
    """`w-4f2a/12  claimed by steps 3, 4: 4 claimed, 1 duplicate`."""
    steps = shard["steps"]
    by = f" by step{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps))}" if steps else ""
    reason = "" if shard["reason"] is None else f" ({shard['reason']})"
    return f"{shard['shard']}  {shard['state']}{by}: {_counted(shard['rows'])}{reason}"
