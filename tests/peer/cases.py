"""What is compared with TRL: settings of both sides that mean the same, as a table.

In all cases: 4 groups of 4 answers, two micro-batches, temperature 1, float32, one optimizer step without a bound on
the gradient norm. TRL adds 1e-4 to standard deviations and has no dual clip, so neither has Headway here.

In *bypass* cases the ratio is policy/behavior on both sides: TRL is given the behavior log-probs as its
`old_per_token_logps`, which it has where it generated with weights of some updates ago. In the others it is
policy/proximal, and 1, as it is in the first update of any batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

GROUPS, SIZE, LONGEST = 4, 4, 12
TRL_COMMON: dict[str, Any] = {
    "num_generations": SIZE, "max_completion_length": LONGEST, "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 2}
ONE_MICRO_BATCH = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1}
RLOO_COMMON = TRL_COMMON | {"beta": 0.0}
EPS = 1e-4
BYPASS = {"mode": "bypass"}
WAYS: dict[str, tuple[str, ...]] = {"own advantages": (), "advantages given": ("advantages",)}
"""What is given beside the batch."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One comparison: `Case(trl={"loss_type": "dapo"}, loss={"name": "ppo_clip"})`."""

    trl: dict[str, Any]
    """Of the trainer's config."""
    trainer: str = "grpo"
    loss: dict[str, Any] = field(default_factory=dict)
    """Of `learner.loss`."""
    advantage: dict[str, Any] = field(default_factory=dict)
    correction: dict[str, Any] = field(default_factory=lambda: dict(BYPASS))
    kl: dict[str, Any] = field(default_factory=dict)
    batch: str = "plain"
    reference: str = "near"
    rewards: tuple[str, ...] = ("reward",)
    temperature: float = 1.0

    @property
    def old(self) -> bool:
        """The ratio's denominator is given to TRL."""
        return self.trainer != "rloo" and self.correction.get("mode") == "bypass"

    @property
    def learner(self) -> dict[str, Any]:
        """Settings of the learner."""
        dual = {"dual_clip": None} if self.loss.get("name") in CLIPPED else {}
        estimator = {} if self.advantage.get("name") in ("rloo", "opo") else {"eps": EPS}
        return {"loss": {**dual, **self.loss}, "advantage": {**estimator, **self.advantage},
                "correction": self.correction, "kl": self.kl}

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of TRL."""
        common = RLOO_COMMON if self.trainer == "rloo" else TRL_COMMON
        return common | {"temperature": self.temperature} | self.trl


CLIPPED = ("ppo_clip", "opsm")
"""Losses with a dual clip."""
TOKEN_MEAN = {"name": "ppo_clip", "aggregation": "token_mean"}
SEQUENCE = {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4}
GSPO = {"name": "gspo", "clip_low": 3e-4, "clip_high": 4e-4}

SAME: dict[str, Case] = {
    # -- losses
    "dapo": Case(trl={"loss_type": "dapo"}, loss=TOKEN_MEAN),
    "dapo, asymmetric clip": Case(trl={"loss_type": "dapo", "epsilon": 0.1, "epsilon_high": 0.28},
                                  loss=TOKEN_MEAN | {"clip_low": 0.1, "clip_high": 0.28}),
    "dapo, two-sided clip": Case(trl={"loss_type": "dapo", "delta": 1.5}, loss=TOKEN_MEAN | {"delta": 1.5}),
    "dapo, first update": Case(trl={"loss_type": "dapo"}, loss=TOKEN_MEAN, correction={}),
    "dapo, temperature": Case(trl={"loss_type": "dapo"}, loss=TOKEN_MEAN, temperature=0.7, batch="cool"),
    "dapo, tokens of an environment": Case(trl={"loss_type": "dapo"}, loss=TOKEN_MEAN, batch="turns"),
    "dapo, cut answers masked": Case(trl={"loss_type": "dapo", "mask_truncated_completions": True},
                                     loss=TOKEN_MEAN | {"truncated": "mask"}, batch="cut"),
    "grpo": Case(trl={"loss_type": "grpo"}, loss={"name": "ppo_clip", "aggregation": "seq_mean_token_mean"}),
    "grpo, tokens of an environment": Case(
        trl={"loss_type": "grpo"}, loss={"name": "ppo_clip", "aggregation": "seq_mean_token_mean"}, batch="turns"),
    "dr_grpo": Case(trl={"loss_type": "dr_grpo", "scale_rewards": "none"},
                    loss={"name": "ppo_clip", "aggregation": "seq_mean_token_sum_norm"},
                    advantage={"normalize_by_std": False}),
    "bnpo, one micro-batch": Case(trl={"loss_type": "bnpo"} | ONE_MICRO_BATCH, loss=TOKEN_MEAN),
    "luspo of tokens": Case(trl={"loss_type": "luspo"}, loss={"name": "ppo_clip", "aggregation": "seq_mean_token_sum"}),
    "luspo": Case(trl={"loss_type": "luspo"} | SEQUENCE, loss=GSPO | {"aggregation": "seq_mean_token_sum"}),
    "gspo": Case(trl={"loss_type": "grpo"} | SEQUENCE, loss=GSPO),
    "gspo, wide clip": Case(trl={"loss_type": "grpo", "importance_sampling_level": "sequence"},
                            loss=GSPO | {"clip_low": 0.2, "clip_high": 0.2}),
    "gspo by length": Case(trl={"loss_type": "dr_grpo"} | SEQUENCE,
                           loss=GSPO | {"aggregation": "seq_mean_token_sum_norm"}),
    "cispo": Case(trl={"loss_type": "cispo", "epsilon_high": 1.2}, loss={"name": "cispo", "ratio_high": 1.2}),
    "cispo, as ScaleRL": Case(trl={"loss_type": "cispo", "epsilon_high": 5.0},
                              loss={"name": "cispo", "ratio_high": 5.0}),
    "sapo": Case(trl={"loss_type": "sapo"}, loss={"name": "sapo"}),
    "sapo, steep": Case(trl={"loss_type": "sapo", "sapo_temperature_pos": 2.0, "sapo_temperature_neg": 3.0},
                        loss={"name": "sapo", "tau_positive": 2.0, "tau_negative": 3.0}),
    "gmpo": Case(trainer="gmpo", trl={}, loss={"name": "gmpo", "clip_low": 0.4, "clip_high": 0.4}),
    "off-policy sequence mask": Case(trl={"loss_type": "dapo", "off_policy_mask_threshold": 0.05},
                                     loss={"name": "opsm", "opsm_delta": 0.05, "aggregation": "token_mean"}),
    # -- what composes with them
    "KL": Case(trl={"loss_type": "dapo", "beta": 0.1, "use_bias_correction_kl": False}, loss=TOKEN_MEAN,
               kl={"use": "loss", "coef": 0.1, "estimator": "k3"}),
    "KL, weighted": Case(trl={"loss_type": "dapo", "beta": 0.1}, loss=TOKEN_MEAN,
                         kl={"use": "loss", "coef": 0.1, "estimator": "k3+", "unbiased": True}),
    "KL, weighted, by sequence": Case(
        trl={"loss_type": "grpo", "beta": 0.1}, loss={"name": "ppo_clip", "aggregation": "seq_mean_token_mean"},
        kl={"use": "loss", "coef": 0.1, "estimator": "k3+", "unbiased": True}),
    "KL under cispo": Case(trl={"loss_type": "cispo", "epsilon_high": 1.2, "beta": 0.1},
                           loss={"name": "cispo", "ratio_high": 1.2},
                           kl={"use": "loss", "coef": 0.1, "estimator": "k3+", "unbiased": True}),
    "KL under gmpo": Case(trainer="gmpo", trl={"beta": 0.1}, loss={"name": "gmpo", "clip_low": 0.4, "clip_high": 0.4},
                          kl={"use": "loss", "coef": 0.1, "estimator": "k3"}),
    "entropy bonus, one micro-batch": Case(trl={"loss_type": "dapo", "entropy_coef": 0.05} | ONE_MICRO_BATCH,
                                           loss=TOKEN_MEAN | {"entropy_coef": 0.05}),
    "high entropy only, one micro-batch": Case(trl={"loss_type": "dapo", "top_entropy_quantile": 0.2} | ONE_MICRO_BATCH,
                                               loss=TOKEN_MEAN | {"top_entropy_quantile": 0.2}),
    # -- correction of vLLM's log-probs: decoupled, since TRL makes the proximal log-probs then
    "token_truncate": Case(
        trl={"loss_type": "dapo", "use_vllm": True, "vllm_importance_sampling_mode": "token_truncate",
             "vllm_importance_sampling_clip_max": 1.1}, loss=TOKEN_MEAN,
        correction={"weights": "token_truncate", "cap": 1.1}),
    "sequence_truncate": Case(
        trl={"loss_type": "dapo", "use_vllm": True, "vllm_importance_sampling_mode": "sequence_truncate"},
        loss=TOKEN_MEAN, correction={"weights": "sequence_truncate", "cap": 3.0}),
    "token_mask": Case(
        trl={"loss_type": "dapo", "use_vllm": True, "vllm_importance_sampling_mode": "token_mask",
             "vllm_importance_sampling_clip_min": 0.8, "vllm_importance_sampling_clip_max": 1.2}, loss=TOKEN_MEAN,
        correction={"weights": "token_icepop", "icepop_low": 0.8, "icepop_high": 1.2}),
    "sequence_mask": Case(
        trl={"loss_type": "dapo", "use_vllm": True, "vllm_importance_sampling_mode": "sequence_mask"}, loss=TOKEN_MEAN,
        correction={"weights": "sequence_icepop", "icepop_low": 0.0, "icepop_high": 3.0}),
    "token_truncate under cispo": Case(
        trl={"loss_type": "cispo", "epsilon_high": 1.2, "use_vllm": True,
             "vllm_importance_sampling_mode": "token_truncate"}, loss={"name": "cispo", "ratio_high": 1.2},
        correction={"weights": "token_truncate", "cap": 3.0}),
    # -- estimators
    "rewards by the batch's deviation": Case(trl={"loss_type": "dapo", "scale_rewards": "batch"}, loss=TOKEN_MEAN,
                                             advantage={"name": "lite_ppo"}),
    "rewards not scaled": Case(trl={"loss_type": "dapo", "scale_rewards": "none"}, loss=TOKEN_MEAN,
                               advantage={"normalize_by_std": False}),
}
