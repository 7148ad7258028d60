"""Which weights a run has on its disk, and reading them while the run may prune them: checkpoints, publications, the
initial model. Reads the run directory and writes nothing in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor

from rl_core.best import Best, best_by_field, known_fields
from rl_core.checkpoint import MANIFEST, at_or_before, checkpoints, read_parameters
from rl_core.errors import BrokenFile, ConfigError, WeightsDamaged
from rl_core.lora.settings import LoraConfig
from rl_core.lora.tensors import is_adapter, merged
from rl_core.revisions import config_of
from rl_core.run_dir import RunDir
from rl_core.versions import read_version, read_versions
from rl_core.weights import WEIGHTS_FILE, digest_tensors, load_weights

Kind = Literal["checkpoint", "publication", "initial model"]
KINDS: tuple[Kind, ...] = ("checkpoint", "publication", "initial model")
"""In the order in which weights of one step are tried."""
TRIES = 5
"""How often weights that were pruned while they were read are looked for again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Weights that a run has on its disk: `Source(step=40, kind="checkpoint")`."""

    step: int
    """Training steps behind them."""
    kind: Kind
    v: int | None = None
    """Version, of a publication."""


@dataclass(frozen=True, slots=True)
class Kept:
    """Weights that were read: float32 tensors on the host by name, tied ones once."""

    source: Source
    tensors: dict[str, Tensor]
    """Mapped files: once opened they may be pruned."""
    digest: str
    """Of the tensors."""
    known_as: str
    """Digest that the run's publications of them have: of the adapter where they hold that alone."""
    judged: Best | None
    """The best validation, where that was asked for. Its step is another one than the source's where no weights of it
    are left."""


def sources(run: RunDir) -> list[Source]:
    """All weights that can be read now, by step; of one step checkpoints first, then publications, newest first."""
    found = [Source(step=0, kind="initial model")] if (run.model / "config.json").exists() else []
    found += [Source(step=n, kind="checkpoint") for n in checkpoints(run) if (run.checkpoint(n) / MANIFEST).exists()]
    found += [Source(step=version.step, kind="publication", v=version.v) for version in read_versions(run).values()
              if (run.weights(version.v) / WEIGHTS_FILE).exists()]
    return sorted(found, key=lambda source: (source.step, KINDS.index(source.kind), -(source.v or 0)))


def described(there: Sequence[Source]) -> str:
    """For people: `0 (initial model); 20, 40 (checkpoint); 40, 41 (publication)`."""
    words: list[str] = []
    for kind in reversed(KINDS):
        steps = sorted({source.step for source in there if source.kind == kind})
        if steps:
            words.append(f"{', '.join(map(str, steps))} ({kind})")
    return "; ".join(words) or "none"


def read_kept(run: RunDir, *, step: int | None = None, best: str | None = None) -> Kept:
    """Weights behind `step` training steps; or of the best validation by the field `best`; or the newest.

    The best: those that were validated, else the checkpoint at or before them. Weights with a damaged file are taken
    from elsewhere if the run has them twice. Raises ConfigError, listing what there is, and BrokenFile.
    """
    judged = None if best is None else _judged(run, best)
    damage: list[str] = []
    wanted = -1
    for _ in range(TRIES):
        there = sources(run)
        wanted = _pick(run, there, step, best, judged)
        tried = [source for source in there if source.step == wanted]
        damage.clear()
        for source in tried:
            try:
                return Kept(source, *_tensors(run, source), judged)
            except BrokenFile as error:
                damage.append(str(error))
        if set(tried) <= set(sources(run)):  # else the run has pruned them meanwhile
            break
    raise BrokenFile(f"weights behind {wanted} training steps cannot be read ({'; '.join(damage)}); there are steps "
                     f"{described(sources(run))}: give another --step")


def load_stock(directory: Path) -> Any:
    """The stock Hugging Face model of a directory with float32 parameters, on the host; no code of the directory."""
    import transformers

    transformers.logging.disable_progress_bar()
    return cast(Any, transformers.AutoModelForCausalLM).from_pretrained(
        directory, dtype=torch.float32, local_files_only=True, trust_remote_code=False)


def _judged(run: RunDir, field: str) -> Best:
    judged = best_by_field(run, field)
    if judged is None:
        raise ConfigError(f"--best: no validation of {run.root} has a number {field!r}; there are "
                          f"{', '.join(known_fields(run)) or 'no validations yet'}")
    return judged


def _pick(run: RunDir, there: Sequence[Source], step: int | None, best: str | None, judged: Best | None) -> int:
    """The step to read, of those that are there. Raises ConfigError listing them."""
    steps = sorted({source.step for source in there})
    if not steps:
        raise ConfigError(f"{run.root}: has no weights yet; wait until the run has set up its model")
    if judged is not None:
        made = [source.step for source in there if source.kind == "checkpoint"]
        found = judged.step if judged.step in steps else at_or_before(made, judged.step)
        if found is None:
            raise ConfigError(f"--best: the best {best} is {judged.value:g}, after {judged.step} training steps; no "
                              f"checkpoint at or before it is left, there are steps {described(there)}")
        return found
    if step is not None and step not in steps:
        raise ConfigError(f"--step {step}: {run.root} has no weights behind {step} training steps; there are steps "
                          f"{described(there)}")
    return steps[-1] if step is None else step


def _tensors(run: RunDir, source: Source) -> tuple[dict[str, Tensor], str, str]:
    """All weights, their digest, and that of their publication."""
    if source.kind == "checkpoint":
        state, tensors = read_parameters(run, source.step)
        return _whole(run, tensors, state.weights_digest)
    if source.v is not None:
        known = read_version(run, source.v)
        return _whole(run, load_weights(run.weights(source.v), known), known.digest)
    tensors = _initial(run)
    digest = digest_tensors(tensors.items())
    lora = _lora(run)
    if lora.publish == "adapter":  # what was published of it is the adapter, which does nothing yet
        return tensors, digest, ""
    if any(known.step == 0 and known.digest != digest for known in read_versions(run).values()):
        raise WeightsDamaged(f"{run.model}: is not the model that the run published at its start")
    return tensors, digest, digest


def _initial(run: RunDir) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in load_stock(run.model).named_parameters()}


def _lora(run: RunDir) -> LoraConfig:
    """Of the run; a directory without settings is of one that trains all parameters."""
    return config_of(run, 0).learner.lora if run.settings(0).exists() else LoraConfig()


def _whole(run: RunDir, tensors: dict[str, Tensor], digest: str) -> tuple[dict[str, Tensor], str, str]:
    """With an adapter those of the initial model, too."""
    if not is_adapter(tensors):
        return tensors, digest, digest
    lora = _lora(run)
    whole = merged(_initial(run), tensors, lora.scale)
    found = digest_tensors(whole.items())
    return whole, found, digest if lora.publish == "adapter" else found
