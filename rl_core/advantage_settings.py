"""Settings of the advantage estimators: one class for those that take the same ones, chosen by `name`.

The estimator of a name is in the file of that name in rl_core/learner/advantages. Importable without torch.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from rl_core.settings import Part, training
from rl_core.variants import named


class GroupCommon(Part):
    """What every estimator has that compares an answer with those of its group."""

    group_of_one: Literal["zero", "raw"] = training("zero", "Advantage of a group of one: 0, or its reward.")


class GroupAdvantage(GroupCommon):
    """grpo and rloo: the reward against those of its group."""

    name: Literal["grpo", "rloo"] = training("grpo", "Estimator (algorithms.md).")
    normalize_by_std: bool = training(True, "grpo: divide by the group's standard deviation; false = Dr.GRPO.")
    eps: float = training(1e-6, "Added to the standard deviation.", gt=0)


class BestOfGroupAdvantage(GroupCommon):
    """grpo_passk: only the best answer of a group, by how far it is ahead of the second best."""

    name: Literal["grpo_passk"] = training("grpo_passk", "Estimator (algorithms.md).")
    normalize_by_std: bool = training(True, "Divide by the group's standard deviation.")
    eps: float = training(1e-6, "Added to the standard deviation.", gt=0)


class PartWeight(Part):
    """Weight of one reward part: `PartWeight(part="format", weight=0.5)`."""

    part: str = training(..., "Name of the reward part.", min_length=1)
    weight: float = training(1.0, "Its weight in the sum.")


class PartsAdvantage(GroupCommon):
    """gdpo: every reward part normalised by itself, then summed."""

    name: Literal["gdpo"] = training("gdpo", "Estimator (algorithms.md).")
    eps: float = training(1e-6, "Added to the standard deviation.", gt=0)
    parts: tuple[PartWeight, ...] = training(
        (), "Reward parts and their weights, as in [{part: format, weight: 0.5}]; empty = `main` and scoring.parts at "
        "their weights, or without those all parts that the reward returns, weight 1.")


class PlainAdvantage(GroupCommon):
    """Estimators without settings of their own."""

    name: Literal["reinforce_plus_plus_baseline", "opo", "maxrl"] = training(..., "Estimator (algorithms.md).")


class ReturnAdvantage(Part):
    """reinforce_plus_plus: the discounted reward to go, whitened over the claim's tokens."""

    name: Literal["reinforce_plus_plus"] = training("reinforce_plus_plus", "Estimator (algorithms.md).")
    gamma: float = training(1.0, "Discount of a token.", gt=0, le=1)


class ClaimStdAdvantage(GroupCommon):
    """lite_ppo: the group's mean, the claim's deviation."""

    name: Literal["lite_ppo"] = training("lite_ppo", "Estimator (algorithms.md).")
    eps: float = training(1e-6, "Added to the standard deviation.", gt=0)


class GpgAdvantage(GroupCommon):
    """gpg: the centred reward, scaled up by the share of answers with a reward."""

    name: Literal["gpg"] = training("gpg", "Estimator (algorithms.md).")
    f_norm: float = training(1.0, "Divisor of the advantage.", gt=0)


class TokenBaselineAdvantage(Part):
    """Reward to go minus the baseline of least variance at that token of the group."""

    name: Literal["optimal_token_baseline", "tir_optimal_token_baseline"] = training(..., "Estimator (algorithms.md).")


class CriticAdvantage(Part):
    """gae: needs a critic."""

    name: Literal["gae"] = training("gae", "Estimator (algorithms.md).")
    gamma: float = training(1.0, "Discount of a token.", gt=0, le=1)
    lam: float = training(1.0, "Weight of later steps' errors.", ge=0, le=1)


class GreedyBaselineAdvantage(Part):
    """remax: the reward to go minus the reward of a greedy answer to the same prompt."""

    name: Literal["remax"] = training("remax", "Estimator (algorithms.md).")


class FunctionAdvantage(Part):
    """function: an estimator of your own (docs/hooks.md)."""

    name: Literal["function"] = training("function", "Estimator (algorithms.md).")
    path: str = training(..., "The function, `./file.py:function` or `package.module:function`.", min_length=1)


AdvantageConfig = Annotated[
    GroupAdvantage | BestOfGroupAdvantage | PartsAdvantage | PlainAdvantage | ReturnAdvantage | ClaimStdAdvantage
    | GpgAdvantage | TokenBaselineAdvantage | CriticAdvantage | GreedyBaselineAdvantage
    | FunctionAdvantage,
    Field(discriminator="name"), BeforeValidator(named("grpo"))]
