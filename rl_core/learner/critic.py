"""The critic: a transformer with a value head, over the same packed micro-batches as the policy.

The value of a token is that of the state before it: it is read where the policy predicts the token. The value behind an
answer, which only a cut answer has, is read at its last token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import transformers
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel

from rl_core.learner.attention import ATTENTION
from rl_core.learner.blocks import recompute_blocks
from rl_core.learner.policy import PackInputs, check_apart, check_architecture, hidden_states
from rl_core.model_setup import weight_files

FIELD = "learner.critic.path"
HEADS = ("score.weight", "v_head.weight", "classifier.weight")
"""Names of a value head in a sequence classifier's files."""


class Values(NamedTuple):
    """In units of reward, float32."""

    value_S: Tensor
    behind_Q: Tensor
    """Behind the last loss token of each sequence; empty where it is not asked for."""


class Critic(nn.Module):
    """`Critic(model)(inputs)` -> Values. Dropout is off."""

    def __init__(self, model: PreTrainedModel, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model
        self.head = nn.Linear(cast(Any, model.config).hidden_size, 1, bias=False)
        self.dtype = dtype
        nn.init.zeros_(self.head.weight)  # no lot is drawn: every value is 0 until the critic has learned

    def forward(self, inputs: PackInputs) -> Values:
        with torch.autocast(inputs.input_ids_P.device.type, dtype=torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            hidden_PH = hidden_states(self.model, inputs)
        behind_Q = inputs.predictor_S[:0] if inputs.behind_Q is None else inputs.behind_Q
        value = self.head(hidden_PH[torch.cat([inputs.predictor_S, behind_Q])].float()).squeeze(-1)
        return Values(value[:len(inputs.predictor_S)], value[len(inputs.predictor_S):])

    def weights(self) -> dict[str, Tensor]:
        """Parameters by name, `model.<Hugging Face name>` and `head.weight`; sharded ones as they are."""
        return dict(self.named_parameters())


def load_critic(directory: Path, *, dtype: torch.dtype, device: torch.device, recompute: bool = False) -> Critic:
    """A critic from the transformer of a Hugging Face directory, with its value head where it has one; else 0
    everywhere. `recompute`: as in load_policy.

    Raises ConfigError naming `learner.critic.path` for an architecture whose packed sequences do not stay apart.
    """
    transformers.logging.disable_progress_bar()
    model = cast(PreTrainedModel, cast(Any, AutoModel).from_pretrained(
        directory, dtype=torch.float32, attn_implementation=ATTENTION, local_files_only=True, trust_remote_code=False))
    check_architecture(model, directory, FIELD)
    model.eval()
    critic = Critic(model, dtype=dtype)
    if (head := stored_head(directory)) is not None and head.shape == critic.head.weight.shape:
        critic.head.weight.data.copy_(head)
    critic = critic.to(device)

    def states(inputs: PackInputs) -> Tensor:  # of a head that is 0 nothing could be seen
        return hidden_states(critic.model, inputs)[inputs.predictor_S].float()

    check_apart(states, device, f"{FIELD}: {directory}")
    if recompute:
        recompute_blocks(model, f"{FIELD}: {directory}")
    return critic


def stored_head(directory: Path) -> Tensor | None:
    """The head of a sequence classifier's files, `[labels, H]`; None where they have none."""
    for name in weight_files(directory):
        with safe_open(directory / name, framework="pt") as file:
            for head in HEADS:
                if head in file.keys():  # noqa: SIM118  # no mapping
                    return file.get_tensor(head).float()
    return None
