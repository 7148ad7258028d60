"""Presets are YAML files in deployments/presets; a path to a YAML file works as well."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from rl_core.errors import ConfigError


def preset_names() -> list[str]:
    """Names that `--preset` takes, sorted."""
    return sorted(p.name.removesuffix(".yaml") for p in files("deployments").joinpath("presets").iterdir()
                  if p.name.endswith(".yaml"))


def load_preset(name: str) -> dict[str, Any]:
    """Settings of a preset by name, or of a YAML file by path. Raises ConfigError naming what is wrong."""
    if name.endswith((".yaml", ".yml")):
        path = Path(name)
        if not path.is_file():
            raise ConfigError(f"--preset {name}: no such file")
        text = path.read_text()
    elif name in preset_names():
        text = files("deployments").joinpath("presets", f"{name}.yaml").read_text()
    else:
        known = ", ".join(preset_names())
        raise ConfigError(f"--preset {name}: no such preset; there are {known}, or give a .yaml file")
    try:
        settings = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--preset {name}: not YAML ({error})") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"--preset {name}: holds no settings (got {type(settings).__name__})")
    return settings
