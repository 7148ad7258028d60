"""Faults in the processes of a run, put there from outside.

A fault in the code is put in by a `sitecustomize` on the PYTHONPATH of the command, which its actors inherit: the
module gets it right after its import, and the code under test knows nothing of it. The others are what an operating
system does: a process that is stopped, a file system that is full, a server that says nothing.
"""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SITE = """
import importlib.util
import sys


def fault(module):
{body}


class Importer:
    def find_spec(self, name, path=None, target=None):
        if name != {module!r}:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        begin = spec.loader.exec_module

        def exec_module(module):
            begin(module)
            fault(module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Importer())
"""
SILENT_ENGINE = """
import os, time
turn = module.TorchEngine._turn

def stuck(self):
    while os.path.exists({flag!r}):
        time.sleep(0.05)
    return turn(self)

module.TorchEngine._turn = stuck
"""
"""In rl_core.rollout.torch_engine: takes requests, weights and cancels, and answers none of them while the file is
there."""
ENGINE_DIES = """
import os
living = module.TorchEngine._turn

def turn_or_die(self):
    if self._rows.n and os.path.exists({flag!r}):
        os.unlink({flag!r})
        raise RuntimeError("the device is lost")
    return living(self)

module.TorchEngine._turn = turn_or_die
"""
"""In rl_core.rollout.torch_engine: the engine's thread ends in the middle of its answers, once for each time the file
is made, and the process around it lives."""
PREFECT_DIES = """
import json, os, signal
ask = module.get_client

def get_client(*args, **kwargs):
    with open({state!r}) as state:
        os.kill(json.load(state)["processes"]["prefect"]["pid"], signal.SIGKILL)
    return ask(*args, **kwargs)

module.get_client = get_client
"""
"""In tasks.attempts: the private server is killed in the moment in which a start asks it for the one before."""

PREFECT_IS_GONE = """
import json, os, signal
with open({state!r}) as state:
    os.kill(json.load(state)["processes"]["prefect"]["pid"], signal.SIGKILL)
"""
"""In flows.train: the private server is killed before the flow run begins."""


def python_path(directory: Path, module: str, code: str) -> str:
    """A PYTHONPATH that puts the code into this module, which it finds as `module`."""
    directory.mkdir(parents=True, exist_ok=True)
    body = textwrap.indent(code.strip(), "    ")
    (directory / "sitecustomize.py").write_text(SITE.format(body=body, module=module))
    return os.pathsep.join(filter(None, (str(directory), os.environ.get("PYTHONPATH"))))


@contextmanager
def small_file_system(directory: Path, megabytes: int) -> Iterator[Path]:
    """A file system of this size at the directory, which is made. Needs root."""
    directory.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(directory)], check=True)
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


def fill(directory: Path) -> Path:
    """A file that takes all that is left of its file system; removing it makes room."""
    filler = directory / "filler"
    with open(filler, "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(2**20))
        except OSError:
            pass
        try:
            while True:
                file.write(bytes(512))
        except OSError:
            return filler


def take_no_files(pid: int, bytes_: int = 0) -> None:
    """From now on each write of this process beyond so many bytes of a file fails (EFBIG)."""
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (bytes_, bytes_))


@contextmanager
def silent_server() -> Iterator[str]:
    """Address of a server that takes every connection and never says anything."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(64)  # the kernel takes connections, nobody reads them
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
