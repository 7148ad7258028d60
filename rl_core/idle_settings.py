"""Settings that were chosen and that nothing reads beside the others: refused by field, with what reads it.

A setting at its default was not chosen. Importable without torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rl_core.config import Config, LearnerConfig
from rl_core.correction_settings import DECOUPLED_CAP
from rl_core.errors import refuse
from rl_core.settings import Part

Reader = tuple[str, Callable[[LearnerConfig], bool]]
"""What reads a setting, and whether that is set."""
_KL: Reader = ("learner.kl.use=loss or reward", lambda learner: learner.kl.use != "none")
_TEACHER: Reader = ("learner.teacher.use", lambda learner: learner.teacher.use != "none")
_CRITIC: Reader = ("learner.advantage.name=gae", lambda learner: learner.advantage.name == "gae")
_ICEPOP: Reader = ("learner.correction.weights=token_icepop, sequence_icepop or geometric_icepop",
                   lambda learner: learner.correction.weights.endswith("_icepop"))
READ_BY: dict[str, Reader] = {  # field of `learner` -> its reader
    "advantage.normalize_by_std": ("learner.advantage.name=grpo", lambda learner: learner.advantage.name != "rloo"),
    "advantage.eps": ("learner.advantage.normalize_by_std, and another estimator than rloo",
                      lambda learner: learner.advantage.name != "rloo"
                      and getattr(learner.advantage, "normalize_by_std", True)),
    "loss.overlong_factor": ("learner.loss.truncated=penalty", lambda learner: learner.loss.truncated == "penalty"),
    "correction.cap": ("learner.correction.weights=token_truncate, sequence_truncate or geometric_truncate",
                       lambda learner: learner.correction.weights.endswith("_truncate")),
    "correction.icepop_low": _ICEPOP, "correction.icepop_high": _ICEPOP,
    "kl.estimator": _KL, "kl.coef": _KL, "kl.unbiased": _KL, "kl.target": _KL,
    "kl.horizon": ("learner.kl.target", lambda learner: learner.kl.target is not None),
    "reference.refresh_mix": ("learner.reference.refresh_every",
                              lambda learner: learner.reference.refresh_every is not None),
    "critic.lr": _CRITIC, "critic.weight_decay": _CRITIC, "critic.max_grad_norm": _CRITIC, "critic.clip": _CRITIC,
    "teacher.coef": _TEACHER,
    "teacher.estimator": ("learner.teacher.use=loss", lambda learner: learner.teacher.use == "loss"),
    "teacher.top_k": ("learner.teacher.use=forward_topk", lambda learner: learner.teacher.use == "forward_topk"),
    "resampling_power": ("learner.resampling=pow", lambda learner: learner.resampling == "pow"),
}


def check_idle(config: Config) -> None:
    """Raises ConfigError for a setting of the learner that is not at its default, and that nothing reads."""
    learner = config.learner
    cap, default = _value(learner, "correction.cap")
    if learner.loss.name == "decoupled_ppo" and cap != default:
        refuse("learner.correction.cap", cap, f"decoupled_ppo cuts its own weights at {DECOUPLED_CAP:g}, whatever this "
               "is; leave it out, or use learner.loss.name=ppo_clip with learner.correction.weights=token_truncate, "
               "which is the same loss with the cap that you set")
    for field, (reader, is_set) in READ_BY.items():
        value, default = _value(learner, field)
        if value != default and not is_set(learner):
            refuse(f"learner.{field}", value, f"nothing reads it without {reader}; set that, too, or leave it at "
                   f"{'null' if default is None else default}")


def _value(learner: LearnerConfig, field: str) -> tuple[Any, Any]:
    """`(value, default)` of a field below `learner`; None twice where the variant that is set has none of that name."""
    *parents, leaf = field.split(".")
    part: Part = learner
    for name in parents:
        part = getattr(part, name)
    info = type(part).model_fields.get(leaf)
    return (None, None) if info is None else (getattr(part, leaf), info.default)
