"""Config revisions: the settings of a run as they were amended, each from a training step on (changing-a-run.md 3).

    run.json                   revision 0: the settings that the run was created with
    revisions/rev-<r>.json     revision r = 1, 2, ...: written put-if-absent by the start that amends, before that start
                               changes anything else

A claim carries the revision that it was made under, and its step is trained by the settings of that revision, whenever
and wherever it is trained again. Importable without torch.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import yaml

from rl_core.combinations import check_baseline_landed, check_rewards_landed
from rl_core.config import Config, field_kinds
from rl_core.errors import BrokenFile, ConfigError
from rl_core.experience.ledger import claimed_steps, read_end
from rl_core.plan import VARIANTS, differing, flatten
from rl_core.run_dir import RunDir, file_numbers, put_if_absent, read_json, to_json
from rl_core.variants import variants

Changed = dict[str, tuple[Any, Any]]
"""Field -> (before, after), JSON values: `{"total_steps": (60, 120)}`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Revision:
    """One amendment: `Revision(revision=1, from_step=60, changed={"total_steps": (60, 120)}, ...)`."""

    revision: int
    """1, 2, ...; 0 is no amendment."""
    from_step: int
    """First step that had no claim when this was written. What a step is trained by is said by its claim alone."""
    changed: Changed
    """Training fields only."""
    config: Config
    """All settings of the start that amended; of those only identity and training fields count for later starts that
    bring settings of their own."""
    ts_us: int


def read_config(path: Path) -> Config:
    """The `config` of run.json or of a revision. Raises BrokenFile for one that this Headway cannot read."""
    try:
        return Config.model_validate(read_json(path)["config"])
    except (KeyError, ValueError) as error:
        raise BrokenFile(f"{path}: not the settings of a run of this Headway ({error}); use another "
                         "--run-key") from error


def current_revision(run: RunDir) -> int:
    """The newest revision; 0 for a run that was never amended. Raises BrokenFile where one before it is absent."""
    found = file_numbers(run.revisions, r"rev-(\d{6})\.json")
    if found and found[-1] != len(found):
        gap = next(r for r, there in enumerate([*found, 0], 1) if there != r)
        raise BrokenFile(f"{run.settings(gap)}: absent, but there is revision {found[-1]}; restore it")
    return len(found)


def read_revision(run: RunDir, revision: int) -> Revision:
    """Revision 1, 2, ... Raises BrokenFile, or FileNotFoundError where there is none."""
    path = run.settings(revision)
    config, payload = read_config(path), read_json(path)
    try:
        changed = {name: (before, after) for name, (before, after) in payload["changed"].items()}
        return Revision(revision=payload["revision"], from_step=payload["from_step"], changed=changed, config=config,
                        ts_us=payload["ts_us"])
    except (KeyError, TypeError, ValueError) as error:
        raise BrokenFile(f"{path}: not a config revision ({error!r}); restore it") from error


def revisions(run: RunDir) -> tuple[Revision, ...]:
    """All amendments of the run, in order; empty for one that was never amended."""
    return tuple(read_revision(run, r) for r in range(1, current_revision(run) + 1))


def config_of(run: RunDir, revision: int) -> Config:
    """The settings of one revision, as they were stored. Raises BrokenFile where they are not there."""
    try:
        return read_config(run.settings(revision))
    except FileNotFoundError:
        raise BrokenFile(f"{run.settings(revision)}: absent, but steps of the run were made under revision {revision}; "
                         "restore it") from None


def trained_by(stored: Config, now: Config) -> Config:
    """`now` with the training fields of `stored`: what trains a step of that revision in a start of these settings.

    Identity fields are equal in both; operational and environment ones (deadlines, threads, device) are those of the
    start, whichever revision the step belongs to.
    """
    tree, before = now.model_dump(mode="json"), stored.model_dump(mode="json")
    for name, kind in field_kinds().items():
        if kind == "training":
            *parents, leaf = name.split(".")
            part, then = _part(tree, parents), _part(before, parents)
            part.pop(leaf, None)  # the two may be variants with other fields
            if leaf in then:
                part[leaf] = then[leaf]
    return Config.model_validate(tree)


def _part(tree: dict[str, Any], parents: Sequence[str]) -> dict[str, Any]:
    for name in parents:
        tree = tree[name]
    return tree


# -- from one revision to the next


def check_same_identity(run_key: str, stored: Config, wanted: Config) -> None:
    """Raises ConfigError naming every identity field in which a start differs from the run."""
    if fields := differing(stored, wanted, "identity"):
        raise ConfigError(f"run {run_key} exists with other identity fields: {listed(fields)}. They are what makes it "
                          "this run and cannot be amended: another run needs another --run-key.")


