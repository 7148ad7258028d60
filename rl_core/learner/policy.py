"""The policy under training: a stock Hugging Face causal LM that answers packed micro-batches with log-probs.

Its forward is whole (embedding to log-probs), so that a sharded model gathers its weights by its own hooks, whichever
part of the model needs them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from rl_core.config import LearnerConfig
from rl_core.errors import ConfigError
from rl_core.learner.adapter import adapter_weights, add_adapter, base_weights
from rl_core.learner.attention import ATTENTION, Call, Rows
from rl_core.learner.blocks import recompute_blocks
from rl_core.learner.logprobs import TokenLogprobs, head_likely, head_logprobs, head_others, head_squares
from rl_core.lora.settings import LoraConfig

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
    behind_Q: Tensor | None = None
    """Place of each sequence's last loss token, where a critic is asked for the value behind it."""


def hidden_states(model: PreTrainedModel, inputs: PackInputs) -> Tensor:
    """The last hidden state at every place of the pack, `[P, H]`."""
    # use_cache=False is not a detail: with a cache, stock attention lets packed sequences see each other.
    return cast(Any, model).base_model(
        input_ids=inputs.input_ids_P[None], position_ids=inputs.position_ids_P[None], attention_mask=None,
        use_cache=False, headway_rows=inputs.rows.afresh()).last_hidden_state[0]


