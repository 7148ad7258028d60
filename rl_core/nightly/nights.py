"""What a night is on disk: `HEADWAY_HOME/nights/<key>`, beside the runs it trains (docs/nightly.md 3).

`night.json` is what was asked for, written before anything is trained; `verdict.json` what came out, with the numbers
behind it. Both are created once: a retry, or a `headway rerun` of the night, goes on from what is there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from rl_core.errors import BrokenFile, ConfigError
from rl_core.looking.comparison import Difference
from rl_core.nightly.gates import Judgement, Thresholds, Verdict
from rl_core.plan import merge
from rl_core.run_dir import numbers, put_if_absent, read_json, to_json

MOST_RUNS = 100
"""Of one matrix: they run one after the other."""
GOOD: tuple[Verdict, ...] = ("promote", "keep")
Baselines = Literal["champion", "last good night", "named"]


@dataclass(frozen=True, slots=True)
class NightDir:
    """Paths of one night. `NightDir(Path("nights/nightly-2026-11-30")).model` is its exported model."""

    root: Path

    @property
    def night(self) -> Path:
        return self.root / "night.json"

    @property
    def verdict(self) -> Path:
        return self.root / "verdict.json"

    @property
    def parent(self) -> Path:
        """Of a matrix: id of its MLflow run."""
        return self.root / "mlflow.json"

    @property
    def version(self) -> Path:
        """Which version of the registered model it is, and why it is not the champion where a later night's stays;
        absent where none was registered."""
        return self.root / "version.json"

    @property
    def notified(self) -> Path:
        """Whether the webhook took the verdict."""
        return self.root / "notified.json"

    @property
    def ended(self) -> Path:
        """That nothing is left to do: judged, registered where that was asked for, reported."""
        return self.root / "ended.json"

    @property
    def model(self) -> Path:
        """The exported Hugging Face directory."""
        return self.root / "model"

    @property
    def page(self) -> Path:
        """The report, for people; can be made again."""
        return self.root / "report.html"


@dataclass(frozen=True, kw_only=True, slots=True)
class NightRun:
    """One run of a night: `NightRun(run_key="nightly-2026-11-30.2", overrides={"seed": 2})`."""

    run_key: str
    overrides: dict[str, Any]
    """On top of the preset, as a tree."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Night:
    """What a night was asked for."""

    key: str
    name: str
    """Of all nights like it, and of the registered model."""
    flow_run_id: str | None
    scheduled_us: int
    """When it was due, microseconds since 1970."""
    preset: str
    runs: tuple[NightRun, ...]
    baseline: str | None = None
    """`champion`, `last-good-night`, or a run key; None: whichever there is, in this order."""
    thresholds: Thresholds = field(default_factory=Thresholds)
    register_version: Literal["always", "promoted", "never"] = "always"
    serve: str = ""
    """Command that serves `{model}`."""
    notify: str | None = None
    """`env:NAME` or `block:type/name`: never an address."""
    notify_on: Literal["always", "trouble"] = "always"

    @property
    def is_matrix(self) -> bool:
        return len(self.runs) > 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Baseline:
    """What a night was compared with: `Baseline(kind="champion", run_key="nightly-2026-11-29", version=4)`."""

    kind: Baselines
    run_key: str
    version: int | None = None
    """Of the registered model."""

    def __str__(self) -> str:
        version = "" if self.version is None else f", version {self.version}"
        return f"{self.run_key} ({self.kind}{version})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """One run of a night beside the baseline, or alone on the first night."""

    run_key: str
    differences: tuple[Difference, ...]
    judgement: Judgement
    """Of this run by itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What came out of a night."""

    verdict: Verdict
    reasons: tuple[str, ...]
    run_key: str
    """The run that is judged: of a matrix the one with the largest held-out accuracy."""
    baseline: Baseline | None
    """None on the first night."""
    compared: tuple[Compared, ...]
    notes: tuple[str, ...]
    """What one must know to read the differences."""
    changed: dict[str, tuple[Any, Any]]
    """Settings in which the judged run differs from the baseline: name -> (baseline's, its own)."""
    ts_us: int

    @property
    def differences(self) -> tuple[Difference, ...]:
        """Those of the judged run."""
        return next(each.differences for each in self.compared if each.run_key == self.run_key)


# -- before a night

def matrix_of(overrides: Mapping[str, Any], seeds: Sequence[int], matrix: Sequence[Mapping[str, Any]]
              ) -> tuple[dict[str, Any], ...]:
    """Overrides of each run of a night: every row of the matrix with every seed, on top of `overrides`.

    `matrix_of({"a": 1}, [1, 2], [])` -> `({"a": 1, "seed": 1}, {"a": 1, "seed": 2})`. Raises ConfigError for two runs
    that would be the same one, and for more than MOST_RUNS.
    """
    runs = [merge(merge(dict(overrides), dict(row)), {} if seed is None else {"seed": seed})
            for row, seed in itertools.product(matrix or ({},), seeds or (None,))]
    for at, run in enumerate(runs):
        if run in runs[:at]:
            raise ConfigError(f"matrix, seeds: runs {runs.index(run) + 1} and {at + 1} have the same settings ({run}); "
                              "name each seed and each row once, and no seed in a row if there are seeds")
    if len(runs) > MOST_RUNS:
        raise ConfigError(f"matrix, seeds: {len(runs)} runs, which go one after the other; use at most {MOST_RUNS}")
    return tuple(runs)


def keys_for(name: str, due: datetime, flow_run_id: str) -> tuple[str, ...]:
    """Keys that a night of this name may have, by preference: the date; where another night has it the time as well.

    `keys_for("nightly", datetime(2026, 11, 30, 2, 0), "...-0123456789ab")` -> `("nightly-2026-11-30",
    "nightly-2026-11-30-0200", "nightly-2026-11-30-020000", "nightly-2026-11-30-0123456789ab")`.
    """
    date = f"{name}-{due:%Y-%m-%d}"
    return date, f"{date}-{due:%H%M}", f"{date}-{due:%H%M%S}", f"{date}-{flow_run_id[-12:]}"


def run_keys(key: str, runs: int) -> tuple[str, ...]:
    """Keys of a night's runs: its own, or `<key>.1` to `<key>.n` of a matrix."""
    return (key,) if runs == 1 else tuple(f"{key}.{i}" for i in range(1, runs + 1))


# -- files

def put_night(place: NightDir, night: Night) -> bool:
    """Begin a night under its key; False where that is taken."""
    return put_if_absent(place.night, to_json(asdict(night)))


def read_night(place: NightDir) -> Night:
    """Raises FileNotFoundError where there is no such night, BrokenFile."""
    stored = read_json(place.night)
    try:
        stored.pop("format")
        stored["runs"] = tuple(NightRun(**run) for run in stored["runs"])
        stored["thresholds"] = Thresholds(**stored["thresholds"])
        return Night(**stored)
    except (KeyError, TypeError) as error:
        raise BrokenFile(f"{place.night}: not what was asked of a night ({error})") from error


def put_outcome(place: NightDir, outcome: Outcome) -> Outcome:
    """Record what came out, or return what is recorded, which stands."""
    put_if_absent(place.verdict, to_json(asdict(outcome)))
    return read_outcome(place)


def read_outcome(place: NightDir) -> Outcome:
    """Raises FileNotFoundError for a night that has no verdict yet, BrokenFile."""
    stored = read_json(place.verdict)
    try:
        baseline = stored["baseline"]
        return Outcome(
            verdict=stored["verdict"], reasons=tuple(stored["reasons"]), run_key=stored["run_key"],
            baseline=None if baseline is None else Baseline(**baseline), notes=tuple(stored["notes"]),
            compared=tuple(_compared(each) for each in stored["compared"]), ts_us=stored["ts_us"],
            changed={name: (before, now) for name, (before, now) in stored["changed"].items()})
    except (KeyError, TypeError, ValueError) as error:
        raise BrokenFile(f"{place.verdict}: not what came out of a night ({error})") from error


def told_outcome(place: NightDir) -> Outcome:
    """What people are told of a night: what came out; of a promotion that came after that of a later night, that the
    champion stays, which is a keep. Raises as `read_outcome`."""
    outcome = read_outcome(place)
    stays = read_json(place.version).get("stays") if place.version.exists() else None
    return outcome if stays is None else replace(outcome, verdict="keep", reasons=(stays, *outcome.reasons))


def _compared(stored: dict[str, Any]) -> Compared:
    measured = ("baseline", "value", "difference", "low", "high")
    differences = tuple(Difference(**each | numbers({name: each[name] for name in measured}))
                        for each in stored["differences"])
    judgement = stored["judgement"]
    return Compared(run_key=stored["run_key"], differences=differences,
                    judgement=Judgement(verdict=judgement["verdict"], reasons=tuple(judgement["reasons"])))


# -- nights beside each other

def nights_in(place: Path) -> Iterator[tuple[NightDir, Night]]:
    """All nights under a directory that can be read, by key."""
    for root in sorted(place.iterdir()) if place.is_dir() else ():
        try:
            yield NightDir(root), read_night(NightDir(root))
        except (FileNotFoundError, NotADirectoryError, BrokenFile):
            continue


def is_later(champion: tuple[Night | None, int], other: tuple[Night, int]) -> bool:
    """Whether a champion is of a later night than another version, each with the number of its version: by when they
    were due, and by the numbers alone where the champion's night (None) is gone."""
    its, number = champion
    night, other_number = other
    return number > other_number if its is None else (its.scheduled_us, number) > (night.scheduled_us, other_number)


def good_before(nights: Iterable[tuple[NightDir, Night]], night: Night) -> Iterator[str]:
    """Keys of the judged runs of good nights of this name that were due before this one, the newest first.

    Good is what was promoted or kept; an alarm is nothing to compare with.
    """
    earlier = [(each.scheduled_us, each.key, place) for place, each in nights
               if each.name == night.name and each.key != night.key and each.scheduled_us <= night.scheduled_us]
    for _, _, place in sorted(earlier, key=lambda found: found[:2], reverse=True):
        try:
            outcome = read_outcome(place)
        except (FileNotFoundError, BrokenFile):
            continue
        if outcome.verdict in GOOD:
            yield outcome.run_key
