"""`make bench`: one JSON line per figure (name, value, unit, bar, ok); exit status 1 when a bar is missed.

    python tests/benchmarks/run.py                      every module beside this file that has `figures()`, but
                                                        for those that take long and say ONLY_BY_NAME
    python tests/benchmarks/run.py store quickstart     these modules only (`make bench BENCH=store`)

`figures()` yields dicts; ratios are taken inside one run, since absolute numbers move with the machine. A figure that
could not be measured has `value` null, `ok` null and a `reason`.
"""

from __future__ import annotations

import json
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
KEYS = ("name", "value", "unit", "bar", "ok")


def load(path: Path) -> Any:
    """Import one file by its path."""
    spec = spec_from_file_location(f"benchmark_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def main(names: list[str]) -> int:
    """Print the figures of the named modules; 0 when every bar that was measured is met."""
    sys.path.insert(0, str(HERE.parents[1]))
    there = {path.stem: path for path in sorted(HERE.glob("*.py")) if path.name != "run.py"}
    for unknown in set(names) - set(there):
        print(f"no benchmark {unknown!r}; there are {', '.join(there)}", file=sys.stderr)
        return 2
    missed = False
    for name in names or there:
        module = load(there[name])
        if not hasattr(module, "figures") or (not names and getattr(module, "ONLY_BY_NAME", False)):
            continue
        for figure in module.figures():
            assert all(key in figure for key in KEYS), figure
            print(json.dumps(figure), flush=True)
            missed |= figure["ok"] is False
    return int(missed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
