"""Presets are YAML files in deployments/presets; a path to a YAML file works as well."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from rl_core.config import Config
from rl_core.errors import ConfigError
from rl_core.plan import merge, resolve

if TYPE_CHECKING:
    from tasks.night_files import Night, NightRun

DEFAULT = "tiny-cpu"
"""What a new run begins with if nothing else is said."""


def base_of(preset: str | None, run_key: str | None, shards_from: str | None = None,
            overrides: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
    """Name of the preset, and the settings that `--set` goes on top of (changing-a-run.md 1).

    Those of the preset that is named; without one, what the run of this key has stored, or for a new run those of the
    run whose shards it trains on (`shards_from`), or DEFAULT. Raises ConfigError, BrokenFile.
    """
    name, settings = _base_of(preset, run_key, shards_from, overrides or {})
    if shards_from is not None:
        settings["data"] = {**settings.get("data", {}), "shards_from": shards_from}
    return name, settings


def _base_of(preset: str | None, run_key: str | None, shards_from: str | None,
             overrides: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    if preset is None and run_key is not None:
        from tasks.settings import stored_settings

        if (stored := stored_settings(run_key)) is not None:
            settings = stored.config.model_dump(mode="json")
            settings["validation"]["only"] = False  # of the one start that asks for it
            return stored.preset, settings
    if preset is None and shards_from is not None:
        from tasks.offline import base_settings

        return base_settings(shards_from, overrides)
    name = preset or DEFAULT
    return name, load_preset(name)


def settings_of(night: Night, run: NightRun) -> tuple[str, Config]:
    """Name of the preset and settings of a night's run. Once it is begun its own hold, whatever became of the preset.

    Raises ConfigError, BrokenFile.
    """
    from tasks.paths import run_dir

    begun = run_dir(run.run_key).run_json.exists()
    preset, settings = base_of(None if begun else night.preset, run.run_key)
    return preset, resolve(settings, {} if begun else run.overrides)


def nested(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Overrides as a tree: `{"learner.lr": 1e-4}` is `{"learner": {"lr": 1e-4}}`, as with `--set`."""
    tree: dict[str, Any] = {}
    for key, value in overrides.items():
        branch: Any = value
        for part in reversed(key.split(".")):
            branch = {part: branch}
        tree = merge(tree, branch)
    return tree


def preset_names() -> list[str]:
    """Names that `--preset` takes, sorted."""
    return sorted(p.name.removesuffix(".yaml") for p in files("deployments").joinpath("presets").iterdir()
                  if p.name.endswith(".yaml"))


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice in one group: YAML would take the last one and forget the others."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"the key {key.value!r} stands twice in one group",
                                           problem_mark=key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def load_preset(name: str) -> dict[str, Any]:
    """Settings of a preset by name, or of a YAML file by path. Raises ConfigError naming what is wrong."""
    if name.endswith((".yaml", ".yml")):
        path = Path(name)
        if not path.is_file():
            raise ConfigError(f"--preset {name}: no such file")
        try:
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--preset {name}: cannot be read ({error})") from error
    elif name in preset_names():
        text = files("deployments").joinpath("presets", f"{name}.yaml").read_text()
    else:
        known = ", ".join(preset_names())
        raise ConfigError(f"--preset {name}: no such preset; there are {known}, or give a .yaml file")
    try:
        settings = yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark if "stream end" not in str(error.problem) else error.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"--preset {name}{line}: not YAML ({error.problem})") from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"--preset {name}: not YAML ({error})") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"--preset {name}: holds no settings (got {type(settings).__name__}); write them as in "
                          "`learner: {lr: 1.0e-4}`")
    return settings
