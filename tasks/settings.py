"""The stored settings of a run, which a command without `--preset` goes on from. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass

from rl_core.config import Config
from rl_core.errors import ConfigError
from rl_core.revisions import Revision, config_of, current_revision, read_revision
from rl_core.run_dir import RunDir
from rl_core.run_identity import read_identity
from tasks.paths import run_dir


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """The settings that a run has now: `Stored(preset="tiny-cpu", config=..., revision=1, amendment=...)`."""

    preset: str
    """That the run began with."""
    config: Config
    """As its current revision has them: operational and environment ones are those of the start that wrote it."""
    revision: int
    amendment: Revision | None
    """The current revision; None for a run that was never amended."""


def stored_settings(run_key: str) -> Stored | None:
    """What the run of this key has stored; None where there is no run yet.

    Raises ConfigError for a key that is no plain name or a directory that cannot be read, BrokenFile.
    """
    return settings_in(run_dir(run_key))


def settings_in(run: RunDir) -> Stored | None:
    """`stored_settings` of a run directory."""
    try:
        identity = read_identity(run)
        revision = current_revision(run)
        return Stored(preset=identity.preset, config=config_of(run, revision), revision=revision,
                      amendment=read_revision(run, revision) if revision else None)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{run.root}: cannot be read ({error.strerror}); set HEADWAY_HOME to a directory that can be "
                          "used") from error
