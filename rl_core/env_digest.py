"""What beside claim and state the bits of a training step depend on (docs/experience-store.md 3.10).

Two records with one `env_digest` are bit-identical replays of each other; otherwise the fields that differ say why only
a tolerance can be asked for.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
import transformers
import xxhash

from rl_core.config import Config
from rl_core.hooks.loading import learner_hooks
from rl_core.source import source_commit


@cache
def cpu_model() -> str:
    """Name of the processor, `unknown` where the system does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def environment(config: Config, ranks: int) -> dict[str, str]:
    """Fields of the environment by name, and `env_digest` over all of them."""
    learner = config.learner
    device = learner.device if learner.device == "cpu" else f"cuda {torch.cuda.get_device_name()}"
    backends = cast(Any, torch.backends)
    fields = {
        "python": platform.python_version(), "torch": str(torch.__version__), "transformers": transformers.__version__,
        "mkl": str(backends.mkl.is_available()), "onednn": str(backends.mkldnn.is_available()),
        "blas": _blas(), "cpu": cpu_model(), "isa": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()), "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        "dtype": learner.dtype, "engine_dtype": config.rollout.engine.dtype, "attention": "packed sdpa",
        "ranks": str(ranks), "device": device,
        "token_budget": str(learner.token_budget), "logits_chunk": str(learner.logits_chunk),
        "share_prefixes": str(learner.share_prefixes), "commit": source_commit(),
    }
    if hooks := learner_hooks(config):
        fields["hooks"] = hooks
    text = "\n".join(f"{name}={fields[name]}" for name in sorted(fields))
    return {"env_digest": xxhash.xxh3_128_hexdigest(text.encode()), **fields}


def as_recorded(config: Config, recorded: Mapping[str, str]) -> Config:
    """The settings with threads, dtypes, budgets and packing of a recorded environment; the rest is as it is here."""
    learner, engine = config.learner, config.rollout.engine
    same = {"threads": int(recorded.get("threads", learner.threads)), "dtype": recorded.get("dtype", learner.dtype),
            "token_budget": int(recorded.get("token_budget", learner.token_budget)),
            "logits_chunk": int(recorded.get("logits_chunk", learner.logits_chunk)),
            "share_prefixes": recorded.get("share_prefixes", str(learner.share_prefixes)) == "True"}
    engine = engine.model_copy(update={"dtype": recorded.get("engine_dtype", engine.dtype)})
    return config.model_copy(update={"learner": learner.model_copy(update=same),
                                     "rollout": config.rollout.model_copy(update={"engine": engine})})


def differing_fields(before: dict[str, str], now: dict[str, str]) -> dict[str, tuple[str, str]]:
    """Fields of two environments that differ: name -> (before, now). Empty: bit-identity may be asked for."""
    return {name: (before.get(name, "absent"), now.get(name, "absent"))
            for name in sorted({*before, *now} - {"env_digest"}) if before.get(name) != now.get(name)}


@cache
def _blas() -> str:
    """MKL and oneDNN versions as torch was built with them."""
    lines = torch.__config__.show().splitlines()  # pyright: ignore[reportUnknownMemberType]  # untyped in torch
    wanted = ("Math Kernel Library", "MKL-DNN", "oneDNN", "OpenBLAS")
    return "; ".join(line.strip(" -") for line in lines if any(word in line for word in wanted)) or "unknown"
