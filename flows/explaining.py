"""`headway explain`: what another staleness policy would have made of the groups that a run has landed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flows.command import answer
from flows.console import number

CANNOT_SAY = ("the same groups at the same steps; a run under this policy would have claimed others, trained other "
              "weights, and sampled other answers")


def explain_policy(run_key: str, *, policy: str | None, bound: str | None, hard_max: int | None, as_json: bool) -> int:
    """Run `headway explain`; returns its exit code. Reads only."""
    from tasks.replaying import explained_policy

    return answer(lambda: explained_policy(run_key, policy=policy, bound=bound, hard_max=hard_max), policy_lines,
                  as_json=as_json)


def policy_lines(found: Mapping[str, Any]) -> list[str]:
    """Counts and lengths of both policies, side by side."""
    lines = [f"{found['run_key']}: {number(found['judged'])} landed groups, judged at {number(found['steps'])} steps",
             f"{'':<24}{'groups':>9}{'answers':>9}{'tokens':>11}   answer length: mean     p50     p95     max"]
    for title, name in (("the run's own policy", "own"), ("the other policy", "other")):
        rule, of = found["rules"][name], found[name]
        lines.append(f"{title}: {rule['policy']}, bound {rule['bound']}, hard_max {rule['hard_max']}")
        lines += [_share("  trained", of["trained"]), _share("  thrown away", of["dropped"])]
        lines += [f"  masked{'':<16}{number(of['masked_groups']):>9}{'':>9}{number(of['masked_tokens']):>11}"]
        lines += ["  reasons: " + ", ".join(f"{n} {reason}" for reason, n in of["reasons"].items())] \
            if of["reasons"] else []
    lines += ["what differs", _share("  trained instead", found["admitted_instead"]),
              _share("  thrown away instead", found["thrown_away_instead"])]
    if left := ", ".join(f"{n} {state}" for state, n in found["left_out"].items() if n):
        lines.append(f"not judged: {left}")
    return [*lines, f"This is about {CANNOT_SAY}."]


def _share(title: str, share: Mapping[str, Any]) -> str:
    length = share["length"]
    row = f"{title:<24}{number(share['groups']):>9}{number(share['answers']):>9}{number(share['tokens']):>11}"
    if length["mean"] is None:
        return row
    return row + f"{'':>18}{length['mean']:>8.1f}{length['p50']:>8.0f}{length['p95']:>8.0f}{length['max']:>8}"
