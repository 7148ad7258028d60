"""The policy under training: a stock Hugging Face causal LM that answers packed micro-batches with log-probs.

Its forward is whole (embedding to log-probs), so that a sharded model gathers its weights by its own hooks, whichever
part of the model needs them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from rl_core.errors import ConfigError
from rl_core.learner.attention import ATTENTION, Rows
from rl_core.learner.logprobs import TokenLogprobs, head_logprobs, head_squares

ATTENDS_BY_ROWS = {"full_attention", "sliding_attention"}
CHANGES_LOGITS = {"final_logit_softcapping": (None,), "logit_scale": (None, 1.0), "logits_scaling": (None, 1.0)}
"""Settings of some models that change logits outside the head, and the values that leave them alone."""


@dataclass(frozen=True, slots=True)
class PackInputs:
    """One micro-batch on the device of the model. `_P` places, `_S` loss tokens."""

    input_ids_P: Tensor
    position_ids_P: Tensor
    rows: Rows
    predictor_S: Tensor
    target_ids_S: Tensor
    temperature_S: Tensor


class Policy(nn.Module):
    """`Policy(model)(inputs)` -> TokenLogprobs. Dropout is off: log-probs are of the distribution that samples."""

    def __init__(self, model: PreTrainedModel, *, logits_chunk: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model
        self.logits_chunk = logits_chunk
        self.dtype = dtype

    def forward(self, inputs: PackInputs, *, entropy_gradient: bool = False, squares: bool = False) -> TokenLogprobs:
        model = cast(Any, self.model)
        device_type = inputs.input_ids_P.device.type
        with torch.autocast(device_type, dtype=torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            # use_cache=False is not a detail: with a cache, stock attention lets packed sequences see each other.
            hidden_PH = model.base_model(
                input_ids=inputs.input_ids_P[None], position_ids=inputs.position_ids_P[None], attention_mask=None,
                use_cache=False, headway_rows=inputs.rows).last_hidden_state[0]
            hidden_SH, head = hidden_PH[inputs.predictor_S], model.get_output_embeddings()
            found = head_logprobs(hidden_SH, head, inputs.target_ids_S, inputs.temperature_S, chunk=self.logits_chunk,
                                  entropy_gradient=entropy_gradient)
            if not squares:
                return found
            return found._replace(squares_S=head_squares(hidden_SH, head, inputs.temperature_S,
                                                         chunk=self.logits_chunk))

    def weights(self) -> dict[str, Tensor]:
        """Parameters by Hugging Face name, tied ones once; sharded ones as they are."""
        return dict(self.model.named_parameters())


def load_policy(directory: Path, *, logits_chunk: int, dtype: torch.dtype, device: torch.device) -> Policy:
    """Load a Hugging Face directory with float32 parameters and packed attention.

    Raises ConfigError (naming `model.path`) for an architecture whose packed sequences do not stay apart, or whose
    logits are changed outside the head.
    """
    transformers.logging.disable_progress_bar()
    model = cast(PreTrainedModel, cast(Any, AutoModelForCausalLM).from_pretrained(
        directory, dtype=torch.float32, attn_implementation=ATTENTION, local_files_only=True, trust_remote_code=False))
    _check_architecture(model, directory)
    model.eval()
    policy = Policy(model, logits_chunk=logits_chunk, dtype=dtype).to(device)
    _check_apart(policy, directory, device)
    return policy


def _check_architecture(model: PreTrainedModel, directory: Path) -> None:
    config: Any = model.config
    if not getattr(model, "_supports_attention_backend", False):
        raise ConfigError(f"model.path: {directory} is a {type(model).__name__}, whose attention cannot be replaced; "
                          "packed training needs an architecture with transformers' attention interface")
    others = sorted(set(getattr(config, "layer_types", None) or ()) - ATTENDS_BY_ROWS)
    if others:
        raise ConfigError(f"model.path: {directory} has layers {others}; packed training needs full or sliding "
                          "attention in every layer")
    for name, harmless in CHANGES_LOGITS.items():
        if getattr(config, name, None) not in harmless:
            raise ConfigError(f"model.path: {directory} sets {name}={getattr(config, name)!r}, which changes logits "
                              "outside the head; such models are not supported")


APART = 1e-3
"""Nats: far above the rounding of another packing, far below what one foreign token in the context changes."""


@torch.no_grad()
def _check_apart(policy: Policy, directory: Path, device: torch.device) -> None:
    """A sequence has the same log-probs behind another as alone: whatever mixes tokens outside attention is seen."""
    ids = torch.tensor([1, 2, 3, 1, 3, 2], device=device)
    here = torch.arange(3, device=device)

    def logprobs(tokens: Tensor, rows: tuple[Tensor, ...], predictor_S: Tensor) -> Tensor:
        home_P = torch.arange(len(tokens), device=device)
        return policy(PackInputs(tokens, here.repeat(len(rows)), Rows(rows, home_P), predictor_S,
                                 ids[[4, 5]], torch.ones(2, device=device))).logprob_S

    together = logprobs(ids, (here[None], here[None] + 3), torch.tensor([3, 4], device=device))
    alone = logprobs(ids[3:], (here[None],), torch.tensor([0, 1], device=device))
    error = float((together - alone).abs().max())
    if not error < APART * (1.0 if policy.dtype == torch.float32 else 100.0):
        raise ConfigError(f"model.path: {directory}: packed sequences of this architecture see each other (log-probs "
                          f"differ by {error:.2g} nats); it cannot be trained packed")
