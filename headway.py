"""The `headway` command: puts Headway's own packages first on the path, then runs flows/cli.py.

`flows` and `tasks` are ordinary words. `python -m` puts the working directory first on the path, and PYTHONPATH what is
named there: a directory that has packages of these names would be taken for Headway. Standard library only.
"""

from __future__ import annotations

import os
import sys

OURS = ("deployments", "flows", "rl_core", "tasks")


def own_packages_first(path: list[str], tree: str) -> list[str]:
    """The path with every place behind `tree` that has a package of our names; the rest keeps its order.

    `own_packages_first(["/project", "/lib"], "/lib")`, where /project has a `tasks` -> `["/lib", "/project"]`.
    """
    foreign = [place for place in path if os.path.abspath(place) != tree
               and any(os.path.isdir(os.path.join(place or os.curdir, name)) for name in OURS)]
    others = [place for place in path if place not in foreign]
    return [*others, *([] if tree in others else [tree]), *foreign]


def main() -> None:
    """Entry point of the command."""
    sys.path[:] = own_packages_first(sys.path, os.path.dirname(os.path.abspath(__file__)))
    from flows.cli import process

    process()


if __name__ == "__main__":
    main()
