"""The weights that a start without a learner offers to its rollout workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from torch import Tensor

from rl_core.config import Config
from rl_core.errors import ConfigError, WeightsDamaged
from rl_core.kept_weights import load_stock
from rl_core.learner.adapter import adapter_weights, add_adapter
from rl_core.run_dir import RunDir
from rl_core.types import WeightVersion
from rl_core.versions import read_versions
from rl_core.weights import load_weights, publish


def offered_version(run: RunDir, config: Config, attempt: int) -> WeightVersion:
    """The run's newest version, its bytes in place; of a run that has trained nothing that of the initial model, which
    is published as the learner would.

    Raises ConfigError where the bytes of later weights are gone: only a learner makes them again.
    """
    newest = max(read_versions(run).values(), key=lambda version: (version.idx, version.v), default=None)
    if newest is None or newest.step == 0:
        model, lora = load_stock(run.model), config.learner.lora
        if lora.publish == "adapter":
            add_adapter(model, lora, seed=config.seed, directory=run.model)
        named = dict(cast("Mapping[str, Tensor]", model.named_parameters()))
        tensors = {name: parameter.detach() for name, parameter in (
            adapter_weights(named.items()) if lora.publish == "adapter" else named).items()}
        return publish(run, tensors, 0, 0, attempt, config)
    try:
        load_weights(run.weights(newest.v), newest)
    except WeightsDamaged as error:
        raise ConfigError(f"the newest weights of the run cannot be served ({error}); headway train --run-key "
                          f"{run.root.name} makes them again from the newest checkpoint") from error
    return newest