def check_same_training(run_key: str, stored: Config, wanted: Config, revision: int) -> None:
    """Raises ConfigError naming every training field in which a start differs from the run's current revision, with
    the command that would amend it, and the one that goes on without."""
    if fields := differing(stored, wanted, "training"):
        now = f", as amended by revision {revision}" if revision else ""
        raise ConfigError(
            f"run {run_key} exists with other training fields{now}: {listed(fields)}.\n"
            f"to train on with these values from the next step on: {amend_command(run_key, stored, wanted)}\n"
            f"to train on with the run's own: {shlex.join(['headway', 'train', '--run-key', run_key])}")


def check_amendment(run: RunDir, run_key: str, stored: Config, wanted: Config) -> None:
    """Raises ConfigError where the amended run could not do what it says: fewer steps than are claimed already,
    nothing to do for a run that has ended, or groups without the baseline or the rewards that they would be trained by.
    Every other training field can change at any step (changing-a-run.md 5)."""
    check_baseline_landed(run_key, (stored,), wanted)
    check_rewards_landed(run_key, (stored,), wanted)
    claimed = len(claimed_steps(run))
    if wanted.total_steps < claimed:
        raise ConfigError(f"total_steps: {claimed} steps of run {run_key} have their claim, and what is claimed is "
                          f"trained; use at least {claimed} (got {wanted.total_steps})")
    end = read_end(run, current_revision(run))
    if end is None:
        return
    if end.reason == "steps" and wanted.total_steps <= end.step:
        raise ConfigError(f"total_steps: all {end.step} steps of run {run_key} are done, and nothing would be trained "
                          f"by the amended settings; use more than {end.step} (got {wanted.total_steps})")
    if end.reason == "data" and not _more(wanted.data.epochs, stored.data.epochs):
        raise ConfigError(f"data.epochs: the data of run {run_key} ended after {end.step} steps, and nothing would be "
                          f"trained by the amended settings; use more than {stored.data.epochs}, or null for endless "
                          f"passes (got {wanted.data.epochs})")


def _more(epochs: int | None, before: int | None) -> bool:
    """Whether these are more passes; None = endless."""
    return before is not None and (epochs is None or epochs > before)


def put_revision(run: RunDir, stored: Config, wanted: Config) -> int:
    """Record `wanted` as the next revision, from the first step without a claim on. Returns the number of the revision
    that stands; nothing is recorded where no training field differs. For the owner, who holds the lock.

    Raises BrokenFile if somebody else was first with that number: then nobody knows which settings the run has.
    """
    changed, newest = differing(stored, wanted, "training"), current_revision(run)
    if not changed:
        return newest
    payload: dict[str, Any] = {
        "revision": newest + 1, "from_step": len(claimed_steps(run)),
        "changed": {name: list(pair) for name, pair in changed.items()}, "config": wanted.model_dump(mode="json"),
        "ts_us": time.time_ns() // 1000}
    if not put_if_absent(run.settings(newest + 1), to_json(payload)):
        raise BrokenFile(f"{run.settings(newest + 1)}: another start amended the run at the same moment; look at it, "
                         "and amend again if that is still wanted")
    return newest + 1


# -- in words


def listed(changed: Mapping[str, tuple[Any, Any]]) -> str:
    """`learner.lr is 0.0005, asked for 1.0; total_steps is 60, asked for 120`."""
    return "; ".join(f"{name} is {before!r}, asked for {after!r}" for name, (before, after) in changed.items())


def amend_command(run_key: str, stored: Config, wanted: Config) -> str:
    """The command that gives the run exactly these settings: one --set for each that differs from the stored ones.

    But for an address with a user in it: its password is shown nowhere."""
    words = ["headway", "train", "--run-key", run_key, "--amend"]
    for name in _to_be_set(stored, wanted):
        if name != "tracking.uri" or "@" not in str(wanted.tracking.uri):
            words += ["--set", f"{name}={_in_words(wanted, name)}"]
    return shlex.join(words)


def _to_be_set(stored: Config, wanted: Config) -> list[str]:
    """Fields that make `wanted` of `stored`: those that differ, and all of a part that is another variant."""
    names = [name for kind in ("training", "operational", "environment") for name in differing(stored, wanted, kind)]
    before, now = flatten(stored), flatten(wanted)
    for part, union in VARIANTS.items():
        old, new = (variants(union)[leaves[f"{part}.name"]] for leaves in (before, now))
        if old is not new:
            names += [name for name in now if name.startswith(f"{part}.") and name not in names]
    return [name for name in names if name in now]


def _in_words(config: Config, name: str) -> str:
    """A setting's value as `--set` reads it. JSON is YAML; text is left bare where YAML reads it as that very text."""
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, str):
        try:
            if yaml.safe_load(value) == value:
                return value
        except yaml.YAMLError:
            pass  # quoted, then
    return json.dumps(flatten(config)[name] if isinstance(value, tuple) else value)
