"""`rollout.no_spread=drop` beside what learns from a group whose rewards are all equal. Importable without torch.

A claim judges a group by what its answers scored. Where the estimator compares answers with anything but the scores of
their own group, such a group is learned from like any other (algorithms.md 3).
"""

from __future__ import annotations

from rl_core.config import Config
from rl_core.errors import refuse

HAS_A_GRADIENT = {
    "remax": "remax compares answers with a greedy one",
    "gae": "gae compares answers with a critic's values",
    "reinforce_plus_plus": "reinforce_plus_plus compares answers with those of the whole claim",
    "gdpo": "gdpo compares answers part by part, and parts may differ where their sum does not",
}
"""Estimators under which a group without spread is worth as much as others, each with its reason."""
HAS_A_LITTLE = {
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline gives such a group what whitening takes off, the "
                                    "same for all its answers",
    "optimal_token_baseline": "optimal_token_baseline gives such a group an advantage where only its longer answers go "
                              "on",
    "tir_optimal_token_baseline": "tir_optimal_token_baseline gives such a group an advantage where only its longer "
                                  "answers go on",
    "function": "an estimator of your own may learn from such a group",
}
"""Estimators under which it has a small gradient, or one that is not known."""


def check_no_spread(config: Config) -> None:
    """Raises ConfigError where groups would be left out that are learned from like others, or all groups."""
    if config.rollout.no_spread == "keep":
        return
    name = config.learner.advantage.name
    if name in HAS_A_GRADIENT:
        beside = ", or a rollout.group_filter, which sees the parts" if name == "gdpo" else ""
        refuse("rollout.no_spread", "drop", f"{HAS_A_GRADIENT[name]}, so that a group whose rewards are all equal has "
               f"a gradient, too; use keep{beside}")
    if config.group_size == 1:
        refuse("rollout.no_spread", "drop", "a group of one has no spread, and every group would be left out "
               "(group_size = 1); use keep")


def no_spread_warnings(config: Config) -> tuple[str, ...]:
    """What groups without spread would still teach that are left out: a sentence each, for the plan."""
    if config.rollout.no_spread == "keep":
        return ()
    learner, told = config.learner, list[str]()
    if learner.advantage.name in HAS_A_LITTLE:
        told.append(f"leaves out groups whose rewards are all equal, and {HAS_A_LITTLE[learner.advantage.name]}")
    if learner.kl.use == "reward":
        told.append("is judged by what answers scored, before learner.kl.use=reward takes the KL from it: groups that "
                    "differ by the KL alone are left out")
    if learner.loss.truncated == "penalty":
        told.append("is judged by what answers scored, before learner.loss.truncated=penalty takes from it: groups "
                    "that differ by their lengths alone are left out")
    if learner.teacher.use != "none":
        told.append(f"leaves out groups whose rewards are all equal, and learner.teacher.use={learner.teacher.use} "
                    "would teach at their tokens, too; where all answers have the same reward no group is left")
    return tuple(f"rollout.no_spread: drop {each}" for each in told)