class Policy(nn.Module):
    """`Policy(model)(inputs)` -> TokenLogprobs. Dropout is off: log-probs are of the distribution that samples."""

    def __init__(self, model: PreTrainedModel, *, logits_chunk: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model
        self.logits_chunk = logits_chunk
        self.dtype = dtype
        self.adapted = False
        """Whether it is an adapter over a frozen base that is trained."""

    def forward(self, inputs: PackInputs, *, entropy_gradient: bool = False, squares: bool = False,
                others_SK: Tensor | None = None, likely: tuple[int, int] | None = None) -> TokenLogprobs:
        """`squares`, `others_SK`: see TokenLogprobs. `likely`: (how many, vocabulary) of head_likely."""
        model = cast(Any, self.model)
        device_type = inputs.input_ids_P.device.type
        with torch.autocast(device_type, dtype=torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            hidden_PH = hidden_states(model, inputs)
            hidden_SH, head = hidden_PH[inputs.predictor_S], model.get_output_embeddings()
            found = head_logprobs(hidden_SH, head, inputs.target_ids_S, inputs.temperature_S, chunk=self.logits_chunk,
                                  entropy_gradient=entropy_gradient)
            if others_SK is not None:
                found = found._replace(others_SK=head_others(hidden_SH, head, others_SK, inputs.temperature_S,
                                                             chunk=self.logits_chunk))
            if likely is not None:
                log_SK, ids_SK = head_likely(hidden_SH, head, inputs.temperature_S, top_k=likely[0],
                                             vocabulary=likely[1], chunk=self.logits_chunk)
                found = found._replace(others_SK=log_SK, likely_ids_SK=ids_SK)
            if not squares:
                return found
            return found._replace(squares_S=head_squares(hidden_SH, head, inputs.temperature_S,
                                                         chunk=self.logits_chunk))

    @property
    def vocabulary(self) -> int:
        """Rows of the embedding."""
        return int(cast(Any, self.model.config).vocab_size)

    def weights(self) -> dict[str, Tensor]:
        """What is trained, by Hugging Face name: all parameters, tied ones once, or those of the adapter; sharded ones
        as they are."""
        named = self.model.named_parameters()
        return adapter_weights(named) if self.adapted else dict(named)

    def base_weights(self) -> dict[str, Tensor]:
        """The frozen parameters under an adapter, by the names that they have without one; without it none."""
        return base_weights(self.model.named_parameters()) if self.adapted else {}


def dtype_of(learner: LearnerConfig) -> torch.dtype:
    """What the learner's models compute in."""
    return torch.bfloat16 if learner.dtype == "bfloat16" else torch.float32


def load_policy(directory: Path, *, logits_chunk: int, dtype: torch.dtype, device: torch.device,
                field: str = "model.path", lora: LoraConfig | None = None, seed: int = 0,
                recompute: bool = False) -> Policy:
    """Load a Hugging Face directory with float32 parameters and packed attention; with `lora` under a new adapter,
    whose first values are a function of `seed`; with `recompute` by blocks that are computed again (blocks.py).

    Raises ConfigError (naming `field`) for an architecture whose packed sequences do not stay apart, or whose logits
    are changed outside the head, and for one that cannot have the adapter.
    """
    transformers.logging.disable_progress_bar()
    model = cast(PreTrainedModel, cast(Any, AutoModelForCausalLM).from_pretrained(
        directory, dtype=torch.float32, attn_implementation=ATTENTION, local_files_only=True, trust_remote_code=False))
    check_architecture(model, directory, field)
    _check_logits(model, directory, field)
    if lora is not None and lora.used:
        add_adapter(model, lora, seed=seed, directory=directory)
    model.eval()
    policy = Policy(model, logits_chunk=logits_chunk, dtype=torch.float32).to(device)
    policy.adapted = lora is not None and lora.used
    # In float32: one step of bfloat16 is as large as what a foreign token changes.
    check_apart(lambda inputs: policy(inputs).logprob_S, device, f"{field}: {directory}")
    policy.dtype = dtype
    if recompute:
        recompute_blocks(model, f"{field}: {directory}")
    return policy


def check_architecture(model: PreTrainedModel, directory: Path, field: str) -> None:
    """Raises ConfigError for a model whose attention cannot be the packed one."""
    if not getattr(model, "_supports_attention_backend", False):
        raise ConfigError(f"{field}: {directory} is a {type(model).__name__}, whose attention cannot be replaced; "
                          "packed training needs an architecture with transformers' attention interface")
    layers = cast(Any, model.config)
    others = sorted(set(getattr(layers, "layer_types", None) or ()) - ATTENDS_BY_ROWS)
    if others:
        raise ConfigError(f"{field}: {directory} has layers {others}; packed training needs full or sliding "
                          "attention in every layer")


def _check_logits(model: PreTrainedModel, directory: Path, field: str) -> None:
    for name, harmless in CHANGES_LOGITS.items():
        if (value := getattr(cast(Any, model.config), name, None)) not in harmless:
            raise ConfigError(f"{field}: {directory} sets {name}={value!r}, which changes logits outside the head; "
                              "such models are not supported")


APART = 1e-3
"""Nats: far above the rounding of another packing, far below what one foreign token in the context changes."""


@torch.no_grad()
def check_apart(answer: Callable[[PackInputs], Tensor], device: torch.device, where: str) -> None:
    """A sequence has the same answer (log-probs, or values like them) behind another as alone, and behind a prompt that
    it shares: whatever mixes tokens outside attention is seen. `where`: field and directory, for the ConfigError."""
    def at(*places: int) -> Tensor:
        return torch.tensor(places, device=device)

    def answers(tokens: Tensor, positions: Tensor, calls: tuple[Call, ...], *predictors: int) -> Tensor:
        rows = Rows(calls, torch.arange(len(tokens), device=device))
        return answer(PackInputs(tokens, positions, rows, at(*predictors), at(3, 2), torch.ones(2, device=device)))

    alone = answers(at(1, 3, 2), at(0, 1, 2), (Call(at(0, 1, 2)[None]),), 0, 1)
    behind = answers(at(1, 2, 3, 1, 3, 2), at(0, 1, 2, 0, 1, 2),
                     (Call(at(0, 1, 2)[None]), Call(at(3, 4, 5)[None])), 3, 4)
    shared = answers(at(1, 2, 3, 3, 2), at(0, 1, 2, 1, 2),
                     (Call(at(0)[None]), Call(torch.stack([at(1, 2), at(3, 4)]),
                                              torch.stack([at(0, 1, 2), at(0, 3, 4)]), at(1))), 0, 3)
    error = float(torch.stack([behind - alone, shared - alone]).abs().max())
    if not error < APART:
        raise ConfigError(f"{where}: packed sequences of this architecture see each other (log-probs "
                          f"differ by {error:.2g} nats); it cannot be trained packed")
