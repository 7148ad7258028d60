"""How Headway runs somewhere: presets, schedules, clusters. Data and a loader, no logic."""

from importlib.util import find_spec
from pathlib import Path

# `flows` and `tasks` are ordinary words: a directory of that name in the working directory comes before the installed
# package, and a run would be a mixture of two trees. So the packages of Headway must come from one place.
_TREE = Path(__file__).resolve().parent.parent
for _name in ("deployments", "flows", "tasks", "rl_core"):
    _spec = find_spec(_name)
    _places = [] if _spec is None else [Path(place).resolve() for place in _spec.submodule_search_locations or ()]
    if _places != [_TREE / _name]:
        _found = ", ".join(map(str, _places)) or "nowhere"
        raise ImportError(f"Headway's package `{_name}` belongs to {_TREE} but was found in {_found}; run Headway from "
                          f"another directory, or rename your own `{_name}`")
