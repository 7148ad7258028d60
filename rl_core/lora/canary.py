"""The canary of an adapter: what the learner says of a few fixed prompts, with its adapter and without, written beside
every publication, so that whoever serves it can tell which of the two it serves. Pure, but for one file.

Nats. An adapter that has not learned yet, or one whose effect is below rounding, decides nothing and refuses nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rl_core.errors import AdapterNotServed, BrokenFile, EngineMismatch, FormatTooNew, WeightsDamaged
from rl_core.run_dir import read_json

PROBE_FILE = "probe.json"
APART = {"float32": 1e-4, "bfloat16": 0.1}
"""Least difference that the adapter makes to a log-prob for the place to decide: far above rounding of the dtype."""


@dataclass(frozen=True, slots=True)
class Place:
    """One prompt, and log-probs of the tokens that are most likely behind it: with the adapter, and of the base."""

    prompt: tuple[int, ...]
    token_ids: tuple[int, ...]
    adapter: tuple[float, ...]
    base: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Probe:
    """`Probe((Place((5, 6), (7,), (-0.1,), (-0.3,)),))`"""

    places: tuple[Place, ...]

    def as_json(self) -> dict[str, Any]:
        return {"places": [asdict(place) for place in self.places]}


@dataclass(frozen=True, slots=True)
class Seen:
    """What an engine's answers say."""

    gap: float
    """Mean |engine - learner with the adapter|."""
    base_gap: float
    """Mean |engine - base|."""
    deciding: int
    """Places where adapter and base are clearly apart."""
    of_base: int
    """Those of them where the engine is nearer to the base."""


def read_probe(directory: Path) -> Probe | None:
    """The probe beside a publication's weights; None where there is none. Raises WeightsDamaged."""
    try:
        payload = read_json(directory / PROBE_FILE)
        return Probe(tuple(Place(tuple(place["prompt"]), tuple(place["token_ids"]), tuple(place["adapter"]),
                                 tuple(place["base"])) for place in payload["places"]))
    except FileNotFoundError:
        return None
    except FormatTooNew:
        raise
    except (BrokenFile, KeyError, TypeError, ValueError) as error:
        raise WeightsDamaged(f"{directory / PROBE_FILE}: {error!r}") from error


def seen(probe: Probe, answers: Sequence[tuple[int, float]], precision: str) -> Seen:
    """What the engine's most likely tokens and their log-probs say, one for each place.

    Raises EngineMismatch for a token that is among the most likely ones neither with the adapter nor without.
    """
    gaps: list[float] = []
    base_gaps: list[float] = []
    deciding = of_base = 0
    for place, (token, logprob) in zip(probe.places, answers, strict=True):
        if token not in place.token_ids:
            raise EngineMismatch(f"the engine's most likely token behind {list(place.prompt)} is {token}, and the "
                                 f"learner's are {list(place.token_ids[:4])}, ...")
        at = place.token_ids.index(token)
        adapter, base = place.adapter[at], place.base[at]
        gaps.append(abs(logprob - adapter))
        base_gaps.append(abs(logprob - base))
        if abs(adapter - base) > APART[precision]:
            deciding += 1
            of_base += gaps[-1] > base_gaps[-1]
    return Seen(sum(gaps) / len(gaps), sum(base_gaps) / len(base_gaps), deciding, of_base)


def check_seen(found: Seen, bound: float, what: str) -> None:
    """Raises AdapterNotServed where most deciding places are those of the base, EngineMismatch where the mean gap is
    above `bound`. `what`: who serves which version, for the message."""
    if 2 * found.of_base > found.deciding:
        raise AdapterNotServed(
            f"{what} answers as the base model, without the adapter: of {found.deciding} prompts that tell the two "
            f"apart {found.of_base} have the log-probs of the base (mean |engine - base| {found.base_gap:.2g} nats, "
            f"|engine - learner| {found.gap:.2g}); answers would be sampled from a model that is never trained")
    if not found.gap <= bound:
        raise EngineMismatch(f"{what} is {found.gap:.2g} nats off the learner's log-probs of the canary's prompts on "
                             f"average; at most {bound:g} is rounding")
