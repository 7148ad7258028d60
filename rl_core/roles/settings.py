"""Settings of the models beside the policy: reference, critic, teacher. Importable without torch.

Their directories make the run what it is, and are copied into it; how they act can be amended.
"""

from __future__ import annotations

from typing import Literal

from rl_core.settings import Part, identity, training


class ReferenceConfig(Part):
    """The frozen policy that `learner.kl` is taken against."""

    path: str | None = identity(None, "Directory with the reference policy; null = the initial model, which is the "
                                      "base under an adapter.", min_length=1)
    refresh_every: int | None = training(None, "Training steps after which the policy's weights go into the reference, "
                                               "again and again; null = it is frozen.", ge=1)
    refresh_mix: float = training(1.0, "Share of the policy's weights in a refreshed reference; 1 = a copy.", gt=0,
                                  le=1)


class CriticConfig(Part):
    """The values that learner.advantage.name=gae reads."""

    path: str | None = identity(None, "Directory that the critic begins from, with its value head where it has one (a "
                                      "sequence classifier of one label); null = the initial model.", min_length=1)
    lr: float = training(1e-5, "Learning rate of the critic's own AdamW, the same in all steps.", gt=0)
    weight_decay: float = training(0.0, "Weight decay of that AdamW.", ge=0)
    max_grad_norm: float = training(1.0, "Clip of the critic's gradient norm.", gt=0)
    warmup_steps: int = training(0, "First training steps of the run, in which the critic learns and the policy does "
                                    "not.", ge=0)
    clip: float = training(0.5, "How far a value may go from the one at the start of the step before its loss pulls no "
                                "further, reward.", gt=0)


class TeacherConfig(Part):
    """On-policy distillation from a local model."""

    use: Literal["none", "advantage", "loss", "forward_topk"] = training(
        "none", "How the teacher acts on answers of the policy: reverse KL per token as an advantage or as a loss, or "
        "forward KL over the teacher's most likely tokens as a loss.")
    path: str | None = identity(None, "Directory with the teacher, a causal language model with the policy's "
                                      "vocabulary.", min_length=1)
    coef: float = training(1.0, "Its coefficient lambda.", gt=0)
    estimator: Literal["abs", "k2", "k3", "k1+", "abs+", "k2+", "k3+"] = training(
        "k3", "use=loss: estimator of the KL.")
    top_k: int = training(32, "use=forward_topk: most likely tokens of the teacher at each place; all others count as "
                              "one.", ge=1, le=1024)
