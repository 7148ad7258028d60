"""Which models beside the policy a step's settings ask for, and what of it makes no sense. Importable without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from rl_core.config import LearnerConfig
from rl_core.errors import refuse

Role = Literal["reference", "critic", "teacher"]
ROLES: tuple[Role, ...] = ("reference", "critic", "teacher")


def asked_roles(learner: LearnerConfig) -> frozenset[Role]:
    """The roles that these settings need."""
    needed: dict[Role, bool] = {"reference": learner.kl.use != "none", "critic": learner.advantage.name == "gae",
                                "teacher": learner.teacher.use != "none"}
    return frozenset(role for role, needs in needed.items() if needs)


def role_paths(learner: LearnerConfig) -> dict[Role, str]:
    """The directories that roles are given, by role; a role without one is made of the initial model."""
    given: dict[Role, str | None] = {"reference": learner.reference.path, "critic": learner.critic.path,
                                     "teacher": learner.teacher.path}
    return {role: path for role, path in given.items() if path is not None}


def policy_learns(learner: LearnerConfig, step: int) -> bool:
    """Whether the policy is updated in this training step, or the critic alone."""
    return "critic" not in asked_roles(learner) or step >= learner.critic.warmup_steps


def is_base(learner: LearnerConfig) -> bool:
    """Whether the reference policy is the base under the policy's adapter, so that no second copy is loaded."""
    return learner.lora.used and learner.reference.path is None


def held_role_bytes(of_roles: Mapping[str, int]) -> int:
    """What all ranks together hold of the roles (bytes of their parameters): of a critic gradients and moments, too."""
    return sum(size * (4 if role == "critic" else 1) for role, size in of_roles.items())


def saved_role_bytes(learner: LearnerConfig, of_roles: Mapping[str, int]) -> int:
    """What a checkpoint holds of the roles: a critic with two moments, a reference that is refreshed."""
    refreshed = of_roles.get("reference", 0) if learner.reference.refresh_every is not None else 0
    return 3 * of_roles.get("critic", 0) + refreshed


def role_words(learner: LearnerConfig) -> str:
    """`critic (initial model), teacher (./teacher)`"""
    asked, paths = asked_roles(learner), role_paths(learner)
    made_of: dict[Role, str] = {"reference": "the base under the adapter"} if is_base(learner) else {}
    return ", ".join(f"{role} ({paths.get(role, made_of.get(role, 'initial model'))})" for role in ROLES
                     if role in asked)


def check_roles(learner: LearnerConfig) -> None:
    """Raises ConfigError for roles that nothing asks for, and for what they cannot do."""
    asked, reference, kl = asked_roles(learner), learner.reference, learner.kl
    if reference.path is not None and "reference" not in asked:
        refuse("learner.reference.path", reference.path, "nothing is taken against the reference policy; set "
               "learner.kl.use, or leave it out")
    if reference.refresh_every is not None and reference.path is not None:
        refuse("learner.reference.refresh_every", reference.refresh_every, "the policy's weights would take the place "
               "of those of learner.reference.path; leave one of the two out")
    if reference.refresh_every is not None and "reference" not in asked:
        refuse("learner.reference.refresh_every", reference.refresh_every, "there is no reference policy; set "
               "learner.kl.use, too")
    if learner.critic.path is not None and "critic" not in asked:
        refuse("learner.critic.path", learner.critic.path, "no estimator reads a critic's values; set "
               "learner.advantage.name=gae, or leave it out")
    if learner.critic.warmup_steps and "critic" not in asked:
        refuse("learner.critic.warmup_steps", learner.critic.warmup_steps, "there is no critic that could learn "
               "alone; set learner.advantage.name=gae, or leave it out")
    if "teacher" in asked and learner.teacher.path is None:
        refuse("learner.teacher.path", None, f"learner.teacher.use={learner.teacher.use} needs the directory of a "
               "teacher")
    if learner.teacher.path is not None and "teacher" not in asked:
        refuse("learner.teacher.path", learner.teacher.path, "nothing is learned from the teacher; set "
               "learner.teacher.use, or leave it out")
    if kl.use == "reward":
        _check_kl_reward(learner)


def _check_kl_reward(learner: LearnerConfig) -> None:
    name = learner.advantage.name
    if learner.loss.proximal == "loglinear":
        refuse("learner.kl.use", "reward", "is reckoned from the proximal policy's log-probs before the first update, "
               "and learner.loss.proximal=loglinear makes no pass for them; use recompute, or learner.kl.use=loss")
    if name == "gdpo":
        refuse("learner.kl.use", "reward", "gdpo normalises each part of the reward by itself, and the KL is no part; "
               "use learner.kl.use=loss")
    if name == "maxrl":
        refuse("learner.kl.use", "reward", "maxrl is for rewards of at least 0, and the KL takes from them; use "
               "learner.kl.use=loss")
