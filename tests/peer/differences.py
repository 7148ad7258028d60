"""Where the two mean different things (docs/algorithms.md 14): cases of TRL, and the nearest settings of Headway."""

from __future__ import annotations

from tests.peer.cases import GSPO, ONE_MICRO_BATCH, SEQUENCE, TOKEN_MEAN, Case

SEQ_MEAN = {"name": "ppo_clip", "aggregation": "seq_mean_token_mean"}
FIRST_UPDATE = {"mode": "decoupled"}
BOTH_REWARDS = Case(trl={"loss_type": "dapo", "multi_objective_aggregation": "normalize_then_sum"}, loss=TOKEN_MEAN,
                    advantage={"name": "gdpo"}, rewards=("reward", "style"))
RLOO = {"name": "ppo_clip", "aggregation": "seq_mean_token_sum"}


def high_entropy(share: float) -> Case:
    return Case(trl={"loss_type": "dapo", "top_entropy_quantile": share} | ONE_MICRO_BATCH,
                loss=TOKEN_MEAN | {"top_entropy_quantile": share})


DIFFERENT: dict[str, Case] = {
    "bnpo": Case(trl={"loss_type": "bnpo"}, loss=TOKEN_MEAN),
    "grpo, cut answers masked": Case(trl={"loss_type": "grpo", "mask_truncated_completions": True},
                                     loss=SEQ_MEAN | {"truncated": "mask"}, batch="cut"),
    "dr_grpo, cut answers masked": Case(
        trl={"loss_type": "dr_grpo", "mask_truncated_completions": True}, batch="cut",
        loss={"name": "ppo_clip", "aggregation": "seq_mean_token_sum_norm", "truncated": "mask"}),
    "gspo over tokens": Case(trl={"loss_type": "dapo"} | SEQUENCE, loss=GSPO | {"aggregation": "token_mean"}),
    "cispo by default": Case(trl={"loss_type": "cispo"}, loss={"name": "cispo"}),
    "far": Case(trl={"loss_type": "dapo"}, loss=TOKEN_MEAN, batch="far"),
    "KL of another model": Case(
        trl={"loss_type": "dapo", "beta": 1.0, "use_bias_correction_kl": False}, loss=TOKEN_MEAN,
        correction=FIRST_UPDATE, reference="other", kl={"use": "loss", "coef": 1.0, "estimator": "k3"}),
    "entropy bonus by answer": Case(trl={"loss_type": "grpo", "entropy_coef": 1.0} | ONE_MICRO_BATCH,
                                    loss=SEQ_MEAN | {"entropy_coef": 1.0}, correction=FIRST_UPDATE),
    "high entropy, four micro-batches": Case(
        trl={"loss_type": "dapo", "top_entropy_quantile": 0.2, "per_device_train_batch_size": 4,
             "gradient_accumulation_steps": 4}, loss=TOKEN_MEAN | {"top_entropy_quantile": 0.2}),
    "high entropy, a share between": high_entropy(0.201),
    "high entropy, the next token": high_entropy(0.21),
    "two rewards": BOTH_REWARDS,
    "two rewards, answers of one length": Case(
        trl=BOTH_REWARDS.trl, loss=TOKEN_MEAN, advantage={"name": "gdpo"}, rewards=BOTH_REWARDS.rewards, batch="even"),
    "rloo": Case(trainer="rloo", trl={}, loss=RLOO, advantage={"name": "rloo"}, correction=FIRST_UPDATE),
    "rloo, KL in the reward": Case(
        trainer="rloo", trl={"beta": 0.05}, loss=RLOO, advantage={"name": "rloo"}, correction=FIRST_UPDATE,
        kl={"use": "reward", "coef": 0.05, "estimator": "k1"}),
}

ONLY_THERE: dict[str, tuple[Case, str]] = {
    "vespo": (Case(trl={"loss_type": "vespo"}), "dapo"),
    "cispo, ratio of the answer": (
        Case(trl={"loss_type": "cispo", "epsilon_high": 1.2, "importance_sampling_level": "sequence"}), "cispo"),
    "sapo, ratio of the answer": (Case(trl={"loss_type": "sapo", "importance_sampling_level": "sequence"}), "sapo"),
    "gspo, two-sided clip": (Case(trl={"loss_type": "grpo", "importance_sampling_level": "sequence", "delta": 1.01}),
                             "gspo, wide clip"),
    "off-policy sequence mask of cispo": (
        Case(trl={"loss_type": "cispo", "epsilon_high": 1.2, "off_policy_mask_threshold": 0.05}), "cispo"),
    "token_truncate from below": (
        Case(trl={"loss_type": "dapo", "use_vllm": True, "vllm_importance_sampling_mode": "token_truncate",
                  "vllm_importance_sampling_clip_min": 0.9, "vllm_importance_sampling_clip_max": 1.1},
             correction={}), "token_truncate"),
}
"""What TRL has, and Headway has no settings for; and the case of cases.py that it would be without."""
