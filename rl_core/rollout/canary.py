"""Asks an engine, right behind a swap, what the canary asks (lora/canary.py): which model answers.

For runs that train an adapter. An engine that installs a version and acknowledges its digest may still sample from the
base model: the digest is of the bytes that it read, and this is of what it does with them.
"""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np

from rl_core.config import Config
from rl_core.errors import DeadlinePassed, WeightsDamaged
from rl_core.lora.canary import Probe, Seen, check_seen, read_probe, seen
from rl_core.rollout.engine import Engine
from rl_core.rollout.sglang.agreement import BOUND
from rl_core.types import GenerateRequest, Sampling, WeightVersion

LOG = logging.getLogger("headway.rollout")
ANSWER_S = 60.0
"""Longest wait for one token behind a short prompt; other requests run meanwhile."""


def check_adapter_served(engine: Engine, version: WeightVersion, weights_dir: Path, config: Config) -> Seen | None:
    """Compare the engine, which has just taken `version`, with the learner; None where there is no adapter, or where
    the initial weights came without a probe.

    Raises AdapterNotServed, EngineMismatch; WeightsDamaged for a later version without a probe.
    """
    if not config.learner.lora.used:
        return None
    probe = read_probe(weights_dir)
    if probe is None:
        if version.step:
            raise WeightsDamaged(f"{weights_dir}: version {version.v} has an adapter and no probe of it")
        return None
    precision = precision_of(config)
    found = seen(probe, ask(engine, probe, version), precision)
    check_seen(found, BOUND[precision], f"the engine that has taken version {version.v} (step {version.step})")
    LOG.debug("version %d: %d of %d prompts tell adapter and base apart, engine and learner are %.2g nats apart",
              version.v, found.deciding, len(probe.places), found.gap)
    return found


def precision_of(config: Config) -> str:
    """The coarser dtype of engine and learner."""
    dtypes = {config.rollout.engine.dtype, config.learner.dtype}
    return "bfloat16" if "bfloat16" in dtypes else "float32"


def ask(engine: Engine, probe: Probe, version: WeightVersion) -> list[tuple[int, float]]:
    """The most likely token behind each prompt of the probe, and its log-prob. Raises what the engine raises, and
    DeadlinePassed."""
    sampling = Sampling(temperature=0.0, max_new_tokens=1)
    futures = [engine.submit(GenerateRequest(
        request_id=f"canary-{version.v}-{i}", token_ids_P=np.array(place.prompt, np.int32), sampling=sampling, seed=0,
        trained=False)) for i, place in enumerate(probe.places)]
    answers: list[tuple[int, float]] = []
    for future in futures:
        try:
            answer = future.result(ANSWER_S)
        except TimeoutError as error:
            raise DeadlinePassed(f"the engine gives no answer to the canary of version {version.v} in {ANSWER_S:g} s"
                                 ) from error
        answers.append((int(answer.token_ids_L[0]), float(answer.logprobs_L[0])))
    return answers
