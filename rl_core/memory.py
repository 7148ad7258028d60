"""About how much memory a learner rank and an embedded engine take beside weights: what the plan says before a start.

Bytes a token were counted over saved tensors of Llama and Qwen3 blocks, in both dtypes. Importable without torch.
"""

from __future__ import annotations

from rl_core.config import Config, LearnerConfig, TorchEngine
from rl_core.model_setup import ModelFacts

OF_WIDTH = {"float32": 52, "bfloat16": 44}
"""Bytes that a decoder block keeps for its backward pass, a token and unit of hidden size."""
OF_INNER = {"float32": 16, "bfloat16": 8}
"""The same, a token and unit of the block's inner size."""
OF_INPUT = 4
"""Of a block that is computed again: its input, float32."""
OF_LOGIT = 16
"""Of a logit: itself, its log-prob, and the gradients of both."""


def activation_bytes(model: ModelFacts, learner: LearnerConfig) -> int:
    """Of one full micro-batch on one learner rank; 0 where the shapes of the blocks are not the usual ones."""
    down = [layer for layer in model.layers if layer.name.endswith("mlp.down_proj")]
    if not down:
        return 0
    hidden, inner = max(layer.outputs for layer in down), max(layer.inputs for layer in down)
    block = OF_WIDTH[learner.dtype] * hidden + OF_INNER[learner.dtype] * inner
    each = OF_INPUT * hidden * len(down) + block if learner.recompute else block * len(down)
    return learner.token_budget * each + learner.logits_chunk * model.vocabulary * OF_LOGIT


def cache_bytes(model: ModelFacts, config: Config) -> int:
    """Keys and values of an embedded engine whose slots are all as long as answers may become; 0 where they are not
    known, or the engine is not ours."""
    engine = config.rollout.engine
    if not isinstance(engine, TorchEngine):
        return 0
    numbers = sum(layer.outputs for layer in model.layers if layer.name.endswith((".k_proj", ".v_proj")))
    return engine.slots * config.served_tokens * numbers * (2 if engine.dtype == "bfloat16" else 4)
